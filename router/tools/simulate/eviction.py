"""Compare eviction of the production catalog with LRU and Belady, at equal budgets.

The model has no time and no slots. The state of each request is saved when the request ends, and
later requests reuse the longest shared prefix that is still saved. All policies get the same
sequence, and all drop a state that a longer one makes superfluous, as the catalog does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from router.base.tokens import Tokens, count
from router.base.types import KvDir, MemoryKind, Namespace, Snapshot, SnapshotId
from router.core.inventory.catalog import Catalog
from router.core.inventory.prefix_index import PrefixIndex
from router.core.model.policy import UNLIMITED, SnapshotLimits
from router.tools.simulate.machines.hardware import Hardware

Sequence_ = Sequence[tuple[Tokens, Tokens]]  # a prompt; the same with its answer
NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Evicted:
    """Result of one policy with one budget."""

    policy: str
    budget_bytes: int
    prompt_tokens: int
    reused_tokens: int
    evictions: int

    @property
    def reused_share(self) -> float:
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def compare(
    sequence: Sequence_, budgets: Sequence[int], hardware: Hardware, min_tokens: int = 1
) -> list[Evicted]:
    """Play `sequence` with each policy and each budget except 0."""
    served = served_by(sequence, min_tokens)
    found = []
    for budget_bytes in budgets:
        if budget_bytes == 0:
            continue
        found.append(production(sequence, budget_bytes, hardware, min_tokens))
        for name, worst in (("lru", _oldest), ("belady", _farthest)):
            cache = Cache(budget_bytes, hardware.bytes_per_token, worst, min_tokens)
            found.append(cache.play(name, sequence, served))
    return found


def production(
    sequence: Sequence_, budget_bytes: int, hardware: Hardware, min_tokens: int = 1
) -> Evicted:
    """Play `sequence` with the production catalog."""
    catalog = Catalog(SnapshotLimits(max_bytes=budget_bytes, min_tokens=min_tokens))
    space, kv_dir = Namespace("n"), KvDir("p")
    asked = reused = 0
    for number, (prompt, held) in enumerate(sequence):
        asked += count(prompt)
        for match in catalog.match(space, prompt, limit=1):
            gain = min(match.common, count(prompt) - 1)
            if gain >= min_tokens:
                reused += gain
                catalog.add_reference(match.item, number)
                catalog.drop_reference(match.item)
        if count(held) >= min_tokens:
            size_bytes = count(held) * hardware.bytes_per_token
            made = Snapshot(SnapshotId(str(number)), space, kv_dir, held, size_bytes)
            catalog.add(made, MemoryKind.FULL, hardware.prefill_of(count(held), 0))
            while catalog.is_over:
                catalog.shrink()
    return Evicted("kvferry", budget_bytes, asked, reused, catalog.evicted)


def served_by(sequence: Sequence_, min_tokens: int = 1) -> list[int | None]:
    """Return the request number of the state that each request would reuse from an unlimited cache.

    As in production: the state with the longest shared prefix; of several, the shortest. None: no
    state shares `min_tokens`.
    """
    index: PrefixIndex[int] = PrefixIndex()
    found: list[int | None] = []
    for number, (prompt, held) in enumerate(sequence):
        best = next(iter(index.match(prompt, limit=1)), None)
        enough = best is not None and min(best.common, count(prompt) - 1) >= min_tokens
        found.append(best.item if best is not None and enough else None)
        index.insert(held, number)
    return found


@dataclass(slots=True)
class _State:
    number: int
    tokens: Tokens
    size_bytes: int
    last: int  # number of the request that used the state last
    uses: list[int]  # numbers of the requests that would use it, ascending
    rank: float = 0.0


Worst = Callable[[_State, int], float]


def _oldest(state: _State, now: int) -> float:
    """Return the LRU rank: the number of the last use."""
    return float(state.last)


def _farthest(state: _State, now: int) -> float:
    """Return the Belady rank: minus the next use, so the farthest is evicted first.

    Belady is optimal for files of one size with one use each; here it is a cheap bound.
    """
    return -next((use for use in state.uses if use > now), NEVER)


@dataclass(slots=True)
class Cache:
    """States within a budget; evicts the state with the smallest rank, which `worst` returns."""

    budget_bytes: int
    bytes_per_token: int
    worst: Worst
    min_tokens: int = 1
    total_bytes: int = 0
    evictions: int = 0
    _index: PrefixIndex[int] = field(default_factory=PrefixIndex)
    _states: dict[int, _State] = field(default_factory=dict)
    _heap: list[tuple[float, int]] = field(default_factory=list)
    _heirs: dict[int, int] = field(default_factory=dict)  # superfluous states -> their successors

    def play(self, name: str, sequence: Sequence_, served: list[int | None]) -> Evicted:
        """Play all requests of `sequence` in order; `served` is the result of `served_by`."""
        uses: list[list[int]] = [[] for _ in sequence]
        for number, by in enumerate(served):
            if by is not None:
                uses[by].append(number)
        asked = reused = 0
        for number, (prompt, held) in enumerate(sequence):
            asked += count(prompt)
            reused += self._ask(prompt, number)
            self._passed(served[number], number)
            if count(held) >= self.min_tokens:
                self._keep(number, held, uses[number])
        return Evicted(name, self.budget_bytes, asked, reused, self.evictions)

    def _ask(self, prompt: Tokens, now: int) -> int:
        for match in self._index.match(prompt, limit=1):
            gain = min(match.common, count(prompt) - 1)
            if gain >= self.min_tokens:
                state = self._states[match.item]
                state.last = now
                self._rank(state, now)
                return gain
        return 0

    def _passed(self, state: int | None, now: int) -> None:
        """Rank a state again after a predicted use, even if another state was used."""
        while state in self._heirs:
            state = self._heirs[state]
        if state in self._states:
            self._rank(self._states[state], now)

    def _keep(self, number: int, held: Tokens, uses: list[int]) -> None:
        size_bytes = count(held) * self.bytes_per_token
        if self.budget_bytes != UNLIMITED and size_bytes > self.budget_bytes:
            return
        for match in self._index.match(held, limit=1):
            if match.common == match.length == count(held):
                return  # already held
        state = _State(number, held, size_bytes, number, uses)
        self._index.insert(held, number)
        self._states[number] = state
        self.total_bytes += size_bytes
        self._rank(state, number)
        for match in list(self._index.prefixes(held)):
            if self._index.branches_at(self._states[match.item].tokens) == 1:
                # Requests that would use the shorter state find all of it in this one.
                state.uses = sorted({*state.uses, *self._states[match.item].uses})
                self._rank(state, number)
                self._heirs[match.item] = number
                self._drop(match.item)
        while self.budget_bytes != UNLIMITED and self.total_bytes > self.budget_bytes:
            self._evict()

    def _rank(self, state: _State, now: int) -> None:
        state.rank = self.worst(state, now)
        heappush(self._heap, (state.rank, state.number))
        if len(self._heap) > 4 * len(self._states) + 64:
            self._heap = [(s.rank, s.number) for s in self._states.values()]
            heapify(self._heap)

    def _evict(self) -> None:
        while True:
            rank, number = heappop(self._heap)
            if number in self._states and self._states[number].rank == rank:
                self.evictions += 1
                self._drop(number)
                return

    def _drop(self, number: int) -> None:
        state = self._states.pop(number)
        self._index.remove(state.tokens, number)
        self.total_bytes -= state.size_bytes
