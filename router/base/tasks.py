"""Background tasks that cannot get lost: referenced until done, named, their exceptions logged.

The event loop keeps only weak references to tasks, and an exception that nobody retrieves is
reported when the garbage collector gets there, if it does. `asyncio.create_task` is banned for
these two reasons.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)

# Strong references; a task leaves in its done callback.
_running: set[asyncio.Task[None]] = set()


def spawn(coro: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Run `coro` in the background of the running loop.

    The task does not raise when awaited: an exception of `coro` is logged with its traceback,
    and a cancellation is the end that was asked for. (A task cancelled before its first step is
    the exception: awaiting that one raises CancelledError.)
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
        coro.close()  # one that never started would warn; a finished one does not mind

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
    """The tasks of one owner, which ends them when it ends itself."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coro: Coroutine[Any, Any, None], *, name: str) -> None:
        """As the function `spawn`; the task is this object's until it is done."""
        _ = _spawn(coro, name, self._tasks)

    async def join(self) -> None:
        """Wait until none is left, those included that are spawned meanwhile."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def aclose(self) -> None:
        """Cancel what still runs and wait until all of it has ended."""
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
