"""KV failures never fail a request: every effect that can go wrong, on a whole router.

The fake checks what it reads: a file that differs from the committed one shows as a violation or
as a wrong cell. Counts and metrics show what was tried.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from router.base.clock import MonotonicClock
from router.base.errors import BackendError, BackendRefusedError, BackendTimeoutError
from router.base.ports import SlotServer, Telemetry
from router.base.tokens import Tokens
from router.base.types import BackendId, Outcome, Reported, Request, RequestId, SlotStatus
from router.core.admission import admission, backend_drain
from router.core.execution.state import State
from router.core.model.effects import AnswerEnd, Detach, Effect
from router.core.model.rates import LinearFit
from router.engine.engine import Engine
from router.engine.loop_throttle import MOST, LoopThrottle
from tests.support.scheduler.build import (
    UNREAD,
    A,
    B,
    backend,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.driven import Driven
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import encode_state, generate
from tests.support.servers.running_router import PATIENCE_S, Answer, Json, RunningRouter, running

PROMPT = "p" * 300
OTHER = "q" * 300
RESTORED = len(PROMPT) - 1  # one token is always evaluated


FAKE = {"n_slots": 1}  # other content must come from a file


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], tmp_path) as router:
        yield router


def text_of(prompt: str, n: int = 8) -> str:
    return bytes(generate(list(prompt.encode()), n)).decode()


def assert_good(answer: Answer, prompt: str = PROMPT) -> None:
    assert (answer.status, answer.text) == (200, text_of(prompt))


def files(kv_dir: Path, suffix: str) -> list[str]:
    """Return the files with this suffix; `.kv` files are those of snapshots."""
    return sorted(name for name in os.listdir(kv_dir) if name.endswith(suffix))


async def save(kvferry: RunningRouter) -> Json:
    """Save PROMPT, run OTHER unsaved in the slot, and return the snapshot of PROMPT."""
    assert_good(await kvferry.complete(PROMPT))
    state = await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
    await kvferry.until_quiet()
    await kvferry.router.store.flush()  # earlier changes to a file are another test
    assert_good(await kvferry.complete(OTHER), OTHER)
    item: Json = state["snapshots"]["items"][0]
    return item


async def failures(kvferry: RunningRouter, action: str) -> float:
    return (await kvferry.metrics())[f'kvferry_kv_failures_total{{action="{action}"}}']


async def test_a_snapshot_is_restored(
    fake: FakeLlama, kvferry: RunningRouter, tmp_path: Path
) -> None:
    """Base case without a fault; each other test differs from it in one thing."""
    snapshot = await save(kvferry)
    assert f"kvf-{snapshot['id']}.kv" in files(tmp_path, ".kv")
    before = fake.counts["restore", 0]
    answer = await kvferry.complete(PROMPT)

    assert_good(answer)
    assert (answer.source, answer.cached) == ("snapshot", RESTORED)
    assert answer.headers["x-kvferry-reused-tokens"] == str(RESTORED)
    assert fake.counts["restore", 0] == before + 1
    metrics = await kvferry.metrics()
    assert metrics["kvferry_restore_seconds_count"] == 1
    assert metrics['kvferry_moved_bytes_total{action="restore"}'] == snapshot["size_bytes"]
    assert (os.stat(tmp_path / f"kvf-{snapshot['id']}.kv").st_mode & 0o777) == 0o600


async def test_save_is_refused(fake: FakeLlama, kvferry: RunningRouter, tmp_path: Path) -> None:
    """Answer 500, as with a full disk."""
    fake.faults.save_fails = True
    for prompt in (PROMPT, OTHER, PROMPT):
        assert_good(await kvferry.complete(prompt), prompt)
    state = await kvferry.until_quiet()

    assert state["snapshots"]["count"] == 0
    assert await failures(kvferry, "save") >= 1
    assert files(tmp_path, ".kv") == files(tmp_path, ".part") == []


async def test_save_lies_about_its_size(
    fake: FakeLlama, kvferry: RunningRouter, tmp_path: Path
) -> None:
    """Full disks can be reported as success (llama-server.md section 0.4)."""
    before = fake.counts["restore", 0]
    fake.faults.save_lies = True
    for prompt in (PROMPT, OTHER, PROMPT):
        assert_good(await kvferry.complete(prompt), prompt)
    state = await kvferry.until_quiet()

    assert state["snapshots"]["count"] == 0
    assert await failures(kvferry, "save") >= 1
    assert fake.counts["restore", 0] == before
    assert files(tmp_path, ".kv") == files(tmp_path, ".part") == []


async def test_restore_is_refused(fake: FakeLlama, kvferry: RunningRouter, tmp_path: Path) -> None:
    """Good files may be refused for lack of room: once is forgiven, twice is not."""
    snapshot = await save(kvferry)
    fake.faults.restore_fails = True
    answer = await kvferry.complete(PROMPT)
    assert_good(answer)
    assert (answer.source, answer.cached) == ("cold", 0)
    assert await failures(kvferry, "restore") == 1
    assert snapshot["id"] in [s["id"] for s in (await kvferry.state())["snapshots"]["items"]]

    assert_good(await kvferry.complete(OTHER), OTHER)
    assert_good(await kvferry.complete(PROMPT))
    await kvferry.until_quiet()
    assert await failures(kvferry, "restore") >= 2
    assert snapshot["id"] not in [s["id"] for s in (await kvferry.state())["snapshots"]["items"]]
    name = f"kvf-{snapshot['id']}.kv"
    await kvferry.until(lambda _: name not in files(tmp_path, ".kv"))


async def test_one_refusal_is_forgotten_after_a_success(
    fake: FakeLlama, kvferry: RunningRouter
) -> None:
    snapshot = await save(kvferry)
    for fails in (True, False, True):
        fake.faults.restore_fails = fails
        assert_good(await kvferry.complete(PROMPT))
        fake.faults.restore_fails = False
        assert_good(await kvferry.complete(OTHER), OTHER)
    state = await kvferry.state()

    assert snapshot["id"] in [s["id"] for s in state["snapshots"]["items"]]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replace(path: Path) -> None:
    """Put a good file of another conversation under the same name."""
    path.unlink()
    path.write_bytes(encode_state(list(OTHER.encode()), 0, 1))


def overwrite(path: Path) -> None:
    """Change the bytes, but not the size."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def become_a_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


