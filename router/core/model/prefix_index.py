"""A radix tree over token sequences: which items share how many tokens with a prompt.

A lookup walks the prompt once, so its cost depends on the prompt and not on the number of items.
Shared prefixes are stored once. Items are opaque and hashable. `GhostList` is such a tree over what
was held. What slots hold is compared with a prompt one by one: there are few (`SlotTable.shared`).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from msgspec import Struct

from router.base.tokens import WIDTH, Tokens, common_prefix, count
from router.base.types import Namespace
from router.core.model.tuning import TUNING

Item = TypeVar("Item", bound=Hashable)

# Nodes examined below the point of divergence, and children of each node. Every item there shares
# the same prefix, so examining all of them could only find a smaller file.
_BELOW = 8


class _Node(Generic[Item]):
    __slots__ = ("children", "edge", "items")

    def __init__(self, edge: bytes) -> None:
        self.edge = edge
        self.children: dict[bytes, _Node[Item]] = {}
        self.items: list[Item] = []


class Match(Struct, Generic[Item], frozen=True):
    """`common` tokens of the prompt are the first `common` of the item's `length` tokens."""

    item: Item
    common: int
    length: int


class PrefixIndex(Generic[Item]):
    """Items by token sequence. The same item may be inserted once only."""

    def __init__(self) -> None:
        self._root: _Node[Item] = _Node(b"")
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def insert(self, tokens: Tokens, item: Item) -> None:
        """Add an item, which may share its tokens with others."""
        node, at = self._root, 0
        while at < len(tokens):
            key = tokens[at : at + WIDTH]
            child = node.children.get(key)
            if child is None:
                child = _Node(tokens[at:])
                node.children[key] = child
                node, at = child, len(tokens)
                break
            common = _common_bytes(child.edge, tokens, at)
            if common < len(child.edge):
                child = self._split(node, key, common)
            node, at = child, at + common
        node.items.append(item)
        self._size += 1

    def remove(self, tokens: Tokens, item: Item) -> None:
        """Remove an item. Raise KeyError if it is not there."""
        path = [self._root]
        at = 0
        while at < len(tokens):
            child = path[-1].children.get(tokens[at : at + WIDTH])
            if child is None or _common_bytes(child.edge, tokens, at) < len(child.edge):
                raise KeyError(item)
            path.append(child)
            at += len(child.edge)
        if item not in path[-1].items:
            raise KeyError(item)
        path[-1].items.remove(item)
        self._size -= 1
        self._tidy(path)

    def match(self, tokens: Tokens, limit: int = 8) -> list[Match[Item]]:
        """Return up to `limit` items that share a prefix with `tokens`, the longest share first.

        At equal share the shorter item comes first: fewer bytes to move for the same gain. The
        shortest item may be missed where more items exist than are examined.
        """
        found: list[Match[Item]] = []
        path, common = self._walk(tokens)
        depth = common
        below: _Node[Item] | None = None  # already covered by a deeper step
        for node, end in reversed(path):
            shared = min(depth, end) // WIDTH
            depth = min(depth, end)
            for item, length in self._nearest(node, end, skip=below):
                found.append(Match(item, shared, length // WIDTH))
                if len(found) == limit:
                    return found
            below = node
            depth = end - len(node.edge)
        return found

    def nearest(self, tokens: Tokens) -> tuple[int, bool]:
        """Return the most tokens that an item shares, and whether such an item has more."""
        path, at = self._walk(tokens)
        if not path:
            return 0, False
        node, end = path[-1]
        return at // WIDTH, at < end or bool(node.children)

    def prefixes(self, tokens: Tokens) -> Iterator[Match[Item]]:
        """Yield the items that are a strict prefix of `tokens`, the shortest first."""
        whole = len(tokens) // WIDTH
        return (match for match in self.beginnings(tokens) if match.length < whole)

    def beginnings(self, tokens: Tokens) -> Iterator[Match[Item]]:
        """Yield the items that are a prefix of `tokens` or equal to them, the shortest first."""
        path, matched = self._walk(tokens)
        for node, end in path:
            if end <= matched:
                for item in node.items:
                    yield Match(item, end // WIDTH, end // WIDTH)

    def edges(self, tokens: Tokens) -> tuple[bytes, ...]:
        """Return the tokens of an item, in the pieces that the tree has of them."""
        return tuple(node.edge for node, _ in self._walk(tokens)[0])

    def branches_at(self, tokens: Tokens) -> int:
        """Count the different continuations that the tree has right after `tokens`."""
        path, common = self._walk(tokens)
        if common < len(tokens) or not path or path[-1][1] != len(tokens):
            return 0
        return len(path[-1][0].children)

    def _walk(self, tokens: Tokens) -> tuple[list[tuple[_Node[Item], int]], int]:
        """Return the nodes along `tokens` with their ends, and the length that matches; in bytes.

        The last node may be matched in part only.
        """
        path: list[tuple[_Node[Item], int]] = []
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(tokens[at : at + WIDTH])
            if child is None:
                break
            common = _common_bytes(child.edge, tokens, at)
            path.append((child, at + len(child.edge)))
            at += common
            if common < len(child.edge):
                break
            node = child
        return path, at

    def _nearest(
        self, node: _Node[Item], end: int, skip: _Node[Item] | None
    ) -> Iterator[tuple[Item, int]]:
        """Yield some items at or below `node` with their length in bytes, the shortest first."""
        frontier = [(end, 0, node)]  # the second number is unique: nodes have no order
        seen = 1
        for _ in range(_BELOW):
            if not frontier:
                return
            length, _, here = heappop(frontier)
            for item in here.items:
                yield item, length
            # A prefix that all prompts share has thousands of children; take the first few.
            for child in islice(here.children.values(), _BELOW):
                if child is not skip:
                    heappush(frontier, (length + len(child.edge), seen, child))
                    seen += 1

    def _split(self, parent: _Node[Item], key: bytes, at: int) -> _Node[Item]:
        """Put a node `at` bytes into the child's edge and return it."""
        child = parent.children[key]
        upper: _Node[Item] = _Node(child.edge[:at])
        child.edge = child.edge[at:]
        upper.children[child.edge[:WIDTH]] = child
        parent.children[key] = upper
        return upper

    def _tidy(self, path: list[_Node[Item]]) -> None:
        """Drop nodes that lead nowhere and join a node with its only child."""
        while len(path) > 1 and not path[-1].items and not path[-1].children:
            gone = path.pop()
            del path[-1].children[gone.edge[:WIDTH]]
        node = path[-1]
        if len(path) > 1 and not node.items and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge = node.edge + child.edge
            path[-2].children[child.edge[:WIDTH]] = child


def _common_bytes(edge: bytes, tokens: bytes, at: int) -> int:
    """Return the bytes of `edge` that `tokens` repeats from `at` on, in whole tokens."""
    part = tokens[at : at + len(edge)]
    if part == edge:
        return len(edge)
    return common_prefix(Tokens(edge), Tokens(part)) * WIDTH


_NOTHING: PrefixIndex[int] = PrefixIndex()
_ITEM_TOKENS = 64  # overhead of a sequence, in tokens


@dataclass(slots=True)
class GhostList:
    """Token sequences by namespace; beyond `max_tokens` the oldest are dropped.

    A lookup walks a prompt once, however many sequences there are.
    """

    max_tokens: int = TUNING.ghost_tokens
    _index: dict[Namespace, PrefixIndex[int]] = field(default_factory=dict)
    _kept: OrderedDict[int, tuple[Namespace, Tokens]] = field(default_factory=OrderedDict)
    _total: int = 0
    _made: int = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, namespace: Namespace, tokens: Tokens) -> None:
        """Add tokens that were held. Drop the sequences that are a prefix of them or equal."""
        if not tokens:
            return
        index = self._index.get(namespace)
        for item in [] if index is None else [match.item for match in index.beginnings(tokens)]:
            self._forget(item)
        self._made += 1
        index = self._index.setdefault(namespace, PrefixIndex())
        index.insert(tokens, self._made)
        self._kept[self._made] = namespace, tokens
        self._total += count(tokens) + _ITEM_TOKENS
        while self._total > self.max_tokens:
            self._forget(next(iter(self._kept)))

    def nearest(self, namespace: Namespace, tokens: Tokens) -> tuple[int, bool]:
        """Return how many leading tokens were held once, and whether others followed them."""
        return self._index.get(namespace, _NOTHING).nearest(tokens)

    def forget(self, is_owned: Callable[[Namespace], bool]) -> None:
        """Drop the sequences of some namespaces."""
        for item in [item for item, (space, _) in self._kept.items() if is_owned(space)]:
            self._forget(item)

    def _forget(self, item: int) -> None:
        namespace, tokens = self._kept.pop(item)
        index = self._index[namespace]
        index.remove(tokens, item)
        if not len(index):  # there may be a namespace for each `cache_salt`
            del self._index[namespace]
        self._total -= count(tokens) + _ITEM_TOKENS
