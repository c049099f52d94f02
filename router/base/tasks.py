"""Background tasks that cannot get lost: referenced until done, named, their exceptions logged.

The event loop keeps only weak references to tasks. An exception that is not retrieved is reported
when the garbage collector gets there, if it does. For these two reasons `asyncio.create_task` is
banned.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

# Strong references; the done callback of a task removes it.
_running: set[asyncio.Task[None]] = set()


def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Run `coro` in the background of the running loop.

    Awaiting the task does not raise: an exception of `coro` is logged with its traceback, and a
    cancellation ends the task normally. Only a task that was cancelled before its first step
    raises CancelledError.
    """
    return _spawn(coro, name, _running)


def _spawn(
    coro: Coroutine[Any, Any, None], name: str, owned: set[asyncio.Task[None]]
) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(_guard(coro, name), name=name)
    _running.add(task)
    owned.add(task)

    def done(task: asyncio.Task[None]) -> None:
        _running.discard(task)
        owned.discard(task)
        coro.close()  # one that never started would warn; no effect on a finished one

    task.add_done_callback(done)
    return task


async def _guard(coro: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await coro
    except asyncio.CancelledError:
        pass
    except Exception:
        log.exception("task_failed", task=name)


class Tasks:
    """The tasks of one owner, which cancels them when it ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coro: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run `coro` as the function `spawn` does; this object owns the task until it is done."""
        _ = _spawn(coro, name, self._tasks)

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
