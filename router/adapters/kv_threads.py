"""The threads in which one directory is worked on, and how long anybody waits for them.

A file system can hang, a network's above all: a call then returns after minutes or never, and no
thread in it can be ended. What waits for such a directory is told no, at once from the second
time on, until the call that hangs has returned.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import structlog

from router.adapters.manifest import os_errors
from router.errors import KvError, KvFileError
from router.ports import Spawn

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Seconds. A stat takes microseconds, a rename while a journal is written some seconds.
QUICK_S = 10.0
# A copy or a checksum of tens of gigabytes; as long as a server may take for a save.
BULK_S = 120.0


class Threads:
    """Two small pools, so that a stat does not queue behind the checksum of ten gigabytes."""

    def __init__(self, place: str, on_change: Callable[[], None], spawn: Spawn) -> None:
        """`on_change` is called in the loop when `hangs` has become another."""
        self._place = place
        self._on_change = on_change
        self._spawn = spawn
        self._quick = ThreadPoolExecutor(2, "kv-quick")  # stat, rename, head
        self._bulk = ThreadPoolExecutor(2, "kv-bulk")  # fsync, checksum, copy
        self._stuck: set[asyncio.Future[Any]] = set()
        self._n_working = 0

    @property
    def hangs(self) -> bool:
        """Somebody gave up waiting for a call that has not returned yet."""
        return bool(self._stuck)

    @property
    def works(self) -> bool:
        """A call has not returned, whether anybody waits for it or not."""
        return self._n_working > 0

    async def quick(
        self,
        function: Callable[[], T],
        undo: Callable[[], None] | None = None,
        *,
        blame_file: bool = False,
    ) -> T:
        """Do what only looks, or renames. Raises KvError; with `blame_file`, an OSError means that
        the file is not what it should be: KvFileError.

        If nobody waits to its end, its effect is undone in the background: a thread cannot be
        cancelled, and the file that it makes would belong to nobody.
        """
        return await self._do(self._quick, function, QUICK_S, undo, blame_file=blame_file)

    async def bulk(
        self,
        function: Callable[[], T],
        undo: Callable[[], None] | None = None,
        *,
        blame_file: bool = False,
    ) -> T:
        """As `quick`, for what reads or writes as much as a file has."""
        return await self._do(self._bulk, function, BULK_S, undo, blame_file=blame_file)

    async def unhurried(self, function: Callable[[], T]) -> T:
        """As `bulk`, for what no request waits for: it takes as long as it takes."""
        return await self._do(self._bulk, function, None, None)

    async def _do(
        self,
        pool: ThreadPoolExecutor,
        function: Callable[[], T],
        limit_s: float | None,
        undo: Callable[[], None] | None,
        *,
        blame_file: bool = False,
    ) -> T:
        with os_errors("kv store", KvFileError if blame_file else KvError):
            future = self._begin(pool, function)
            try:
                return await self._result(future, limit_s)
            except BaseException as error:
                alone = not future.done() or isinstance(error, asyncio.CancelledError)
                if undo is not None and alone:
                    self._spawn(self._undo(future, undo), name="kv_undo")
                raise

    async def _undo(self, future: asyncio.Future[Any], undo: Callable[[], None]) -> None:
        with suppress(KvError, OSError):
            await future
        with suppress(KvError):
            await self.quick(undo)

    def _begin(self, pool: ThreadPoolExecutor, function: Callable[[], T]) -> asyncio.Future[T]:
        if self.hangs:
            raise KvError(f"{self._place} does not answer")
        future = asyncio.get_running_loop().run_in_executor(pool, function)
        self._n_working += 1
        future.add_done_callback(self._ended)
        return future

    async def _result(self, future: asyncio.Future[T], limit_s: float | None) -> T:
        """Wait for what was begun, and cancel nothing if cancelled. It goes on if it takes longer
        than anybody waits."""
        await asyncio.wait([future], timeout=limit_s)
        if not future.done():
            self._give_up(future)
            raise KvError(f"{self._place} does not answer")
        return future.result()

    def close(self) -> None:
        """Take nothing more. What is under way goes on."""
        for pool in (self._quick, self._bulk):
            pool.shutdown(wait=False, cancel_futures=True)

    def _ended(self, future: asyncio.Future[Any]) -> None:
        self._n_working -= 1
        if not future.cancelled():
            future.exception()  # perhaps nobody else asks for it any more

    def _give_up(self, future: asyncio.Future[Any]) -> None:
        hung_before = self.hangs
        self._stuck.add(future)
        future.add_done_callback(self._returned)
        if not hung_before:
            log.error("kv_dir_hangs", kv_dir=self._place)
            self._on_change()

    def _returned(self, future: asyncio.Future[Any]) -> None:
        self._stuck.discard(future)
        if not self.hangs:
            log.warning("kv_dir_answers_again", kv_dir=self._place)
            self._on_change()
