"""Threads for the file work of one directory, with limits on the wait for them.

A file system can hang, a network's above all: a call then returns after minutes or never, and its
thread cannot be ended. The wait for such a call fails at its limit. Later calls fail at once, until
the call that hangs has returned. A call that only waits for a thread does not hang.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import structlog

from router.base.errors import KvError, KvFileError
from router.base.ports import Spawn
from router.store.files import os_errors

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Seconds. A stat takes microseconds; a rename while the file system's journal is written, seconds.
QUICK_S = 10.0
# Seconds. A copy or a checksum of tens of gigabytes; as long as a server may take for a save.
BULK_S = 120.0


def loop_now() -> float:
    """Return the time of the running loop, in seconds."""
    return asyncio.get_running_loop().time()


class _Call(Generic[T]):
    """A function call in a thread; its effect is undone if it was abandoned before it returned."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        function: Callable[[], T],
        undo: Callable[[T], object] | None,
        on_begun: Callable[["_Call[Any]"], None],
    ) -> None:
        """Submit `function`; call `on_begun` in the loop when a thread has begun it."""
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._undo = undo
        self._on_begun = on_begun
        self._returned = self._abandoned = False
        self._lock = threading.Lock()  # guards `_returned` and `_abandoned`
        self.returned_late: asyncio.Future[Any] = self._loop.create_future()
        self.job = pool.submit(self._run)
        self.future: asyncio.Future[Any] = asyncio.wrap_future(self.job)

    def _run(self) -> T:
        self._loop.call_soon_threadsafe(self._on_begun, self)
        result = self._function()
        with self._lock:
            self._returned = True
            unwanted = self._abandoned
        if unwanted and self._undo is not None:
            self._undo(result)
        return result

    def abandon(self) -> bool:
        """Give up the effect; return True if it is there and the thread will not undo it."""
        with self._lock:
            self._abandoned = True
            return self._returned

    async def ended(self) -> None:
        """Wait until the call has returned, or was cancelled before it began."""
        await asyncio.wait([self.future])


class Threads:
    """Small pools of threads for one directory.

    A stat does not queue behind the checksum of ten gigabytes. Work that a request waits for does
    not queue behind background work.
    """

    def __init__(
        self, kv_dir: str, on_change: Callable[[], None], spawn: Spawn, n_unhurried: int = 2
    ) -> None:
        """Create the pools; `on_change` is called in the loop when `hangs` has changed."""
        self.kv_dir = kv_dir
        self._on_change = on_change
        self._spawn = spawn
        self._quick = ThreadPoolExecutor(2, "kv-quick")  # stat, rename, head
        self._bulk = ThreadPoolExecutor(2, "kv-bulk")  # checksum, copy
        self._unhurried = ThreadPoolExecutor(n_unhurried, "kv-unhurried")  # fsync, checksum, delete
        self._limited: set[_Call[Any]] = set()
        self._stuck: set[_Call[Any]] = set()
        self._n_working = 0
        self._closed = False

    @property
    def hangs(self) -> bool:
        """Return True if a call is past its limit and has not returned yet."""
        return bool(self._stuck)

    @property
    def works(self) -> bool:
        """Return True if a call has not returned, awaited or not."""
        return self._n_working > 0

    async def quick(
        self,
        function: Callable[[], T],
        undo: Callable[[T], object] | None = None,
        *,
        blame_file: bool = False,
    ) -> T:
        """Run a function that only looks or renames; give up after QUICK_S.

        Raises KvError; with `blame_file`, an OSError means a wrong file and raises KvFileError.
        If the wait ends before the function does, `undo` gets its result, in a thread: a thread
        cannot be cancelled, and the file that it makes would have no owner.
        """
        return await self._do(self._quick, function, QUICK_S, undo, blame_file=blame_file)

    async def bulk(
        self,
        function: Callable[[], T],
        undo: Callable[[T], object] | None = None,
        *,
        blame_file: bool = False,
    ) -> T:
        """Run a function that reads or writes a whole file, as `quick`, for up to BULK_S."""
        return await self._do(self._bulk, function, BULK_S, undo, blame_file=blame_file)

    async def unhurried(
        self, function: Callable[[], T], undo: Callable[[T], object] | None = None
    ) -> T:
        """Run a function that no request waits for, without a limit.

        Where the directory hangs, the function runs when the directory answers.
        """
        return await self._do(self._unhurried, function, None, undo)

    async def _do(
        self,
        pool: ThreadPoolExecutor,
        function: Callable[[], T],
        limit_s: float | None,
        undo: Callable[[T], object] | None,
        *,
        blame_file: bool = False,
    ) -> T:
        with os_errors("kv store", KvFileError if blame_file else KvError):
            call = self._begin(pool, function, limit_s, undo)
            try:
                return await self._result(call)
            except BaseException:
                if undo is not None:
                    with suppress(KvError):  # closed: the next start removes it
                        self._abandon(call, undo)
                raise

    def _begin(
        self,
        pool: ThreadPoolExecutor,
        function: Callable[[], T],
        limit_s: float | None,
        undo: Callable[[T], object] | None = None,
    ) -> _Call[T]:
        if self._closed:  # a file was committed while the store ended
            raise KvError(f"{self.kv_dir} is closed")
        if limit_s is not None and self.hangs:
            raise KvError(f"{self.kv_dir} does not answer")
        call = _Call(pool, function, undo, partial(self._begun, limit_s))
        if limit_s is not None:
            self._limited.add(call)
        self._n_working += 1
        call.future.add_done_callback(lambda _: self._ended(call))
        return call

    async def _result(self, call: _Call[T]) -> T:
        """Wait for a call, which goes on if this wait is cancelled or reaches the call's limit."""
        await asyncio.wait([call.future, call.returned_late], return_when=asyncio.FIRST_COMPLETED)
        if not call.future.done() or call.future.cancelled():
            raise KvError(f"{self.kv_dir} does not answer")
        result: T = call.future.result()
        return result

    def _abandon(self, call: _Call[T], undo: Callable[[T], object]) -> None:
        unwanted: _Call[Any] = call
        if call.abandon():
            unwanted = self._begin(self._quick, lambda: undo(call.job.result()), None)
        if not unwanted.future.done():
            self._spawn(unwanted.ended(), name="kv_undo")

    def close(self) -> None:
        """Refuse further calls. A call that a thread has begun goes on."""
        self._closed = True
        for pool in (self._quick, self._bulk, self._unhurried):
            pool.shutdown(wait=False, cancel_futures=True)

    def _begun(self, limit_s: float | None, call: _Call[Any]) -> None:
        """Start the timer of a call, awaited or not: other calls wait for its thread."""
        if limit_s is not None and not call.future.done():
            clock = asyncio.get_running_loop().call_later(limit_s, self._give_up, call)
            call.future.add_done_callback(lambda _: clock.cancel())

    def _give_up(self, call: _Call[Any]) -> None:
        hung_before = self.hangs
        self._stuck.add(call)
        call.returned_late.set_result(None)
        if not hung_before:
            for other in self._limited:
                other.job.cancel()  # only if no thread has begun it
            log.error("kv_dir_hangs", kv_dir=self.kv_dir)
            self._on_change()

    def _ended(self, call: _Call[Any]) -> None:
        self._n_working -= 1
        self._limited.discard(call)
        if not call.future.cancelled():
            call.future.exception()  # perhaps its caller no longer asks for it
        if call in self._stuck:
            self._stuck.discard(call)
            if not self.hangs:
                log.warning("kv_dir_answers_again", kv_dir=self.kv_dir)
                self._on_change()
