"""Reasons that the router gives for the misses of real servers, and their wording."""

import asyncio

import pytest

from router.tools.cli import main
from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import Json, chat, ids
from tests.support.servers.running_router import PATIENCE_S, Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

_POLL_S = 0.01


async def explained(kvferry: RunningRouter, answer: Answer) -> Json:
    """Return the router's record of a request, once there is one.

    The record follows the last byte of the answer.
    """
    path = f"/kvferry/requests/{answer.headers['x-kvferry-request-id']}"
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told = await kvferry.get(path)
            if told.status != 404:
                assert told.status == 200, told.body
                assert sum(told.json["missed"].values()) == told.json["computed_tokens"]
                return told.json
            await asyncio.sleep(_POLL_S)


async def test_a_divergence_in_the_second_of_four_messages(
    llama_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await llama_server("llama", slots=1)
    rest = ("They all float, one hopes.", "And which of them is yours?")
    ours = chat(1, "Tell me about red boats.", *rest, length=20)
    theirs = chat(1, "Tell me about blue boats, please.", *rest, length=20)
    async with running([("a", server.url)], None, yaml="diagnostics: {show_content: true}") as f:
        await f.chat(theirs)
        told = await explained(f, await f.chat(ours))
        name = told["id"]
        code = await asyncio.to_thread(main, ["explain", name, "--url", f.url])

    nearest = told["nearest"]
    assert nearest["slot"] == {"backend": "a", "index": 0}
    assert nearest["before"]["text"].endswith("about")
    assert "red boats" in nearest["prompt"]["text"]
    assert "blue boats" in nearest["held"]["text"]
    assert told["missed"] == {"diverged": told["prompt_tokens"] - nearest["common_tokens"]}
    printed = capsys.readouterr().out
    assert code == 0
    assert "red boats" in printed


async def test_displaced(llama_server: StartServer) -> None:
    """Another prompt displaces the content of the only slot, and nothing is ever saved."""
    server = await llama_server("llama", slots=1)
    async with running([("a", server.url)], None) as kvferry:
        first = await kvferry.complete(ids(1, 300))
        # The tokens of an answer are read a moment after its end.
        await kvferry.until(lambda state: state["slots"][0]["resident_tokens"] > 300)
        await kvferry.until(lambda state: not state["slots"][0]["unread_tokens"])
        await kvferry.complete(ids(2, 300))
        told = await explained(kvferry, await kvferry.complete(ids(1, 300) + ids(3, 50)))

    assert first.status == 200
    assert told["missed"] == {"displaced": 300, "diverged": 50}


async def test_evicted(llama_server: StartServer) -> None:
    """There is room for one snapshot of two; the catalog decides which one it evicts."""
    server = await llama_server("llama", slots=1)
    limits = "store: {max_tokens: 650}"
    async with running([("a", server.url)], server.kv_dir, yaml=limits) as kvferry:
        await kvferry.complete(ids(1, 300))
        await kvferry.until(saved(300))
        await kvferry.complete(ids(2, 400))
        state = await kvferry.until(lambda state: state["snapshots"]["evicted"] == 1)
        seed, n = (2, 400) if state["snapshots"]["tokens"] < 400 else (1, 300)
        server.kill()  # else the second prompt would still be resident
        await kvferry.until(lambda state: not state["backends"][0]["up"])
        await server.restart()
        await kvferry.until_up()
        told = await explained(kvferry, await kvferry.complete(ids(seed, n) + ids(4, 50)))

    assert told["missed"] == {"evicted": n, "diverged": 50}


@pytest.mark.parametrize("kind", ["lfm2", "mamba"])
async def test_a_memory_that_cannot_go_back(llama_server: StartServer, kind: str) -> None:
    """The miss counts as `kind`; no boundary save is made where it would help."""
    server = await llama_server(kind, slots=1)
    yaml = "policy: {reuse_probability: 0, coalesce_above: 'off'}"
    async with running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry:
        await kvferry.complete(ids(1, 300) + ids(2, 100))
        told = await explained(kvferry, await kvferry.complete(ids(1, 300) + ids(3, 100)))

    reused = told["prompt_tokens"] - told["computed_tokens"]
    assert told["missed"] == {"kind": 300 - reused, "diverged": 100}
    assert told["nearest"]["common_tokens"] == 300


async def test_the_reasons_add_up_over_a_mixed_run(llama_server: StartServer) -> None:
    """The missed tokens of all reasons add up to the computed tokens, as the metrics count them."""
    server = await llama_server("llama", slots=2)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        prompts = [ids(1, 300) + ids(i, 30 * i) for i in range(2, 6)]
        await asyncio.gather(*(kvferry.complete(prompt) for prompt in prompts * 2))
        await kvferry.complete(ids(7, 200), cache_prompt=False)
        await kvferry.complete(ids(8, 200), n_predict=2, n_cmpl=2)
        await kvferry.post("/infill", {"input_prefix": "x", "input_suffix": "y", "n_predict": 1})
        await kvferry.chat(chat(1, "Hello.", length=10))
        await kvferry.until_quiet()
        metrics = await kvferry.metrics()

    missed = {k: v for k, v in metrics.items() if k.startswith("kvferry_missed_tokens_total{")}
    assert sum(missed.values()) == metrics['kvferry_prompt_tokens_total{source="computed"}'] > 0
    assert missed['kvferry_missed_tokens_total{reason="declined"}'] >= 200
