"""Eviction order: the item with the least value for the time since its last use goes first.

Time is counted in uses and additions of all items. The chance that an item is used next is taken
as 1 / (that time): a recently used item will be used again, an item unused for long will not. The
rule is "hyperbolic caching" (Blankstein et al., 2017), with the last use instead of the first. For
the choice and its alternatives see docs/adr/0015. What a client wants kept is not evicted for a
time (`Protection`).
"""

import heapq
from collections import Counter
from dataclasses import dataclass, field
from math import floor, inf, log
from typing import Generic, TypeVar

from router.base.types import SnapshotId
from router.core.model.tuning import TUNING

Item = TypeVar("Item", bound=str)

_NOTHING = -(2**31)  # the class of items without value


@dataclass(slots=True)
class _Rank:
    worth: float
    number: int  # the number of its class
    used: int


@dataclass(slots=True)
class _Class(Generic[Item]):
    """Items of about equal value. Stale rows (dropped or used since) stay until they come up."""

    heap: list[tuple[int, Item]] = field(default_factory=list)  # by last use
    n: int = 0  # items, without the stale rows


@dataclass(slots=True)
class EvictionOrder(Generic[Item]):
    """Items with value and last use. `least` takes one step per class, some 10 to 20."""

    _ranks: dict[Item, _Rank] = field(default_factory=dict)
    _classes: dict[int, _Class[Item]] = field(default_factory=dict)
    _now: int = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def use(self, item: Item, worth: float) -> None:
        """Add an item, or note that it was used just now. `worth` is its value, in any unit."""
        self._now += 1
        self._put(item, worth, self._now)

    def value(self, item: Item, worth: float) -> None:
        """Change the value of an item, if it is still there."""
        rank = self._ranks.get(item)
        if rank is not None and rank.worth != worth:
            self._put(item, worth, rank.used)

    def drop(self, item: Item) -> None:
        """Remove an item, if it is there."""
        rank = self._ranks.pop(item, None)
        if rank is not None:
            self._leave(rank.number)

    def least(self) -> Item:
        """Return the item to evict first. Raise LookupError if there is none."""
        least, lowest = None, inf
        for number, one in self._classes.items():
            while not self._is_current(number, *one.heap[0]):
                heapq.heappop(one.heap)
            item = one.heap[0][1]
            rank = self._ranks[item]
            here = rank.worth / (self._now - rank.used + 1)
            if least is None or here < lowest:
                least, lowest = item, here
        if least is None:
            raise LookupError("the eviction order is empty")
        return least

    def _put(self, item: Item, worth: float, used: int) -> None:
        self.drop(item)
        number = _class(worth)
        self._ranks[item] = _Rank(worth, number, used)
        one = self._classes.setdefault(number, _Class())
        one.n += 1
        heapq.heappush(one.heap, (used, item))
        # Every use leaves a stale row. Most come up soon, and each call removes up to two.
        for _ in range(2):
            if not self._is_current(number, *one.heap[0]):
                heapq.heappop(one.heap)
        if len(one.heap) > 3 * one.n + 64:
            one.heap = list({row for row in one.heap if self._is_current(number, *row)})
            heapq.heapify(one.heap)

    def _leave(self, number: int) -> None:
        one = self._classes[number]
        one.n -= 1
        if not one.n:  # its stale rows go with it
            del self._classes[number]

    def _is_current(self, number: int, used: int, item: Item) -> bool:
        rank = self._ranks.get(item)
        return rank is not None and rank.used == used and rank.number == number


def _class(worth: float) -> int:
    return floor(log(worth) / TUNING.eviction_class_width) if worth > 0 else _NOTHING


@dataclass(slots=True)
class Protection:
    """Protected snapshots, each until a time in clock seconds, for its owner; "": the operator."""

    total_bytes: int = 0
    _held: dict[SnapshotId, tuple[float, str, int]] = field(default_factory=dict)  # with bytes
    _next: float = inf  # when the first one ends, or before

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
        self._next = min(self._next, until)

    def drop(self, snapshot: SnapshotId) -> None:
        """End the protection of a snapshot, if it has one."""
        self.total_bytes -= self._held.pop(snapshot, (-inf, "", 0))[2]

    def lapsed(self, now: float, max_bytes: float = inf) -> list[SnapshotId]:
        """Drop and return the snapshots whose time is over, then the next ones above `max_bytes`.

        Of these, clients' go before the operator's, first those of the client that has most, and of
        one owner those whose time ends first.
        """
        found: list[SnapshotId] = []
        if self._next <= now:
            found = [one for one, (until, _, _) in self._held.items() if until <= now]
            for one in found:
                self.drop(one)
            self._next = min((until for until, _, _ in self._held.values()), default=inf)
        if self.total_bytes <= max_bytes:
            return found
        rows: dict[str, list[SnapshotId]] = {}
        bytes_of: dict[str, int] = Counter()
        for one in sorted(self._held, key=lambda one: -self._held[one][0]):
            _, owner, size_bytes = self._held[one]
            rows.setdefault(owner, []).append(one)
            bytes_of[owner] += size_bytes
        while self.total_bytes > max_bytes:
            owner = max(rows, key=lambda one: (one != "", bytes_of[one]))
            found.append(rows[owner].pop())
            bytes_of[owner] -= self._held[found[-1]][2]
            self.drop(found[-1])
            if not rows[owner]:
                del rows[owner]
        return found