@pytest.mark.parametrize("change", [truncate, Path.unlink, replace, overwrite, become_a_link])
async def test_file_changed_on_disk(
    fake: FakeLlama, kvferry: RunningRouter, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """Never offered to the server: a truncated file can abort it (llama-server.md section 0.3)."""
    snapshot = await save(kvferry)
    change(tmp_path / f"kvf-{snapshot['id']}.kv")
    before = fake.counts["restore", 0]
    answer = await kvferry.complete(PROMPT)
    state = await kvferry.until_quiet()

    assert_good(answer)
    assert (answer.source, answer.cached) == ("cold", 0)
    assert fake.counts["restore", 0] == before
    assert snapshot["id"] not in [s["id"] for s in state["snapshots"]["items"]]
    assert await failures(kvferry, "restore") == 1


async def test_file_touched_on_disk(
    fake: FakeLlama, kvferry: RunningRouter, tmp_path: Path
) -> None:
    """Same bytes with another date, as after a copy: verified again, and used."""
    snapshot = await save(kvferry)
    os.utime(tmp_path / f"kvf-{snapshot['id']}.kv", ns=(1, 1))
    answer = await kvferry.complete(PROMPT)

    assert (answer.source, answer.cached) == ("snapshot", RESTORED)


async def test_slot_action_hangs(fake: FakeLlama, tmp_path: Path) -> None:
    """Ended after limits.action_timeout; the request is served without the action."""
    yaml = "limits: {action_timeout: 200ms}"
    async with running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry:
        await save(kvferry)
        fake.faults.hang_actions = True
        answer = await kvferry.complete(PROMPT)

        assert_good(answer)
        assert answer.cached == 0
        fake.faults.hang_actions = False
        await kvferry.until_quiet()


async def test_crash_during_a_restore(fake: FakeLlama, kvferry: RunningRouter) -> None:
    """Requests continue when the backend is back; the snapshot is not blamed."""
    snapshot = await save(kvferry)
    fake.action_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT))
        await fake.until(lambda: fake.actions_waiting == 1)
        await fake.go_down()
        fake.action_gate.set()
        await fake.come_up()
    assert_good(task.result())
    state = await kvferry.until_quiet()
    assert snapshot["id"] in [s["id"] for s in state["snapshots"]["items"]]


