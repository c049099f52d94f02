"""Snapshots in a directory that hangs: withdrawn, and offered again when it answers."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from router.base.tasks import Work
from router.base.types import KvDir, Snapshot, SnapshotId
from router.store.listener import StoreListener
from router.store.records import KvDirectory, StoredSnapshot

_TOLD_AT_ONCE = 10  # to find ten thousand in an index at once would hold up the event loop


class Withdrawal:
    """Tells the listener of a store what became of the snapshots of a directory."""

    def __init__(
        self,
        held: Mapping[SnapshotId, StoredSnapshot],
        listener: Callable[[], StoreListener],
        on_back: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_back` is called when a directory has answered again."""
        self._held = held
        self._listener = listener
        self._on_back = on_back
        self._telling: defaultdict[KvDir, asyncio.Lock] = defaultdict(asyncio.Lock)

    def changed(self, directory: KvDirectory) -> Work:
        """Return the changes because a directory hangs, or answers again."""
        there = [h.snapshot for h in self._held.values() if h.directory is directory]
        tell = self._lost if directory.threads.hangs else self._found
        return self._in_turn(directory.kv_dir, tell, there)

    async def _in_turn(
        self,
        kv_dir: KvDir,
        tell: Callable[[Sequence[Snapshot]], Awaitable[None]],
        snapshots: Sequence[Snapshot],
    ) -> None:
        """Report one change of a directory completely before its next change.

        A loss that is reported late would withdraw snapshots that were offered again.
        """
        async with self._telling[kv_dir]:
            await tell(snapshots)

    async def _lost(self, snapshots: Sequence[Snapshot]) -> None:
        for number, snapshot in enumerate(snapshots):
            self._listener().lost(snapshot, "its directory does not answer")
            if number % _TOLD_AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _found(self, snapshots: Sequence[Snapshot]) -> None:
        await self._on_back()
        await self._listener().found([s for s in snapshots if s.id in self._held])
