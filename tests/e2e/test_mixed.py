"""Many kinds of requests at once: planned and reported reuse agree, and the sums are right."""

import asyncio
import random

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, reuse
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough


async def _converse(kvferry: RunningRouter, seed: int, turns: int) -> list[Answer]:
    """Hold a conversation on a route chosen by `seed`; return its answers."""
    chance = random.Random(seed)
    messages = chat(seed % 3, sentences(seed, 3), length=40)
    answers = []
    for turn in range(turns):
        fields = {"stream": chance.random() < 0.5, "max_tokens": chance.randint(1, 24)}
        match seed % 4:
            case 0:
                body: Json = {
                    "system": messages[0]["content"],
                    "messages": messages[1:],
                    "model": "m",
                }
                answer = await kvferry.post("/v1/messages", body | fields)
            case 1:
                text = "\n".join(message["content"] for message in messages)
                answer = await kvferry.post("/v1/completions", {"prompt": text} | fields)
            case _:
                answer = await kvferry.chat(messages, **fields)
        assert answer.status == 200, answer.body
        answers.append(answer)
        said = answer.text or "well"
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": sentences(1000 * seed + turn, 2)},
        ]
    return answers


async def test_planned_and_reported_reuse_agree(llama_server: StartServer) -> None:
    """200 requests, 6 clients, 2 servers with 2 slots, 20 conversations on 3 routes."""
    a = await llama_server("llama", slots=2, ctx=16384)
    b = await llama_server("llama", slots=2, ctx=16384)
    async with running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        gate = asyncio.Semaphore(6)

        async def one(seed: int) -> None:
            async with gate:
                await _converse(kvferry, seed, 10)

        await asyncio.gather(*(one(seed) for seed in range(20)))
        await kvferry.until_quiet()
        metrics = await kvferry.metrics()

    sources = ("resident", "snapshot", "computed")
    reported = {s: metrics[f'kvferry_prompt_tokens_total{{source="{s}"}}'] for s in sources}
    total = sum(reported.values())
    gap = (
        metrics["kvferry_reuse_overestimated_tokens_total"]
        + metrics["kvferry_reuse_underestimated_tokens_total"]
    )
    assert metrics['kvferry_requests_total{outcome="ok"}'] == 200
    assert gap <= 0.01 * total, (gap, reported)
    # Each of ten turns extends the last one: most tokens are reused.
    assert reported["computed"] <= 0.35 * total


async def test_two_models_never_mix(llama_server: StartServer) -> None:
    """Models of equal shape with other weights: requests and KV stay with their model."""
    a = await llama_server("llama", slots=1, extra_args=["-a", "one"])
    b = await llama_server("llama", slots=1, seed=1, extra_args=["-a", "two"])
    prompt = ids(1, 1500)
    async with running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        one = await kvferry.complete(prompt, model="one")
        await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
        two = await kvferry.complete(prompt, model="two")
        assert (one.slot[0], two.slot[0]) == ("a", "b")
        assert two.source == "cold"
        assert two.text != one.text
        await kvferry.until(lambda state: state["snapshots"]["count"] == 2)
        namespaces = {item["namespace"] for item in (await kvferry.state())["snapshots"]["items"]}
        assert len(namespaces) == 2

        listed = await kvferry.get("/v1/models")
        assert [model["id"] for model in listed.json["data"]] == ["one", "two"]
        unknown = await kvferry.complete(prompt, model="three")
        assert unknown.status == 404
        assert "'three'" in unknown.json["error"]["message"]
        assert all_but_one(await kvferry.complete(prompt, model="one"))
        assert reuse([await kvferry.complete(prompt, model="two")]) > 0.99
