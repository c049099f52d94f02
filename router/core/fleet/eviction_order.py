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

from router.base.frozen import dataclass

Item = TypeVar("Item", bound=str)

# Of those of about one worth the one that was used longest ago is first, whatever time it is; so
# only one of each class has to be compared. A class is so wide:
_WIDTH = log(1.2)
_NOTHING = -(2**31)  # the class of what is worth nothing


@dataclass(slots=True)
class _Rank:
    worth: float
    number: int  # of its class
    used: int


@dataclass(slots=True)
class _Class(Generic[Item]):
    """Those of about one worth. Rows of who has left or was used since stay until they come up."""

    heap: list[tuple[int, Item]] = field(default_factory=list)  # by last use
    n: int = 0  # without the stale ones


@dataclass(slots=True)
class Ranks(Generic[Item]):
    """Finding the least takes as long as there are classes, some ten or twenty."""

    _ranks: dict[Item, _Rank] = field(default_factory=dict)
    _classes: dict[int, _Class[Item]] = field(default_factory=dict)
    _now: int = 0

    def __len__(self) -> int:
        return len(self._ranks)

    def use(self, item: Item, worth: float) -> None:
        """It is new, or was used just now; what it is worth, in any unit."""
        self._now += 1
        self._put(item, worth, self._now)

    def value(self, item: Item, worth: float) -> None:
        """What it is worth has changed, if it is still there."""
        rank = self._ranks.get(item)
        if rank is not None and rank.worth != worth:
            self._put(item, worth, rank.used)

    def drop(self, item: Item) -> None:
        """It is gone."""
        rank = self._ranks.pop(item, None)
        if rank is not None:
            self._leave(rank.number)

    def least(self) -> Item:
        """The first to go. Raises LookupError if there is none."""
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
            raise LookupError("there is none")
        return least

    def _put(self, item: Item, worth: float, used: int) -> None:
        self.drop(item)
        number = _class(worth)
        self._ranks[item] = _Rank(worth, number, used)
        one = self._classes.setdefault(number, _Class())
        one.n += 1
        heapq.heappush(one.heap, (used, item))
        # Every use leaves a stale row behind. Most come up soon, and two at a time are taken off.
        for _ in range(2):
            if not self._is_current(number, *one.heap[0]):
                heapq.heappop(one.heap)
        if len(one.heap) > 3 * one.n + 64:
            one.heap = list({row for row in one.heap if self._is_current(number, *row)})
            heapq.heapify(one.heap)

    def _leave(self, number: int) -> None:
        one = self._classes[number]
        one.n -= 1
        if not one.n:  # its rows need not be looked at
            del self._classes[number]

    def _is_current(self, number: int, used: int, item: Item) -> bool:
        rank = self._ranks.get(item)
        return rank is not None and rank.used == used and rank.number == number


def _class(worth: float) -> int:
    return floor(log(worth) / _WIDTH) if worth > 0 else _NOTHING
