"""Snapshots that are not evicted for a time: their clients said that they come back for them."""

import heapq
from dataclasses import dataclass, field
from math import inf

from router.base.types import SnapshotId


@dataclass(slots=True)
class Protection:
    """Protected snapshots, each until a time in clock seconds."""

    total_bytes: int = 0
    _held: dict[SnapshotId, tuple[float, int]] = field(default_factory=dict)  # until, bytes
    # By end. Stale rows (dropped or longer protected since) stay until they come up.
    _heap: list[tuple[float, SnapshotId]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._held

    def until(self, snapshot: SnapshotId) -> float:
        """Return when the protection of a snapshot ends; -inf: it has none."""
        return self._held[snapshot][0] if snapshot in self._held else -inf

    def add(self, snapshot: SnapshotId, until: float, size_bytes: int) -> None:
        """Protect a snapshot; never for less time than before."""
        if until <= self.until(snapshot):
            return
        self.drop(snapshot)
        self._held[snapshot] = until, size_bytes
        self.total_bytes += size_bytes
        heapq.heappush(self._heap, (until, snapshot))
        if len(self._heap) > 3 * len(self._held) + 64:
            self._heap = [(until, name) for name, (until, _) in self._held.items()]
            heapq.heapify(self._heap)

    def drop(self, snapshot: SnapshotId) -> None:
        """End the protection of a snapshot, if it has one."""
        _, size_bytes = self._held.pop(snapshot, (0.0, 0))
        self.total_bytes -= size_bytes

    def lapsed(self, now: float, max_bytes: float = inf) -> list[SnapshotId]:
        """Drop and return the snapshots whose time is over, then the next ones above `max_bytes`.

        Those go first whose time ends first.
        """
        found: list[SnapshotId] = []
        while self._heap and (self._heap[0][0] <= now or self.total_bytes > max_bytes):
            until, snapshot = heapq.heappop(self._heap)
            if self.until(snapshot) == until:
                self.drop(snapshot)
                found.append(snapshot)
        return found
