"""Background tasks: `router.base.tasks`."""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from router.base import tasks
from router.base.tasks import Tasks, spawn, supervise


@pytest.fixture
def log() -> Iterator[list[dict[str, object]]]:
    with capture_logs() as entries:
        yield entries  # type: ignore[misc]


async def fail() -> None:
    raise ValueError("no")


async def test_reference_is_kept_until_done() -> None:
    """Event loops alone would let the garbage collector take a waiting task."""
    started, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await go.wait()
        done.set()

    task = spawn(work(), name="w")
    await started.wait()
    assert task in tasks._running
    gc.collect()
    go.set()
    await task
    assert done.is_set()
    assert task not in tasks._running


async def test_name() -> None:
    async def work() -> None:
        assert getattr(asyncio.current_task(), "get_name", str)() == "w"

    await spawn(work(), name="w")


async def test_exception_is_logged_with_traceback(
    log: list[dict[str, object]], bugs: Counter[str]
) -> None:
    await spawn(fail(), name="w")

    (entry,) = log
    assert (entry["event"], entry["task"], entry["exc_info"]) == ("task_failed", "w", True)


async def test_a_loop_that_fails_runs_again(
    log: list[dict[str, object]], bugs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One unexpected exception in a monitor left its backend down for ever."""
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.001)
    monkeypatch.setattr(tasks, "_AGAIN_MOST_S", 0.003)
    rounds: list[int] = []

    async def loop() -> None:
        rounds.append(len(rounds))
        if len(rounds) < 5:
            raise RecursionError

    await supervise(loop, name="monitor a")

    assert rounds == [0, 1, 2, 3, 4]
    assert bugs == {"monitor": 4}
    assert [entry["again_in_s"] for entry in log] == [0.001, 0.002, 0.003, 0.003]


async def test_a_loop_is_ended_by_its_owner() -> None:
    owner, started = Tasks(), asyncio.Event()

    async def loop() -> None:
        started.set()
        await asyncio.Event().wait()

    owner.supervise(loop, name="w")
    await started.wait()
    await owner.aclose()
    assert len(owner) == 0


async def test_cancellation_is_silent(log: list[dict[str, object]]) -> None:
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    task = spawn(work(), name="w")
    await started.wait()
    task.cancel()
    await task
    assert log == []


async def test_cancelled_before_the_first_step() -> None:
    """Otherwise the coroutine would warn that it was never awaited."""
    task = spawn(fail(), name="w")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()


async def test_owner_ends_its_tasks() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("x")

    owner = Tasks()
    owner.spawn(work(), name="a")
    owner.spawn(work(), name="b")
    await asyncio.sleep(0)
    assert len(owner) == 2
    await owner.aclose()
    assert ended == ["x", "x"]
    assert len(owner) == 0


async def test_join_waits_for_grandchildren() -> None:
    owner = Tasks()
    seen: list[int] = []

    async def work(depth: int) -> None:
        seen.append(depth)
        if depth:
            owner.spawn(work(depth - 1), name="w")

    owner.spawn(work(3), name="w")
    await owner.join()
    assert seen == [3, 2, 1, 0]


@pytest.mark.usefixtures("bugs")
def test_only_the_first_exception_is_for_the_caller() -> None:
    """The others are counted: the caller raises one."""
    caught: list[Exception] = []
    before = tasks.failures["attempt"]
    for text in ("x", "y", "z"):
        tasks.catch(caught, ValueError(text))
    assert [str(error) for error in caught] == ["x", "y", "z"]
    assert tasks.failures["attempt"] - before == 2
