"""Who is told what became of snapshots on disk, and asked what they are worth."""

from collections.abc import Sequence
from typing import Protocol

from router.base.types import Snapshot, SnapshotId


class StoreListener(Protocol):
    """The router around a store."""

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        """Note a snapshot that can be used no more, or is in a directory that hangs."""

    async def found(self, snapshots: list[Snapshot]) -> None:
        """Note those in a directory that answers again."""

    def stored(self, snapshot: Snapshot) -> None:
        """Note that a snapshot has blobs now, or no whole file any more."""

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        """Return whether a snapshot would be kept, and not evicted next."""

    def alike(self, snapshot: Snapshot) -> Sequence[tuple[SnapshotId, int]]:
        """Return the snapshots that begin like one, each with the tokens that they share."""


class NullListener:
    """A listener that does nothing."""

    def lost(self, *_: object) -> None: ...
    async def found(self, *_: object) -> None: ...
    def stored(self, *_: object) -> None: ...
    def is_worth_writing(self, *_: object) -> bool:
        return True

    def alike(self, *_: object) -> Sequence[tuple[SnapshotId, int]]:
        return ()
