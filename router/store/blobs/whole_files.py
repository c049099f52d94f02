"""Whole files in a KV directory: which to split, which to drop.

A new state file is split only after some time: in a conversation that goes on, the next state
replaces it before, and nothing of it is ever written. Where blobs would be on the same disk, a file
is split only if another state shares bytes with it; else it stays as it is. A file that has been
split stays while there is room, so that a restore need not assemble it. Pure.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf

from router.base.types import SnapshotId


@dataclass(slots=True)
class WholeFiles:
    """The whole files of one KV directory; `split`: those with blobs, the one used last at the end.

    `limit_bytes`: of all files; `split_limit_bytes`: of those with blobs. `same_disk`: blobs are on
    the disk of the files.
    """

    limit_bytes: float = inf
    split_limit_bytes: float = inf
    same_disk: bool = False
    total_bytes: int = 0
    split_bytes: int = 0
    _sizes: dict[SnapshotId, int] = field(default_factory=dict)  # of all, the oldest first
    _split: OrderedDict[SnapshotId, None] = field(default_factory=OrderedDict)
    _due: dict[SnapshotId, float] = field(default_factory=dict)  # when to split, in clock seconds

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, snapshot: SnapshotId, size_bytes: int, due: float | None) -> None:
        """Add a file. `due`: when to split it, in clock seconds; None: it has blobs."""
        self.drop(snapshot)
        self._sizes[snapshot] = size_bytes
        self.total_bytes += size_bytes
        if due is None:
            self.written(snapshot)
        else:
            self._due[snapshot] = due

    def drop(self, snapshot: SnapshotId) -> None:
        """Forget a file, if it is there."""
        size_bytes = self._sizes.pop(snapshot, 0)
        self.total_bytes -= size_bytes
        if snapshot in self._split:
            self.split_bytes -= size_bytes
            del self._split[snapshot]
        self._due.pop(snapshot, None)

    def use(self, snapshot: SnapshotId) -> None:
        """Note that a file was read."""
        if snapshot in self._split:
            self._split.move_to_end(snapshot)

    def written(self, snapshot: SnapshotId) -> None:
        """Note that a file has blobs."""
        self._due.pop(snapshot, None)
        if snapshot in self._sizes and snapshot not in self._split:
            self._split[snapshot] = None
            self.split_bytes += self._sizes[snapshot]

    def put_off(self, snapshot: SnapshotId, due: float) -> None:
        """Split a file later."""
        if snapshot in self._due:
            self._due[snapshot] = due

    def leave(self, snapshot: SnapshotId) -> None:
        """Leave a file as it is, until another one shares bytes with it."""
        self._due.pop(snapshot, None)

    def split_soon(self, snapshots: Iterable[SnapshotId], now: float) -> None:
        """Split those of the files that were left as they are."""
        for snapshot in snapshots:
            if self.is_unwritten(snapshot):
                self._due.setdefault(snapshot, now)

    @property
    def is_full(self) -> bool:
        """Return whether the files take more room than there is for them."""
        return self.total_bytes > self.limit_bytes

    def to_drop(self, in_use: Collection[SnapshotId]) -> SnapshotId | None:
        """Return the file to drop next: with blobs, not in use, unused for longest.

        None: there is room, or every file is in use or has no blobs.
        """
        if not self.is_full and self.split_bytes <= self.split_limit_bytes:
            return None
        return next((s for s in self._split if s not in in_use), None)

    def to_write(self, now: float) -> list[SnapshotId]:
        """Return the files to split now: those that are due, or one for which there is no room."""
        due = sorted((at, snapshot) for snapshot, at in self._due.items() if at <= now)
        if not due and self.is_full and self._due:
            return [min(self._due, key=self._due.__getitem__)]
        return [snapshot for _, snapshot in due]

    def to_give_up(self, in_use: Collection[SnapshotId]) -> SnapshotId | None:
        """Return the file to delete where no blobs may be written; None: there is room."""
        if not self.is_full:
            return None
        return next((s for s in self._sizes if s not in in_use), None)

    def wakeup(self) -> float:
        """Return when the next file is due, in clock seconds; inf: none is."""
        return min(self._due.values(), default=inf)

    def is_unwritten(self, snapshot: SnapshotId) -> bool:
        """Return whether a file is there that has no blobs."""
        return snapshot in self._sizes and snapshot not in self._split

    @property
    def due(self) -> Collection[SnapshotId]:
        """Return the files that are to be split."""
        return self._due.keys()

    def unwritten(self) -> list[SnapshotId]:
        """Return the files without blobs, the oldest first."""
        return [snapshot for snapshot in self._sizes if snapshot not in self._split]
