"""Ghost list: token sequences that were held once, to tell a lost prefix from a new prompt.

Bounded in size, and lost with the process.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from router.base.tokens import Tokens, count
from router.base.types import Namespace
from router.core.inventory.prefix_index import PrefixIndex
from router.core.model.tuning import TUNING

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
        index = self._index.get(namespace)
        return index.nearest(tokens) if index else (0, False)

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
