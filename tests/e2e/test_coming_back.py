"""Clients that abandon an answer and return at once with the same prompt and more.

Examples are a person stopping and continuing a chat, and a program retrying.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from router.base.tasks import spawn
from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

pytestmark = pytest.mark.thorough

N = 2500


async def leave(kvferry: RunningRouter, prompt: list[int]) -> None:
    """Abandon an endless stream after its first lines."""
    body = {"prompt": prompt, "n_predict": -1, "ignore_eos": True, "stream": True}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        for _ in range(3):
            assert await response.content.readline()


async def come_back(kvferry: RunningRouter, prompt: list[int]) -> Answer:
    await leave(kvferry, prompt)
    return await kvferry.complete([*prompt, *ids(99, 10)])


@pytest.mark.parametrize("slots", [1, 2])
async def test_who_comes_back_at_once_goes_on(llama_server: StartServer, slots: int) -> None:
    server = await llama_server("llama", slots=slots)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        for seed in range(4):
            answer = await come_back(kvferry, ids(seed, N))
            # Later answers are known to be long: their prompts were saved before (branch saves).
            assert answer.source in ("resident", "snapshot")
            assert answer.cached >= N - 1


async def test_several_that_leave_together(llama_server: StartServer) -> None:
    """Each client reuses its whole prompt, on a server with all its requests abandoned.

    No abandoned answer comes near the end of its slot, where KV might be shifted.
    """
    server = await llama_server("llama", slots=3, ctx=48_000)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        # Computing these again costs more than to wait until an abandoned slot is surely free.
        prompts = [ids(seed, 4 * N) for seed in range(3)]
        answers = await asyncio.gather(*(come_back(kvferry, prompt) for prompt in prompts))
        # An answer known to be long had its prompt saved before, less the last token (branch save):
        # that file may go into a slot that is free before the client's own slot is.
        assert all(answer.source in ("resident", "snapshot") for answer in answers)
        assert all(answer.cached >= 4 * N - 1 for answer in answers)


async def test_who_leaves_before_its_turn_is_told_of(llama_server: StartServer) -> None:
    """A client that disconnects in the queue or during its prefill is recorded as `client_gone`."""

    def waits(state: Json) -> bool:
        return bool(len(state["queue"]) == 1)

    def computes(state: Json) -> bool:
        return bool(state["slots"][0]["phase"] == "preparing")

    server = await llama_server("llama", slots=1, ctx=16_000)
    yaml = "policy: {coalesce_above: 1ms}"
    async with running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry:
        endless = spawn(
            _ask(kvferry, ids(1, 50), n_predict=-1, ignore_eos=True, stream=True), name="endless"
        )
        await kvferry.until(lambda state: state["slots"][0]["phase"] == "running")
        await _gone(kvferry, waits)
        endless.cancel()
        with suppress(asyncio.CancelledError):
            await endless
        await kvferry.until_quiet()
        await _gone(kvferry, computes)
        await kvferry.until_quiet()

        assert (await kvferry.metrics())['kvferry_requests_total{outcome="client_gone"}'] == 3
        told = (await kvferry.get("/kvferry/requests")).json["requests"]
        slots = [one["slot"] for one in told if one["outcome"] == "client_gone"]
        assert sorted(slots, key=str) == [0, None, None]


async def _ask(kvferry: RunningRouter, prompt: list[int], **fields: object) -> None:
    await kvferry.complete(prompt, **fields)


async def _gone(kvferry: RunningRouter, when: Callable[[Json], bool]) -> None:
    task = spawn(_ask(kvferry, ids(2, 12_000)), name="gone")
    await kvferry.until(when)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
