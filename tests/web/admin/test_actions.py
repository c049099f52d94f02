"""Operators' actions on a running router: the right to them, and the effect on requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.base.types import BackendId
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.running_router import Answer, RunningRouter, running

PROMPT = "p" * 300
RESTORED = len(PROMPT) - 1
NEVER_SAVED = "store: {idle_save_after: 'off'}"


@pytest.fixture
async def a(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path, n_slots=1) as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def b(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path, n_slots=1) as server:
        yield server
        assert server.violations == []


@pytest.fixture
async def kvferry(a: FakeLlama, b: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", a.url), ("b", b.url)], tmp_path, yaml=NEVER_SAVED) as router:
        yield router


def assert_good(answer: Answer) -> None:
    said = bytes(generate(list(PROMPT.encode()), 8)).decode()
    assert (answer.status, answer.text) == (200, said)


async def health(kvferry: RunningRouter) -> dict[str, str]:
    found: dict[str, str] = (await kvferry.get("/kvferry/health")).json["backends"]
    return found


async def drained(kvferry: RunningRouter) -> dict[str, float]:
    """Return the metric that silences the alert for backends that are down, by backend."""
    metrics, name = await kvferry.metrics(), "kvferry_backend_drained"
    return {backend: metrics[f'{name}{{backend="{backend}"}}'] for backend in "ab"}


async def test_what_is_not_there(kvferry: RunningRouter) -> None:
    nobody, nothing = await kvferry.operate("c", "drain"), await kvferry.operate("a", "kill")

    assert (nobody.status, nothing.status) == (404, 404)
    assert "a, b" in nobody.json["error"]["message"]
    assert "drain or undrain" in nothing.json["error"]["message"]


async def test_a_drained_backend(a: FakeLlama, b: FakeLlama, kvferry: RunningRouter) -> None:
    """The stream is finished, its slot is saved, and the next request continues elsewhere."""
    a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT, stream=True))
        await a.until(lambda: a.slots[0].busy)
        answer = await kvferry.operate("a", "drain")
        assert (answer.status, answer.json) == (200, {"backend": "a", "state": "draining"})
        assert (await health(kvferry))["a"] == "draining"
        assert await drained(kvferry) == {"a": 1, "b": 0}
        other = await kvferry.complete("x" * 300)
        assert other.slot[0] == "b"
        a.decode_gate.set()
    assert_good(task.result())
    state = await kvferry.until_is("a", "drained")

    assert (await health(kvferry)) == {"a": "drained", "b": "up"}
    assert await drained(kvferry) == {"a": 1, "b": 0}
    assert [slot["phase"] for slot in state["slots"] if slot["backend"] == "a"] == ["lost"]
    again = await kvferry.complete(PROMPT)
    assert_good(again)
    assert (again.slot[0], again.source, again.cached) == ("b", "snapshot", RESTORED)


async def test_nobody_looks_at_a_drained_backend(a: FakeLlama, kvferry: RunningRouter) -> None:
    """A drained backend may be stopped: the router does not check it and reports nothing."""
    await kvferry.operate("a", "drain")
    await kvferry.until_is("a", "drained")
    seen = len(a.seen)
    kvferry.router.selection.doubt(BackendId("a"))
    for _ in range(3):
        await kvferry.complete(PROMPT)
    await a.go_down()
    assert (await kvferry.operate("a", "drain")).json["state"] == "drained"
    assert (await health(kvferry))["a"] == "drained"
    assert len(a.seen) == seen

    await a.come_up()
    await kvferry.operate("a", "undrain")
    await kvferry.until_is("a", "up")
    assert (await kvferry.operate("a", "undrain")).json["state"] == "up"


async def test_it_comes_back_with_what_it_has_now(a: FakeLlama, kvferry: RunningRouter) -> None:
    """The backend may have been used meanwhile, so it is attached anew."""
    assert_good(await kvferry.complete(PROMPT))
    await kvferry.operate("a", "drain")
    await kvferry.until_is("a", "drained")
    a.slots[0].tokens = list(b"z" * 50)
    await kvferry.operate("a", "undrain")
    state = await kvferry.until_is("a", "up")

    assert [s["resident_tokens"] for s in state["slots"] if s["backend"] == "a"] == [50]


async def test_kept_after_all(a: FakeLlama, kvferry: RunningRouter) -> None:
    a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT, stream=True))
        await a.until(lambda: a.slots[0].busy)
        await kvferry.operate("a", "drain")
        assert (await kvferry.operate("a", "undrain")).json["state"] == "up"
        a.decode_gate.set()
    assert_good(task.result())
    await kvferry.until_quiet()
    assert (await health(kvferry))["a"] == "up"


async def test_who_has_no_other_waits_for_it(a: FakeLlama, tmp_path: Path) -> None:
    async with running([("a", a.url)], tmp_path, yaml=NEVER_SAVED) as kvferry:
        a.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(kvferry.complete(PROMPT, stream=True))
            await a.until(lambda: a.slots[0].busy)
            await kvferry.operate("a", "drain")
            second = group.create_task(kvferry.complete(PROMPT))
            await kvferry.until(lambda state: len(state["queue"]) == 1)
            assert (await kvferry.get("/kvferry/health")).status == 503
            a.decode_gate.set()
            await kvferry.until_is("a", "drained")
            assert not second.done()
            await kvferry.operate("a", "undrain")
        assert_good(first.result())
        assert_good(second.result())


async def test_what_takes_no_slot_is_waited_for_too(
    a: FakeLlama, b: FakeLlama, tmp_path: Path
) -> None:
    """With `passthrough` no request takes a slot."""
    backends = [("a", a.url), ("b", b.url)]
    async with running(backends, tmp_path, yaml="policy: passthrough") as kvferry:
        a.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT, stream=True))
            await a.until(lambda: a.slots[0].busy)
            await kvferry.operate("a", "drain")
            assert (await health(kvferry))["a"] == "draining"
            assert (await kvferry.complete("x")).headers["x-kvferry-backend"] == "b"
            a.decode_gate.set()
        assert_good(task.result())
        await kvferry.until_is("a", "drained")


async def test_nor_does_it_get_what_takes_no_slot(
    a: FakeLlama, b: FakeLlama, kvferry: RunningRouter
) -> None:
    for server in (a, b):
        server.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        for prompt in (PROMPT, "x" * 300):
            group.create_task(kvferry.complete(prompt, stream=True))
        await kvferry.until(lambda state: all(s["phase"] == "running" for s in state["slots"]))
        assert (await kvferry.get("/props")).headers["x-kvferry-backend"] == "a"
        await kvferry.operate("a", "drain")
        assert (await kvferry.get("/props")).headers["x-kvferry-backend"] == "b"
        for server in (a, b):
            server.decode_gate.set()


async def test_drained_before_it_was_ever_up(b: FakeLlama) -> None:
    backends = [("a", "http://127.0.0.1:9"), ("b", b.url)]
    async with running(backends, None, wait_for=["b"]) as kvferry:
        assert (await kvferry.operate("a", "drain")).json["state"] == "drained"
        assert (await kvferry.complete(PROMPT)).slot[0] == "b"
