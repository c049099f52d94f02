"""Snapshots that are not evicted for a time: their clients said that they come back for them."""

import heapq
from dataclasses import dataclass, field
from math import inf

from router.base.types import SnapshotId

_Row = tuple[float, SnapshotId]


@dataclass(slots=True)
class Protection:
    """Protected snapshots, each until a time in clock seconds, for its owner; "": the operator."""

    total_bytes: int = 0
    _held: dict[SnapshotId, tuple[float, str, int]] = field(default_factory=dict)  # with bytes
    _bytes_of: dict[str, int] = field(default_factory=dict)  # by owner
    # By end, of all and of each owner. Stale rows (dropped or protected anew) stay until they come
    # up.
    _heap: list[_Row] = field(default_factory=list)
    _heaps: dict[str, list[_Row]] = field(default_factory=dict)
    _rows: int = 0  # of the heaps of owners

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self._held

    def of(self, snapshot: SnapshotId) -> tuple[float, str]:
        """Return when the protection of a snapshot ends, and whose it is; -inf: it has none."""
        until, owner, _ = self._held.get(snapshot, (-inf, "", 0))
        return until, owner

    def until(self, snapshot: SnapshotId) -> float:
        """Return when the protection of a snapshot ends; -inf: it has none."""
        return self.of(snapshot)[0]

    def add(self, snapshot: SnapshotId, until: float, size_bytes: int, owner: str = "") -> None:
        """Protect a snapshot; never for less time than before, and what the operator keeps is his.

        What a client kept is the operator's once he keeps it.
        """
        if snapshot in self._held:
            before, other = self.of(snapshot)
            if (owner and not other) or (bool(owner) == bool(other) and until <= before):
                return
            until = max(until, before)
            self.drop(snapshot)
        self._held[snapshot] = until, owner, size_bytes
        self.total_bytes += size_bytes
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size_bytes
        for heap in (self._heap, self._heaps.setdefault(owner, [])):
            heapq.heappush(heap, (until, snapshot))
        self._rows += 1
        if max(len(self._heap), self._rows) > 3 * len(self._held) + 64:
            self._rebuild()

    def drop(self, snapshot: SnapshotId) -> None:
        """End the protection of a snapshot, if it has one."""
        if snapshot not in self._held:
            return
        _, owner, size_bytes = self._held.pop(snapshot)
        self.total_bytes -= size_bytes
        self._bytes_of[owner] -= size_bytes

    def lapsed(self, now: float, max_bytes: float = inf) -> list[SnapshotId]:
        """Drop and return the snapshots whose time is over, then the next ones above `max_bytes`.

        Of these, clients' go before the operator's, first those of the client that has most, and of
        one owner those whose time ends first.
        """
        found: list[SnapshotId] = []
        while self._heap and self._heap[0][0] <= now:
            until, snapshot = heapq.heappop(self._heap)
            if self.until(snapshot) == until:
                self.drop(snapshot)
                found.append(snapshot)
        while self.total_bytes > max_bytes:
            owner = max(self._heaps, key=lambda one: (one != "", self._bytes_of.get(one, 0)))
            until, snapshot = heapq.heappop(self._heaps[owner])
            self._rows -= 1
            if not self._heaps[owner]:
                del self._heaps[owner]
            if self.of(snapshot) == (until, owner):
                self.drop(snapshot)
                found.append(snapshot)
        return found

    def _rebuild(self) -> None:
        self._heap, self._heaps = [], {}
        for snapshot, (until, owner, _) in self._held.items():
            self._heap.append((until, snapshot))
            self._heaps.setdefault(owner, []).append((until, snapshot))
        self._bytes_of = {owner: self._bytes_of[owner] for owner in self._heaps}
        self._rows = len(self._held)
        for heap in (self._heap, *self._heaps.values()):
            heapq.heapify(heap)
