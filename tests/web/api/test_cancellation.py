"""An abandoned request costs nothing more, at whatever point the client disconnects.

A gate of the fake stops the request at the point in question; test_cancellation_real.py tests real
servers.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

PROMPT = "p" * 300  # more than store.min_tokens: gets a snapshot
OTHER = "q" * 300
STREAM: Json = {"stream": True}


FAKE = {"n_slots": 1}


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], tmp_path) as router:
        yield router


@asynccontextmanager
async def leaving(kvferry: RunningRouter, prompt: str, **fields: object) -> AsyncIterator[None]:
    """Send a request before the block, and disconnect after the block."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(prompt, **fields))
        yield
        task.cancel()


def waiting(n: int) -> Callable[[Json], bool]:
    """Return a predicate for `until`: `n` requests are queued."""
    return lambda state: len(state["queue"]) == n


def phase(name: str) -> Callable[[Json], bool]:
    """Return a predicate for `until`: a slot is in this phase."""
    return lambda state: any(slot["phase"] == name for slot in state["slots"])


async def saved(kvferry: RunningRouter, prompt: str) -> Answer:
    """Save `prompt` as a snapshot, then displace it from the slot; return the first answer."""
    answer = await kvferry.complete(prompt)
    await kvferry.until(lambda state: state["snapshots"]["count"] >= 1)
    await kvferry.until_quiet()
    await kvferry.complete(OTHER)
    await kvferry.until(lambda state: state["snapshots"]["count"] >= 2)
    await kvferry.until_quiet()
    return answer


def prompts(fake: FakeLlama) -> list[object]:
    """Return the prompts of all completions that the fake received."""
    return [body.get("prompt") for path, body in fake.bodies if path == "/completion"]


async def test_while_queued(fake: FakeLlama, kvferry: RunningRouter) -> None:
    """An abandoned request causes no restore, prefill or save; the next in the queue is served."""
    await saved(kvferry, PROMPT)
    fake.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(kvferry.complete("first"))
        await kvferry.until(phase("running"))
        async with leaving(kvferry, PROMPT + "gone"):
            await kvferry.until(waiting(1))
            third = group.create_task(kvferry.complete("third"))
            await kvferry.until(waiting(2))
        await kvferry.until(waiting(1))
        before = dict(fake.counts)
        fake.decode_gate.set()
        assert (await first).status == (await third).status == 200
    await kvferry.until_quiet()

    assert PROMPT + "gone" not in prompts(fake)
    assert fake.counts["restore", 0] == before["restore", 0]
    assert fake.counts["completion", 0] == before["completion", 0] + 1


async def test_during_a_restore(fake: FakeLlama, kvferry: RunningRouter) -> None:
    """A restore cannot be cancelled: at its end the slot is free and holds the restored tokens."""
    cold = await saved(kvferry, PROMPT)
    fake.action_gate.clear()
    async with leaving(kvferry, PROMPT):
        await kvferry.until(phase("preparing"))
        await fake.until(lambda: fake.actions_waiting == 1)
    assert (await kvferry.state())["slots"][0]["phase"] == "preparing"
    fake.action_gate.set()
    await kvferry.until_quiet()

    asked = len(prompts(fake))
    again = await kvferry.complete(PROMPT)
    assert (again.text, again.source) == (cold.text, "resident")
    assert len(prompts(fake)) == asked + 1


async def test_in_the_middle_of_a_stream(fake: FakeLlama, kvferry: RunningRouter) -> None:
    """The backend stops; the length of its slot's content tells which tokens it has computed."""
    fake.faults.hang_after_chunks = 4
    body = {"prompt": PROMPT, "n_predict": 50, **STREAM}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        await response.content.readuntil(b"\n\n")
        await kvferry.until(phase("running"))
    await fake.until(lambda: not fake.slots[0].busy)
    state = await kvferry.until_quiet()

    assert state["slots"][0]["resident_tokens"] == len(fake.slots[0].tokens)
    assert (await kvferry.metrics())['kvferry_requests_total{outcome="client_gone"}'] == 1
    fake.faults.hang_after_chunks = None
    assert (await kvferry.complete(PROMPT)).cached == len(PROMPT) - 1


@pytest.mark.fault(
    "a client leaves, and the server goes on",
    "generating",
    client="others wait until the slot is known to be idle",
)
async def test_slot_is_not_leased_again_before_the_backend_is_idle(
    fake: FakeLlama, kvferry: RunningRouter
) -> None:
    """The fake goes on with an abandoned request, as a real server may for a second."""
    fake.faults.ignores_leaving = True
    fake.decode_gate.clear()
    async with leaving(kvferry, PROMPT):
        await fake.until(lambda: fake.slots[0].busy)
    await kvferry.until(phase("abandoned"))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete("next"))
        await kvferry.until(waiting(1))
        assert fake.slots[0].busy
        fake.decode_gate.set()
        assert (await task).status == 200


async def test_leaving_between_the_grant_and_the_request(
    fake: FakeLlama, kvferry: RunningRouter
) -> None:
    """Many requests are abandoned, each at another moment: nothing is left over."""
    for steps in range(60):
        async with leaving(kvferry, PROMPT):
            for _ in range(steps):
                await asyncio.sleep(0)
    await kvferry.until_quiet()
    assert (await kvferry.complete(PROMPT)).status == 200