async def test_copy_between_backends(tmp_path: Path) -> None:
    """Content of a slot is carried to the other backend, which has a free slot."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=1) as a,
        FakeLlama(kv_dir=tmp_path, n_slots=1) as b,
        running([("a", a.url), ("b", b.url)], tmp_path) as kvferry,
    ):
        first = await kvferry.complete(PROMPT)
        await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
        await kvferry.until_quiet()
        owner = a if first.slot[0] == "a" else b
        owner.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            group.create_task(kvferry.complete(PROMPT))
            await owner.until(lambda: owner.slots[0].busy)
            second = await kvferry.complete(PROMPT)
            owner.decode_gate.set()
        assert second.slot[0] != first.slot[0]
        assert (second.source, second.cached) == ("snapshot", RESTORED)
        assert_good(second)
        assert a.violations == b.violations == []


async def test_stopping_saves_what_is_worth_it(fake: FakeLlama, tmp_path: Path) -> None:
    """Saved content is offered by a router that starts later over the same directory."""
    yaml = "store: {idle_save_after: 'off'}"
    async with running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry:
        assert_good(await kvferry.complete(PROMPT))
        assert (await kvferry.state())["snapshots"]["count"] == 0
        await kvferry.router.stop()
        assert (await kvferry.state())["snapshots"]["count"] == 1
        assert (await kvferry.complete(OTHER)).status == 503
    fake.slots[0].tokens = []
    async with running([("a", fake.url)], tmp_path, yaml=yaml) as kvferry:
        answer = await kvferry.complete(PROMPT)
        assert (answer.source, answer.cached) == ("snapshot", RESTORED)


async def test_stopping_waits_for_running_streams(fake: FakeLlama, kvferry: RunningRouter) -> None:
    fake.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(PROMPT, stream=True))
        await fake.until(lambda: fake.slots[0].busy)
        stopping = group.create_task(kvferry.router.stop())
        await kvferry.get("/kvferry/state")
        assert not stopping.done()
        fake.decode_gate.set()
    assert_good(task.result())


async def test_stopping_gives_up_after_the_grace(fake: FakeLlama, tmp_path: Path) -> None:
    async with running([("a", fake.url)], tmp_path, yaml="shutdown_grace: 100ms") as kvferry:
        fake.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT, stream=True))
            await fake.until(lambda: fake.slots[0].busy)
            await kvferry.router.stop()
            assert fake.slots[0].busy
            task.cancel()


async def test_a_large_plain_answer_is_counted_like_any_other(kvferry: RunningRouter) -> None:
    answer = await kvferry.complete(PROMPT, n_predict=8000, return_tokens=True)
    assert len(answer.body) > 33_000

    metrics = await kvferry.metrics()
    assert metrics["kvferry_generated_tokens_total"] == 8000
    assert metrics['kvferry_prompt_tokens_total{source="computed"}'] == len(PROMPT)


async def test_others_have_their_turn_while_snapshots_are_taken_in(kvferry: RunningRouter) -> None:
    """Needed when a reload opens a KV directory with thousands of snapshots."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    engine = kvferry.router.engine
    async with asyncio.TaskGroup() as group:
        counting = group.create_task(count())
        await engine.snapshots_found([snapshot(f"s{n}", [n], 10) for n in range(1000)])
        counting.cancel()
    assert turns >= 10
    assert (await kvferry.state())["snapshots"]["count"] == 1000


