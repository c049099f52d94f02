"""The states of the cold tier, found by the prompts that they serve.

Made anew of each listing. A state is found by its marks, so what it shares with a prompt is known
to a factor of two; a prompt that begins with all of it is known exactly, by its digest. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from router.base.prefix_hash import PrefixHasher
from router.base.tokens import Tokens, count
from router.store.cold.names import StateName, marks_of


class ColdMatch(NamedTuple):
    """A state, and how many of a prompt's tokens it has at least. `whole`: all of its own."""

    state: StateName
    common: int
    whole: bool


@dataclass(slots=True)
class _Bucket:
    """States with one mark: the smallest, and those of which it is the last mark.

    `ending`: by length and digest. Hosts that copy at once make several states of the same tokens.
    """

    least: StateName | None = None
    ending: dict[int, dict[bytes, list[StateName]]] = field(default_factory=dict)


class ColdIndex:
    """States by model, tenant and mark."""

    def __init__(self, states: Iterable[StateName] = ()) -> None:
        self._buckets: dict[tuple[str, str], dict[bytes, _Bucket]] = defaultdict(dict)
        self._states: dict[str, StateName] = {}
        self.total_bytes = 0  # of the state files
        for state in states:
            self.add(state)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, state: StateName) -> None:
        """Add a state, unless it is there, or too short to be found."""
        if not state.marks or state.path in self._states:
            return
        self._states[state.path] = state
        self.total_bytes += state.size_bytes
        buckets = self._buckets[state.tenant, state.model]
        for mark in state.marks:
            bucket = buckets.setdefault(mark, _Bucket())
            if bucket.least is None or state.size_bytes < bucket.least.size_bytes:
                bucket.least = state
        self._alike(state).append(state)

    def drop(self, state: StateName) -> None:
        """Drop a state, if it is there. Longer ones may be missed until the next listing."""
        if self._states.pop(state.path, None) is None:
            return
        self.total_bytes -= state.size_bytes
        buckets = self._buckets[state.tenant, state.model]
        for mark in state.marks:
            if buckets[mark].least == state:
                buckets[mark].least = None
        self._alike(state).remove(state)

    def equal(self, state: StateName) -> list[StateName]:
        """Return the states with the same tokens, whatever their ids."""
        bucket = self._buckets[state.tenant, state.model].get(state.marks[-1])
        return [] if bucket is None else list(self._alike(state))

    def _alike(self, state: StateName) -> list[StateName]:
        last = self._buckets[state.tenant, state.model][state.marks[-1]]
        return last.ending.setdefault(state.n_tokens, {}).setdefault(state.digest, [])

    def find(
        self, tenant: str, model: str, hasher: PrefixHasher, tokens: Tokens, *, goes_back: bool
    ) -> ColdMatch | None:
        """Return the state that has most of a prompt. None: nothing of it is there.

        `goes_back`: any prefix of a state is of use; else only states with which it begins.
        """
        buckets = self._buckets.get((tenant, model))
        if buckets is None or not tokens:
            return None
        shared: list[tuple[int, _Bucket]] = []
        for n_tokens, mark in marks_of(hasher.hashes(tokens)):
            bucket = buckets.get(mark)
            if bucket is None:
                break
            shared.append((n_tokens, bucket))
        partial: ColdMatch | None = None
        for n_tokens, bucket in reversed(shared):
            if goes_back and partial is None and bucket.least is not None:
                partial = ColdMatch(bucket.least, n_tokens, whole=False)
            whole = _whole(bucket, hasher, tokens, goes_back=goes_back)
            if whole is not None and (partial is None or whole.common >= partial.common):
                return whole
        return partial

    def states(self) -> list[StateName]:
        """Return all states."""
        return list(self._states.values())


def _whole(
    bucket: _Bucket, hasher: PrefixHasher, tokens: Tokens, *, goes_back: bool
) -> ColdMatch | None:
    """Return the longest state with all of which the prompt begins.

    One that cannot go back has to be shorter than the prompt.
    """
    most = count(tokens) if goes_back else count(tokens) - 1
    lengths = sorted(n for n in bucket.ending if n <= most)
    digests = hasher.digests(tokens, lengths)
    found = [
        state
        for n, digest in zip(lengths, digests, strict=True)
        for state in bucket.ending[n].get(digest, ())
    ]
    return ColdMatch(found[-1], found[-1].n_tokens, whole=True) if found else None
