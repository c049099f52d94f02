"""The threads in which one directory is worked on, and how long anybody waits for them.

A file system can hang, a network's above all: a call then returns after minutes or never, and no
thread in it can be ended. What waits for such a directory is told no, at once from the second
time on, until the call that hangs has returned.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import structlog

from router.errors import KvError

log = structlog.get_logger(__name__)

T = TypeVar("T")

# Seconds. A stat takes microseconds, a rename while a journal is written some seconds.
QUICK_S = 10.0
# A copy or a checksum of tens of gigabytes; as long as a server may take for a save.
BULK_S = 120.0


class Threads:
    """Two small pools, so that a stat does not queue behind the checksum of ten gigabytes."""

    def __init__(self, place: str, on_change: Callable[[], None]) -> None:
        """`on_change` is called in the loop when `hangs` has become another."""
        self._place = place
        self._on_change = on_change
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

    def begin(self, function: Callable[[], T], *, quick: bool) -> asyncio.Future[T]:
        """`quick`: it only looks, or renames; else it reads or writes as much as a file has.
        Raises KvError while the directory hangs."""
        if self.hangs:
            raise KvError(f"{self._place} does not answer")
        pool = self._quick if quick else self._bulk
        future = asyncio.get_running_loop().run_in_executor(pool, function)
        self._n_working += 1
        future.add_done_callback(self._ended)
        return future

    async def result(self, future: asyncio.Future[T], limit_s: float | None) -> T:
        """Wait for what was begun, and cancel nothing if cancelled. Raises KvError if it takes
        longer; it goes on all the same."""
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