async def test_prefill_does_not_begin_on_a_lost_backend() -> None:
    begun: list[int] = []

    async def prefill(slot: int, _: Tokens, **_more: object) -> Reported:
        begun.append(slot)
        return Reported()

    server = cast(SlotServer, SimpleNamespace(prefill=prefill))
    state = scheduler(backend("a", 1), idle_save_after_s=None)
    clock = MonotonicClock()
    engine = Engine(
        *(state, {A: server}, None, clock, cast(Telemetry, Mock())), LoopThrottle(clock)
    )
    asked = asyncio.ensure_future(  # noqa: TID251 - its error is what is asked for
        engine.submit(request(ids=[1, 2, 3], pinnable=False))
    )
    await asyncio.sleep(0)
    engine.backend_down(A)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not begun
    with pytest.raises(BackendError, match="went down"):
        await asked
    await engine.aclose()


async def test_an_exception_in_one_effect_costs_no_other() -> None:
    """A request that ends frees its slot for the next, even if its record cannot be written."""
    telemetry = Mock()
    telemetry.request.side_effect = ZeroDivisionError
    clock = MonotonicClock()
    state = scheduler(backend("a", 1), idle_save_after_s=None)
    server = cast(SlotServer, SimpleNamespace())
    engine = Engine(
        *(state, {A: server}, None, clock, cast(Telemetry, telemetry)), LoopThrottle(clock)
    )
    first = await engine.submit(request("r1", ids=[1, 2, 3]))
    asked = asyncio.ensure_future(engine.submit(request("r2", ids=[4])))  # noqa: TID251 - awaited
    await asyncio.sleep(0)
    assert first.lease.slot.backend == A
    assert not asked.done()
    with pytest.raises(ZeroDivisionError):
        engine.finish(RequestId("r1"), AnswerEnd(Outcome.OK))
    assert (await asked).lease.slot == first.lease.slot
    await engine.aclose()


class Prefilling:
    """A server on which a prefill breaks off at once, but runs on for as long as `busy`."""

    def __init__(self, failure: BackendError | None = None) -> None:
        self.failure, self.busy, self.looks = failure, True, 0
        self.looked, self.prefills = asyncio.Event(), asyncio.Event()

    async def prefill(self, slot: int, _: Tokens, **_more: object) -> Reported:
        self.prefills.set()
        if self.failure is not None:
            raise self.failure
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def slots(self) -> list[SlotStatus]:
        self.looks += 1
        self.looked.set()
        if self.failure is None:
            raise BackendError("does not answer")
        return [SlotStatus(n, self.busy and n == 0, 7000, 100_000) for n in range(2)]

    def engine(self) -> Engine:
        state = scheduler(backend("a", 2, n_ctx=100_000), prefill_chunk_s=0.5)
        state.state.inventory.backends[A].rates.prefill = LinearFit(0.003, 0.0)
        clock, server, telemetry = MonotonicClock(), cast(SlotServer, self), cast(Telemetry, Mock())
        return Engine(state, {A: server}, None, clock, telemetry, LoopThrottle(clock))

    async def until_looked(self) -> None:
        """Wait until another poll has begun."""
        self.looked.clear()
        async with asyncio.timeout(PATIENCE_S):
            await self.looked.wait()


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.engine.slot_watch._QUIET_DELAYS_S", (0.001,))


def long_one(name: str = "R") -> Request:
    return request(name, run_of(20_000))


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize("error", [BackendTimeoutError("late"), BackendError("broken")])
async def test_slot_with_a_broken_off_prefill_gets_nothing(error: BackendError) -> None:
    """Pinned to a busy slot, a request could destroy an answer (llama-server.md section 0.1)."""
    server = Prefilling(error)
    engine = server.engine()
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(engine.submit(long_one()))
        for _ in range(5):
            await server.until_looked()
        assert not asked.done()
        server.busy = False
    grant = asked.result()
    assert (grant.pin, grant.lease.slot.index) == (True, 0)
    slot = engine._scheduler.state.inventory.slots[grant.lease.slot]
    assert len(slot.content.resident) == 7000  # the computed part is kept
    await engine.aclose()


