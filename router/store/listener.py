"""Who is told what became of snapshots on disk, and asked what they are worth.

The snapshots of a directory that hangs are withdrawn, and offered again when it answers.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from router.base.tasks import Work
from router.base.types import KvDir, Snapshot, SnapshotId
from router.store.records import KvDirectory, StoredSnapshot


class StoreListener:
    """The router around a store; this one does nothing."""

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        """Note a snapshot that can be used no more, or is in a directory that hangs."""

    async def found(self, snapshots: list[Snapshot]) -> None:
        """Note those in a directory that answers again."""

    def stored(self, snapshot: Snapshot) -> None:
        """Note that a snapshot has blobs now, or no whole file any more."""

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        """Return whether a snapshot would be kept, and not evicted next."""
        return True

    def alike(self, snapshot: Snapshot) -> Sequence[tuple[SnapshotId, int]]:
        """Return the snapshots that begin like one, each with the tokens that they share."""
        return ()


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
        return self._tell(directory.kv_dir, there, lost=directory.threads.hangs)

    async def _tell(self, kv_dir: KvDir, snapshots: Sequence[Snapshot], *, lost: bool) -> None:
        """Report one change of a directory completely before its next change.

        A loss that is reported late would withdraw snapshots that were offered again.
        """
        async with self._telling[kv_dir]:
            if not lost:
                await self._on_back()
                await self._listener().found([s for s in snapshots if s.id in self._held])
                return
            for number, snapshot in enumerate(snapshots):
                self._listener().lost(snapshot, "its directory does not answer")
                if number % _TOLD_AT_ONCE == 0:
                    await asyncio.sleep(0)
