"""Whole files in the KV directories, while blobs are in use: which to write, which to drop.

A new state file is written as blobs only after some time: in a conversation that goes on, the next
state replaces it before, and nothing of it is ever written. A file that has been written stays
while there is room, so that a restore need not assemble it. Pure.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from router.base.types import SnapshotId


@dataclass(slots=True)
class WholeFiles:
    """The whole files of one KV directory, the one used last at the end."""

    limit_bytes: float = inf
    total_bytes: int = 0
    _sizes: OrderedDict[SnapshotId, int] = field(default_factory=OrderedDict)
    _due: dict[SnapshotId, float] = field(default_factory=dict)  # of files not written as blobs

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, snapshot: SnapshotId, size_bytes: int, due: float | None) -> None:
        """Add a file. `due`: when to write its blobs, in clock seconds; None: they are written."""
        self.drop(snapshot)
        self._sizes[snapshot] = size_bytes
        self.total_bytes += size_bytes
        if due is not None:
            self._due[snapshot] = due

    def drop(self, snapshot: SnapshotId) -> None:
        """Forget a file, if it is there."""
        self.total_bytes -= self._sizes.pop(snapshot, 0)
        self._due.pop(snapshot, None)

    def use(self, snapshot: SnapshotId) -> None:
        """Note that a file was read."""
        if snapshot in self._sizes:
            self._sizes.move_to_end(snapshot)

    def written(self, snapshot: SnapshotId) -> None:
        """Note that the blobs of a file are written."""
        self._due.pop(snapshot, None)

    def put_off(self, snapshot: SnapshotId, due: float) -> None:
        """Write the blobs of a file later."""
        if snapshot in self._due:
            self._due[snapshot] = due

    @property
    def is_full(self) -> bool:
        """Return whether the files take more room than there is for them."""
        return self.total_bytes > self.limit_bytes

    def to_drop(self, in_use: Collection[SnapshotId]) -> SnapshotId | None:
        """Return the file to drop next: written, not in use, unused for longest.

        None: there is room, or every file is in use or not written yet.
        """
        if not self.is_full:
            return None
        free = (s for s in self._sizes if s not in self._due and s not in in_use)
        return next(free, None)

    def to_write(self, now: float) -> SnapshotId | None:
        """Return a file whose blobs to write now: it is due, or there is no room for it."""
        if not self._due:
            return None
        first = min(self._due, key=self._due.__getitem__)
        return first if self.is_full or self._due[first] <= now else None

    def to_give_up(self, in_use: Collection[SnapshotId]) -> SnapshotId | None:
        """Return the file to delete where no blobs may be written; None: there is room."""
        if not self.is_full:
            return None
        return next((s for s in self._sizes if s not in in_use), None)

    def wakeup(self) -> float:
        """Return when the next file is due, in clock seconds; inf: none is."""
        return min(self._due.values(), default=inf)

    def is_unwritten(self, snapshot: SnapshotId) -> bool:
        """Return whether a file is there whose blobs are not written."""
        return snapshot in self._due

    def unwritten(self) -> list[SnapshotId]:
        """Return the files whose blobs are not written, the one due first at the begin."""
        return sorted(self._due, key=self._due.__getitem__)