@pytest.mark.usefixtures("quick_looks")
async def test_a_prefill_that_was_refused_has_not_begun() -> None:
    server = Prefilling(BackendRefusedError("no", backend_status=400))
    engine = server.engine()
    async with asyncio.timeout(PATIENCE_S):
        await engine.submit(long_one())
    assert server.looks == 0
    await engine.aclose()


@pytest.mark.usefixtures("quick_looks")
async def test_wait_for_a_broken_off_prefill_ends_with_its_backend() -> None:
    server = Prefilling(BackendError("broken"))
    engine = server.engine()
    asked = asyncio.ensure_future(engine.submit(long_one()))  # noqa: TID251 - its error is checked
    await server.until_looked()
    engine.backend_down(A)
    with pytest.raises(BackendError, match="went down"):
        await asked
    async with asyncio.timeout(PATIENCE_S):
        await engine._tasks.join()
    await engine.aclose()


@pytest.mark.usefixtures("quick_looks")
async def test_leaving_during_a_broken_off_prefill_frees_the_slot() -> None:
    server = Prefilling(BackendError("broken"))
    engine = server.engine()
    asked = asyncio.ensure_future(engine.submit(long_one()))  # noqa: TID251 - cancelled below
    await server.until_looked()
    asked.cancel()
    await asyncio.wait([asked])
    await server.until_looked()
    assert engine._scheduler.state.inventory.jobs
    server.busy = False
    async with asyncio.timeout(PATIENCE_S):
        await engine._tasks.join()
    assert not engine._scheduler.state.inventory.jobs
    await engine.aclose()


@pytest.mark.usefixtures("quick_looks")
async def test_nobody_waits_for_long_for_a_prefill_that_broke_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Servers may hang and still report health: the request is retried elsewhere.

    The slot stays reserved until it is idle.
    """
    monkeypatch.setattr("router.engine.slot_watch._OVERDUE_S", 0.01)
    server = Prefilling(BackendTimeoutError("late"))
    engine = server.engine()
    with pytest.raises(BackendTimeoutError, match="late") as caught:
        await engine.submit(long_one())
    assert caught.value.backend == A
    (job,) = engine._scheduler.state.inventory.jobs.values()
    assert str(job.slot) == "a/0"
    plan = engine.plan(long_one("R.2"))
    assert plan is not None
    assert str(plan.chosen.slot) == "a/1"  # any but the one that hangs
    server.busy = False
    async with asyncio.timeout(PATIENCE_S):
        await engine._tasks.join()
    assert not engine._scheduler.state.inventory.jobs
    await engine.aclose()


async def test_closing_waits_for_no_slot() -> None:
    """Regression: to end a prefill on a hung server, its slot was polled without end."""
    server = Prefilling()
    engine = server.engine()
    asked = asyncio.ensure_future(engine.submit(long_one()))  # noqa: TID251 - cancelled below
    async with asyncio.timeout(PATIENCE_S):
        await server.prefills.wait()
        assert engine._work._prefills
        await engine.aclose()
    assert server.looks == 0
    asked.cancel()
    await asyncio.wait([asked])


async def test_leaving_between_turnstile_and_grant_frees_the_slot() -> None:
    """Embedding beside a chat: the embedding waits until the chat is seen at work."""
    seen, clock = asyncio.Event(), MonotonicClock()

    async def slots() -> list[SlotStatus]:
        await seen.wait()
        return [SlotStatus(n, n == 0, 0, 100) for n in range(2)]

    state = scheduler(backend("a", 2), idle_save_after_s=None)
    server, throttle = cast(SlotServer, SimpleNamespace(slots=slots)), LoopThrottle(clock)
    engine = Engine(state, {A: server}, None, clock, cast(Telemetry, Mock()), throttle)
    await engine.submit(request("chat", [1, 2, 3], slot_hint=0))
    unread = request("embedding", **UNREAD)
    asked = asyncio.ensure_future(engine.submit(unread))  # noqa: TID251 - cancelled below
    for _ in range(2 * MOST):
        throttle.call(lambda: None)
    await asyncio.sleep(0)
    assert len(throttle)
    throttle.call(asked.cancel)  # just after the request
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert state.state.inventory.gated
        seen.set()
        while state.state.inventory.gated:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    await engine.aclose()


async def test_a_few_are_decided_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are decided in order of arrival; one that was cancelled meanwhile is not."""
    turn, decided = 0, dict[str, int]()
    arrived = admission.arrived

    def noted(known: State, asked: Request) -> None:
        decided[asked.id] = turn
        arrived(known, asked)

    monkeypatch.setattr(admission, "arrived", noted)
    clock = MonotonicClock()
    engine = Engine(
        *(scheduler(backend("a", 1)), {}, None, clock, cast(Telemetry, Mock())), LoopThrottle(clock)
    )
    names = [f"r{number:03}" for number in range(5 * MOST)]
    asked = [
        asyncio.ensure_future(engine.submit(request(name, [1, 2, 3])))  # noqa: TID251 - cancelled
        for name in names
    ]
    await asyncio.sleep(0)
    asked[-1].cancel()
    async with asyncio.timeout(PATIENCE_S):
        while len(decided) < len(names) - 1:
            turn += 1
            await asyncio.sleep(0)
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await engine.aclose()

    assert list(decided) == names[:-1]
    assert max(Counter(decided.values()).values()) <= 2 * MOST
    assert len(set(decided.values())) >= 3


