"""Bytes of items that share blobs: each blob counts once, however many items have it."""

from dataclasses import dataclass, field
from operator import is_
from typing import Generic, TypeVar

from router.base.types import Blob

Item = TypeVar("Item", bound=str)


@dataclass(slots=True)
class SharedBytes(Generic[Item]):
    """Which items have which blobs."""

    total_bytes: int = 0  # of all blobs, each once
    sum_bytes: int = 0  # of all items, as if none shared
    _items: dict[Item, tuple[Blob, ...]] = field(default_factory=dict)
    _users: dict[Blob, int] = field(default_factory=dict)
    _same: dict[Blob, Blob] = field(default_factory=dict)

    def __contains__(self, item: Item) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)

    @property
    def n_blobs(self) -> int:
        """Return the number of different blobs."""
        return len(self._users)

    def has(self, blob: Blob) -> bool:
        """Return whether an item has this blob."""
        return blob in self._users

    def put(self, item: Item, blobs: tuple[Blob, ...]) -> tuple[Blob, ...]:
        """Set the blobs of an item, in place of those before; return the objects others have."""
        before, known = self._items.get(item, ()), tuple(self._same.get(one, one) for one in blobs)
        known = blobs if all(map(is_, known, blobs)) else known
        self._items[item] = known
        self.sum_bytes += sum(blob.size_bytes for blob in known)
        for blob in dict.fromkeys(known):
            users = self._users[blob] = self._users.get(blob, 0) + 1
            if users == 1:
                self.total_bytes += blob.size_bytes
                self._same[blob] = blob
        self._release(before)
        return known

    def remove(self, item: Item) -> list[Blob]:
        """Remove an item, if it is there; return the blobs that nobody has now."""
        return self._release(self._items.pop(item, ()))

    def items_with(self, blob: Blob) -> list[Item]:
        """Return the items that have a blob. Looks at all items: for damage only."""
        return [item for item, blobs in self._items.items() if blob in blobs]

    def _release(self, blobs: tuple[Blob, ...]) -> list[Blob]:
        unused: list[Blob] = []
        self.sum_bytes -= sum(blob.size_bytes for blob in blobs)
        for blob in dict.fromkeys(blobs):
            self._users[blob] -= 1
            if not self._users[blob]:
                del self._users[blob], self._same[blob]
                self.total_bytes -= blob.size_bytes
                unused.append(blob)
        return unused
