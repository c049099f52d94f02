"""Eviction order: the item with the least value for the time since its last use goes first.

Time is counted in uses and additions of all items. The chance that an item is used next is taken
as 1 / (that time): a recently used item will be used again, an item unused for long will not. The
rule is "hyperbolic caching" (Blankstein et al., 2017), with the last use instead of the first. For
the choice and its alternatives see docs/adr/0015.
"""

import heapq
from dataclasses import dataclass, field
from math import floor, inf, log
from typing import Generic, TypeVar

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
