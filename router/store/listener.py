"""Who is told what became of snapshots on disk, and asked what they are worth."""

from collections.abc import Sequence

from router.base.types import Snapshot, SnapshotId


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
