"""Background tasks that cannot get lost: referenced until done, named, their exceptions logged.

The event loop keeps only weak references to tasks. An exception that is not retrieved is reported
when the garbage collector gets there, if it does. For these two reasons `asyncio.create_task` is
banned.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")
Work = Coroutine[Any, Any, None]

_AGAIN_S, _AGAIN_MOST_S = 1.0, 30.0

# Strong references; the done callback of a task removes it.
_running: set[asyncio.Task[None]] = set()
# Unexpected exceptions of this process, by the kind of task: its name up to the first blank.
failures: Counter[str] = Counter()


def spawn(coro: Work, *, name: str) -> asyncio.Task[None]:
    """Run `coro` in the background of the running loop.

    Awaiting the task does not raise: an exception of `coro` is logged with its traceback, and a
    cancellation ends the task normally. Only a task that was cancelled before its first step
    raises CancelledError.
    """
    return _spawn(coro, name, _running)


def supervise(loop: Callable[[], Work], *, name: str) -> asyncio.Task[None]:
    """Run a loop as `spawn` does; after an exception again, in 1 s, then 2 s, up to 30 s.

    A loop that ended for ever would leave a backend down, or a peer unchecked, until a restart.
    """
    return _spawn(_again_and_again(loop, name), name, _running)


async def _again_and_again(loop: Callable[[], Work], name: str) -> None:
    clock, pause_s = asyncio.get_running_loop(), _AGAIN_S
    while True:
        begun = clock.time()
        try:
            await loop()
            return
        except Exception:
            failures[_kind(name)] += 1
            if clock.time() - begun > _AGAIN_MOST_S:
                pause_s = _AGAIN_S
            log.exception("loop_failed", task=name, again_in_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _AGAIN_MOST_S)


def running() -> Counter[str]:
    """Return how many background tasks run, by kind."""
    return Counter(_kind(task.get_name()) for task in list(_running))


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def _spawn(coro: Work, name: str, owned: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(_guard(coro, name), name=name)
    _running.add(task)
    owned.add(task)

    def done(task: asyncio.Task[None]) -> None:
        _running.discard(task)
        owned.discard(task)
        coro.close()  # one that never started would warn; no effect on a finished one

    task.add_done_callback(done)
    return task


async def _guard(coro: Work, name: str) -> None:
    try:
        await coro
    except asyncio.CancelledError:
        pass
    except Exception:
        failures[_kind(name)] += 1
        log.exception("task_failed", task=name)


def catch(caught: list[Exception], error: Exception) -> None:
    """Keep an exception for later: the caller raises the first, others are counted and logged."""
    if caught:
        failures["attempt"] += 1
        log.error("attempt_failed", exc_info=error)
    caught.append(error)


class Tasks:
    """The tasks of one owner, which cancels them when it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coro: Work, *, name: str) -> None:
        """Run `coro` as the function `spawn` does; this object owns the task until it is done."""
        _ = _spawn(coro, name, self._tasks)

    async def complete(self, coro: Work, *, name: str) -> None:
        """Run `coro` to its end, even if the caller is cancelled; raise what it raises."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                await coro
            except Exception as error:
                if done.done():
                    raise
                done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(None)

        self.spawn(run(), name=name)
        await done

    def supervise(self, loop: Callable[[], Work], *, name: str) -> None:
        """Run a loop as the function `supervise` does; this object owns its task."""
        _ = _spawn(_again_and_again(loop, name), name, self._tasks)

    async def join(self) -> None:
        """Wait until no task is left, including tasks that are spawned meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Cancel the running tasks and wait until all have ended."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


def in_thread(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Return the result to come of a function that may never return, as on a mount that hangs.

    It runs in a thread of its own, for which no exit of the process waits. It runs to its end,
    whatever becomes of the future.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[], None]) -> None:
        if not future.done():
            set_it()

    def run() -> None:
        try:
            done = partial(future.set_result, function())
        except BaseException as error:  # noqa: BLE001 - raised where the future is awaited
            done = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, done)

    Thread(target=run, name=name, daemon=True).start()
    return future


async def within(future: asyncio.Future[T], limit_s: float, what: str) -> T:
    """Return the result of a future. Raises TimeoutError if it takes longer than `limit_s`."""
    done, _ = await asyncio.wait({future}, timeout=limit_s)
    if not done:
        raise TimeoutError(f"{what} did not answer within {limit_s:g} s")
    return future.result()
