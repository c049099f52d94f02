"""Which of many things to give up first: what is worth least for the time since it was used.

Time is counted in uses and additions, of all of them. The chance that something is used next is
taken for 1 / (that time): who came back a moment ago will again, and who has not for long has left
("hyperbolic caching", Blankstein et al., 2017, with the last use for the first). What was chosen,
and what it is better than: docs/adr/0015.
"""

import heapq
from dataclasses import field
from math import floor, inf, log
from typing import Generic, TypeVar

from router.frozen import dataclass

Item = TypeVar("Item", bound=str)

# Of those of about one worth the one that was used longest ago is first, whatever time it is; so
# only one of each class has to be compared. A class is so wide:
_WIDTH = log(1.2)
_NOTHING = -(2**31)  # the class of what is worth nothing


@dataclass(slots=True)
class _Rank:
    worth: float
    used: int


@dataclass(slots=True)
class Ranks(Generic[Item]):
    """Finding the least takes as long as there are classes, some ten or twenty."""

    _ranks: dict[Item, _Rank] = field(default_factory=dict)
    _heaps: dict[int, list[tuple[int, Item]]] = field(default_factory=dict)  # by class; some stale
    _rows: int = 0  # in all heaps
    _now: int = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def use(self, item: Item, worth: float) -> None:
        """It is new, or was used just now; what it is worth, in any unit."""
        self._now += 1
        self._ranks[item] = _Rank(worth, self._now)
        self._push(item)

    def value(self, item: Item, worth: float) -> None:
        """What it is worth has changed, if it is still there."""
        rank = self._ranks.get(item)
        if rank is not None and rank.worth != worth:
            rank.worth = worth
            self._push(item)

    def drop(self, item: Item) -> None:
        """It is gone."""
        self._ranks.pop(item, None)

    def least(self) -> Item:
        """The first to go. Raises LookupError if there is none."""
        least, lowest = None, inf
        for number in list(self._heaps):
            item = self._longest_ago(number)
            if item is None:
                continue
            rank = self._ranks[item]
            here = rank.worth / (self._now - rank.used + 1)
            if least is None or here < lowest:
                least, lowest = item, here
        if least is None:
            raise LookupError("there is none")
        return least

    def _longest_ago(self, number: int) -> Item | None:
        heap = self._heaps[number]
        while heap:
            used, item = heap[0]
            rank = self._ranks.get(item)
            if rank is not None and rank.used == used and _class(rank.worth) == number:
                return item
            heapq.heappop(heap)
            self._rows -= 1
        del self._heaps[number]
        return None

    def _push(self, item: Item) -> None:
        # Every use leaves a stale row behind; rebuild before they are most of it.
        if self._rows > 4 * len(self._ranks) + 64:
            self._rebuild()
        else:
            rank = self._ranks[item]
            heapq.heappush(self._heaps.setdefault(_class(rank.worth), []), (rank.used, item))
            self._rows += 1

    def _rebuild(self) -> None:
        self._heaps.clear()
        for item, rank in self._ranks.items():
            self._heaps.setdefault(_class(rank.worth), []).append((rank.used, item))
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._rows = len(self._ranks)


def _class(worth: float) -> int:
    return floor(log(worth) / _WIDTH) if worth > 0 else _NOTHING
