"""Counters add up: reused and computed tokens equal what the backends reported."""

import asyncio
from itertools import count

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import StartServer
from tests.support.conversations.conversing import runs_on, saved
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

PARTS = ("resident", "snapshot", "computed")
TALKS, TURNS = 3, 3
LEAVING, N_LEFT = TALKS * TURNS, 200  # abandoned requests, and tokens of each prompt


async def _scrape(kvferry: RunningRouter) -> dict[tuple[str, str], float]:
    """Scrape the metrics, with the backends' own, and sum over backends.

    A key is a sample's name and its only label besides `backend`.
    """
    text = (await kvferry.get("/metrics?backends=1")).body.decode()
    sums: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = [value for label, value in sample.labels.items() if label != "backend"]
            key = sample.name, " ".join(rest)
            sums[key] = sums.get(key, 0.0) + sample.value
    return sums


async def _leave(kvferry: RunningRouter, prompt: list[int]) -> None:
    """Abandon a long answer after its first bytes."""
    body = {"prompt": prompt, "n_predict": -1, "ignore_eos": True, "stream": True}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        await response.content.readany()
        response.close()


async def _several_at_once(kvferry: RunningRouter) -> list[Answer]:
    """Hold three conversations on two routes, streamed and not; return their answers.

    Between turns, requests are abandoned and refused.
    """
    firsts = count(300)

    async def converse(seed: int) -> list[Answer]:
        messages = chat(seed % 2, sentences(seed, 3), length=30)
        answers = []
        for turn in range(TURNS):
            stream: Json = {"stream": (turn + seed) % 2 == 0}
            if seed == 2:
                text = "\n".join(message["content"] for message in messages)
                answers.append(await kvferry.complete(text, **stream))
            else:
                answers.append(await kvferry.chat(messages, **stream))
            # Each prompt has a first token of its own: all of it is computed.
            prompt = [next(firsts), *ids(1, N_LEFT - 1)]
            await _leave(kvferry, prompt)
            assert (await kvferry.complete(ids(1, 9), temperature="hot")).status == 400
            messages.append({"role": "assistant", "content": answers[-1].text or "well"})
            messages.append({"role": "user", "content": sentences(10 * seed + turn, 2)})
        return answers

    talks = await asyncio.gather(*(converse(seed) for seed in range(TALKS)))
    return [answer for talk in talks for answer in talk]


async def _hop(kvferry: RunningRouter) -> list[Answer]:
    """Send one prompt four times, and return the answers.

    The prompt runs on a slot, on the one beside it while the first is busy, and twice on the other
    server.
    """
    prompt = ids(7, 900)
    first = await kvferry.complete(prompt, model="a")
    await kvferry.until(saved(900))
    name, index = first.slot
    async with asyncio.TaskGroup() as group:
        long = {"prompt": prompt, "n_predict": -1, "ignore_eos": True, "stream": True}
        busy = group.create_task(
            kvferry.post("/completion", long | {"id_slot": index, "model": "a"})
        )
        await kvferry.until(runs_on(name, index))
        beside = await kvferry.complete(prompt, model="a")
        busy.cancel()
    other = await kvferry.complete(prompt, model="b")
    assert len({first.slot, beside.slot, other.slot}) == 3
    again = await kvferry.complete(prompt, model="b")
    return [first, beside, other, again]


async def test_every_prompt_token_is_counted_once(llama_server: StartServer) -> None:
    """resident + snapshot + computed = the prompt tokens that the backends reported, exactly.

    Each other metric counts the same requests.
    """
    flags = ["--metrics"]
    a = await llama_server("llama", slots=2, ctx=32768, extra_args=["-a", "a", *flags])
    b = await llama_server("llama", slots=2, ctx=32768, extra_args=["-a", "b", *flags])
    yaml = "policy: {coalesce_above: 20ms}"
    async with running([("a", a.url), ("b", b.url)], a.kv_dir, yaml=yaml) as kvferry:
        before = await _scrape(kvferry)
        answers = [*await _several_at_once(kvferry), *await _hop(kvferry)]
        await kvferry.until_quiet()
        after = await _scrape(kvferry)
    assert [answer.status for answer in answers] == [200] * len(answers)

    counted = {part: after["kvferry_prompt_tokens_total", part] for part in PARTS}
    assert sum(counted.values()) == sum(answer.prompt_tokens for answer in answers)
    assert all(counted.values()), counted
    # Nothing was reported for abandoned requests, but the backends computed their prompts. The long
    # answer of the hop adds the last token of its prompt; the rest was reused.
    name = "llamacpp:prompt_tokens_total", ""
    assert after[name] - before[name] == counted["computed"] + LEAVING * N_LEFT + 1
    ended = {"ok": len(answers), "client_gone": LEAVING + 1, "refused": LEAVING}
    for outcome, number in (ended | {"backend_error": 0}).items():
        assert after["kvferry_requests_total", outcome] == number
        assert after["kvferry_backend_requests_total", outcome] == number
    plans = [value for (metric, _), value in after.items() if metric == "kvferry_plans_total"]
    assert sum(plans) == sum(ended.values())
    assert after["kvferry_prefill_avoided_seconds_total", "snapshot"] > 0
    said = sum(answer.timings["predicted_n"] for answer in answers)
    # Of the streams that were left the tokens that came are counted; the backends generated more.
    name = "llamacpp:tokens_predicted_total", ""
    assert said < after["kvferry_generated_tokens_total", ""] <= after[name] - before[name]
