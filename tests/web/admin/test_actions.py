"""Operators' actions on a running router: the right to them, and the effect on requests."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.base.types import BackendId
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.router_fleet import Answer, Fleet, running

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
async def fleet(a: FakeLlama, b: FakeLlama, tmp_path: Path) -> AsyncIterator[Fleet]:
    async with running([("a", a.url), ("b", b.url)], tmp_path, yaml=NEVER_SAVED) as router:
        yield router


def assert_good(answer: Answer) -> None:
    said = bytes(generate(list(PROMPT.encode()), 8)).decode()
    assert (answer.status, answer.text) == (200, said)


async def health(fleet: Fleet) -> dict[str, str]:
    found: dict[str, str] = (await fleet.get("/kvferry/health")).json["backends"]
    return found


async def drained(fleet: Fleet) -> dict[str, float]:
    """Return the metric that silences the alert for backends that are down, by backend."""
    metrics, name = await fleet.metrics(), "kvferry_backend_drained"
    return {backend: metrics[f'{name}{{backend="{backend}"}}'] for backend in "ab"}


@pytest.mark.parametrize(
    "path", ["/kvferry/reload", "/kvferry/backends/a/drain", "/kvferry/backends/a/undrain"]
)
async def test_not_everybody_may(fleet: Fleet, path: str) -> None:
    answer = await fleet.post(path, {}, headers={"Origin": "http://page.example"})

    assert (answer.status, answer.json["error"]["type"]) == (403, "permission_error")
    assert (await health(fleet))["a"] == "up"


async def test_what_is_not_there(fleet: Fleet) -> None:
    nobody, nothing = await fleet.operate("c", "drain"), await fleet.operate("a", "kill")

    assert (nobody.status, nothing.status) == (404, 404)
    assert "a, b" in nobody.json["error"]["message"]
    assert "drain or undrain" in nothing.json["error"]["message"]


async def test_a_drained_backend(a: FakeLlama, b: FakeLlama, fleet: Fleet) -> None:
    """The stream is finished, its slot is saved, and the next request continues elsewhere."""
    a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.complete(PROMPT, stream=True))
        await a.until(lambda: a.slots[0].busy)
        answer = await fleet.operate("a", "drain")
        assert (answer.status, answer.json) == (200, {"backend": "a", "state": "draining"})
        assert (await health(fleet))["a"] == "draining"
        assert await drained(fleet) == {"a": 1, "b": 0}
        other = await fleet.complete("x" * 300)
        assert other.slot[0] == "b"
        a.decode_gate.set()
    assert_good(task.result())
    state = await fleet.until_is("a", "drained")

    assert (await health(fleet)) == {"a": "drained", "b": "up"}
    assert await drained(fleet) == {"a": 1, "b": 0}
    assert [slot["phase"] for slot in state["slots"] if slot["backend"] == "a"] == ["lost"]
    again = await fleet.complete(PROMPT)
    assert_good(again)
    assert (again.slot[0], again.source, again.cached) == ("b", "snapshot", RESTORED)


async def test_nobody_looks_at_a_drained_backend(a: FakeLlama, fleet: Fleet) -> None:
    """A drained backend may be stopped: the router does not check it and reports nothing."""
    await fleet.operate("a", "drain")
    await fleet.until_is("a", "drained")
    seen = len(a.seen)
    fleet.router.selection.doubt(BackendId("a"))
    for _ in range(3):
        await fleet.complete(PROMPT)
    await a.go_down()
    assert (await fleet.operate("a", "drain")).json["state"] == "drained"
    assert (await health(fleet))["a"] == "drained"
    assert len(a.seen) == seen

    await a.come_up()
    await fleet.operate("a", "undrain")
    await fleet.until_is("a", "up")
    assert (await fleet.operate("a", "undrain")).json["state"] == "up"


async def test_it_comes_back_with_what_it_has_now(a: FakeLlama, fleet: Fleet) -> None:
    """The backend may have been used meanwhile, so it is attached anew."""
    assert_good(await fleet.complete(PROMPT))
    await fleet.operate("a", "drain")
    await fleet.until_is("a", "drained")
    a.slots[0].tokens = list(b"z" * 50)
    await fleet.operate("a", "undrain")
    state = await fleet.until_is("a", "up")

    assert [s["resident_tokens"] for s in state["slots"] if s["backend"] == "a"] == [50]


async def test_kept_after_all(a: FakeLlama, fleet: Fleet) -> None:
    a.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.complete(PROMPT, stream=True))
        await a.until(lambda: a.slots[0].busy)
        await fleet.operate("a", "drain")
        assert (await fleet.operate("a", "undrain")).json["state"] == "up"
        a.decode_gate.set()
    assert_good(task.result())
    await fleet.until_quiet()
    assert (await health(fleet))["a"] == "up"


async def test_who_has_no_other_waits_for_it(a: FakeLlama, tmp_path: Path) -> None:
    async with running([("a", a.url)], tmp_path, yaml=NEVER_SAVED) as fleet:
        a.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            first = group.create_task(fleet.complete(PROMPT, stream=True))
            await a.until(lambda: a.slots[0].busy)
            await fleet.operate("a", "drain")
            second = group.create_task(fleet.complete(PROMPT))
            await fleet.until(lambda state: len(state["queue"]) == 1)
            assert (await fleet.get("/kvferry/health")).status == 503
            a.decode_gate.set()
            await fleet.until_is("a", "drained")
            assert not second.done()
            await fleet.operate("a", "undrain")
        assert_good(first.result())
        assert_good(second.result())


async def test_what_takes_no_slot_is_waited_for_too(
    a: FakeLlama, b: FakeLlama, tmp_path: Path
) -> None:
    """With `passthrough` no request takes a slot."""
    backends = [("a", a.url), ("b", b.url)]
    async with running(backends, tmp_path, yaml="policy: passthrough") as fleet:
        a.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(fleet.complete(PROMPT, stream=True))
            await a.until(lambda: a.slots[0].busy)
            await fleet.operate("a", "drain")
            assert (await health(fleet))["a"] == "draining"
            assert (await fleet.complete("x")).headers["x-kvferry-backend"] == "b"
            a.decode_gate.set()
        assert_good(task.result())
        await fleet.until_is("a", "drained")


async def test_nor_does_it_get_what_takes_no_slot(a: FakeLlama, b: FakeLlama, fleet: Fleet) -> None:
    for server in (a, b):
        server.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        for prompt in (PROMPT, "x" * 300):
            group.create_task(fleet.complete(prompt, stream=True))
        await fleet.until(lambda state: all(s["phase"] == "running" for s in state["slots"]))
        assert (await fleet.get("/props")).headers["x-kvferry-backend"] == "a"
        await fleet.operate("a", "drain")
        assert (await fleet.get("/props")).headers["x-kvferry-backend"] == "b"
        for server in (a, b):
            server.decode_gate.set()


async def test_drained_before_it_was_ever_up(b: FakeLlama) -> None:
    backends = [("a", "http://127.0.0.1:9"), ("b", b.url)]
    async with running(backends, None, wait_for=["b"]) as fleet:
        assert (await fleet.operate("a", "drain")).json["state"] == "drained"
        assert (await fleet.complete(PROMPT)).slot[0] == "b"
