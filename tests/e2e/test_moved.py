"""Servers that move KV in a slot to other positions, as a client or an operator wants.

No other request reuses such KV, on that server or elsewhere (docs/llama-server.md section 2.3).
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import differs_in_earnest, saved
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

WHOLE = ids(1, 900)
LESS = [*WHOLE[:100], *WHOLE[300:]]  # like a conversation without some old messages
MORE = [*LESS, *ids(2, 5)]
OTHER = ids(3, 900)
REUSE: Json = {"n_cache_reuse": 16}
# More than any model of the tests computes for the probe.
LONG_CHUNKS = ("--cache-reuse", "540")
ASKED: Json = {"n_predict": 1, "temperature": 0, "n_probs": 5}
MOVES = pytest.param(REUSE, (), id="a request")
SERVER_MOVES = pytest.param({}, LONG_CHUNKS, id="the server")
SERVER_MOVES_AS_WISHED = pytest.param({"n_cache_reuse": None}, LONG_CHUNKS, id="as it likes")


async def ask(kvferry: RunningRouter | Direct, prompt: Sequence[int], **more: object) -> Answer:
    answer = await kvferry.post("/completion", ASKED | {"prompt": list(prompt)} | more)
    assert answer.status == 200, answer.body
    return answer


async def fresh(client: Direct, prompt: Sequence[int]) -> Answer:
    return await ask(client, prompt, cache_prompt=False)


@pytest.mark.parametrize(("wish", "flags"), [MOVES, SERVER_MOVES, SERVER_MOVES_AS_WISHED])
@pytest.mark.parametrize("taken", [False, True], ids=["same slot", "after others"])
async def test_others_get_what_a_prefill_gives(
    llama_server: StartServer, wish: Json, flags: Sequence[str], taken: bool
) -> None:
    reference = await llama_server("llama", slots=1)
    server = await llama_server("llama", slots=1, extra_args=flags)
    async with direct(reference) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        await ask(kvferry, WHOLE)
        found = await ask(kvferry, LESS, **wish)
        if wish:  # its client is served as by the server alone
            assert found.cached > 600
        assert bool(differs_in_earnest(found, await fresh(client, LESS))) == bool(wish)
        if taken:
            await asyncio.sleep(0.3)  # time for an idle save
            await ask(kvferry, OTHER)
            await kvferry.until(saved(len(OTHER)))
        for prompt in (MORE, LESS):
            found = await ask(kvferry, prompt)
            assert differs_in_earnest(found, await fresh(client, prompt)) == ""


@pytest.mark.parametrize("saves", [True, False])
async def test_a_server_without_snapshots_may_do_as_it_likes(tmp_path: Path, saves: bool) -> None:
    kv_dir = tmp_path if saves else None
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], kv_dir) as kvferry:
        for fields in ({}, {"n": 2}, {"n_cache_reuse": 5}):
            fake.bodies.clear()
            await kvferry.complete("x", **fields)
            sent = [body for _, body in fake.bodies if body.get("prompt") == "x"]
            expected = fields.get("n_cache_reuse", 0 if saves else None)
            assert [body.get("n_cache_reuse") for body in sent] == [expected]


async def test_turns_that_need_no_moving_are_reused(llama_server: StartServer) -> None:
    """Turns are reused even for a client that always permits the server to move KV."""
    server = await llama_server("llama", slots=1)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        await ask(kvferry, LESS, **REUSE)
        assert (await ask(kvferry, MORE, **REUSE)).cached >= len(LESS) - 1
        await kvferry.until(saved(len(MORE)))


async def test_an_answer_over_the_end_of_the_context(llama_server: StartServer) -> None:
    """The server dropped half of the context and moved the rest: no snapshot of it is made."""
    server = await llama_server("llama", slots=1, ctx=1024, extra_args=("--context-shift",))
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        prompt = ids(4, 900)
        answer = await ask(kvferry, prompt, n_predict=300, ignore_eos=True)
        assert answer.json["truncated"]
        state = await kvferry.until_quiet()
        await asyncio.sleep(0.3)
        assert state["slots"][0]["resident_tokens"] == 0
        assert not (await kvferry.state())["snapshots"]["items"]