def running_now(n: int) -> Callable[[Json], bool]:
    return lambda state: [slot["phase"] for slot in state["slots"]].count("running") == n


async def test_arrival_does_not_wait_for_one_nobody_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of embeddings are looked for late, but at once if another request waits."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=2) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        monkeypatch.setattr("router.engine.slot_watch._LEISURE_S", 10 * PATIENCE_S)
        fake.decode_gate.clear()
        group.create_task(kvferry.post("/v1/embeddings", {"input": PROMPT}))
        await kvferry.until(running_now(1))
        group.create_task(kvferry.complete(OTHER))
        await kvferry.until(running_now(2))
        fake.decode_gate.set()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages"])
async def test_where_it_matters_a_request_is_looked_for_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Otherwise another answer's end, or its own tokens, could be forgotten."""
    async with (
        FakeLlama(kv_dir=tmp_path, n_slots=2) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        monkeypatch.setattr("router.engine.slot_watch._LEISURE_S", 10 * PATIENCE_S)
        body: Json = {"messages": [{"role": "user", "content": PROMPT}], "input": PROMPT}
        if path == "/v1/messages":
            await kvferry.post(path, body)  # so that no prefill is needed
            await kvferry.until_quiet()
        fake.decode_gate.clear()
        if path == "/v1/embeddings":
            group.create_task(kvferry.complete(OTHER))
            await kvferry.until(running_now(1))
        group.create_task(kvferry.post(path, body))
        await kvferry.until(lambda state: not gated(kvferry))
        fake.decode_gate.set()


def gated(kvferry: RunningRouter) -> bool:
    """Return whether a backend is gated, or no job has begun."""
    state = kvferry.router.engine._scheduler.state
    return bool(state.inventory.gated) or not state.inventory.jobs


async def test_an_event_waits_for_the_effects_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An effect that causes an event does not put that event before the other effects."""
    order: list[str] = []

    def do(scheduler_: Driven, _: float, take: Any, *__: object) -> list[Effect]:
        order.append(take.__name__)
        begins = take is backend_drain.begin
        scheduler_.state.out = [Detach(A), Detach(B)] if begins else []
        return scheduler_.state.out

    def detached(name: BackendId) -> None:
        order.append(name)
        engine.remove(name)

    monkeypatch.setattr(Driven, "do", do)
    clock = MonotonicClock()
    telemetry, throttle = cast(Telemetry, Mock()), LoopThrottle(clock)
    engine = Engine(scheduler(backend("a", 1)), {}, None, clock, telemetry, throttle)
    listener = Mock()
    listener.detached = detached
    engine.listener = listener
    engine.drain(A)

    assert order == ["begin", A, B, "removed", "removed"]
    await engine.aclose()
