"""Which snapshots exist, who is using them, and which to give up when the limits are reached.

Tells what to delete; deletes nothing itself. A snapshot in use is never among what it names:
it is named when its last user lets go.
"""

from collections.abc import Callable, Set
from dataclasses import field
from enum import IntEnum

from router.base.frozen import dataclass
from router.base.tokens import Tokens, count
from router.base.types import MemoryKind, Namespace, Snapshot, SnapshotId
from router.core.fleet.eviction_order import Ranks
from router.core.fleet.ghost_list import Ghosts
from router.core.fleet.prefix_index import Match, PrefixIndex
from router.core.model.memory_kinds import goes_back, reusable_tokens, subsumes
from router.core.model.snapshot_limits import SnapshotLimits

# Evicted before others have their turn: one takes up to 0.1 ms, and a limit that was lowered may
# mean ten thousand of them.
_AT_ONCE = 32
_VALUED_AT_ONCE = 200  # of those that are valued anew; 2 ms, and longer with many backends


class Basis(IntEnum):
    """By whose rates a snapshot was valued; the better come first."""

    OWN = 0  # of a backend that can use it
    OTHERS = 1  # of backends that cannot: those that could are not up
    GUESS = 2  # nobody's: no backend is known yet


@dataclass(slots=True)
class _Entry:
    snapshot: Snapshot
    kind: MemoryKind
    value_s: float  # seconds that computing it again would take
    basis: Basis
    uses: int = 1
    references: int = 0
    used_at: float | None = None  # last, in clock seconds; None: not since it was added
    doomed: bool = False  # out of the index; named for deletion with its last reference
    kept: bool = False  # never named for deletion: the file is somebody else's concern now
    given_up: bool = False  # it had been named for deletion, had nobody used it, and then `kept`
    own: float = 1.0  # share of its tokens that no longer one holds as well

    @property
    def density(self) -> float:
        """Seconds saved by a byte of it."""
        return self.own * self.value_s / max(self.snapshot.size_bytes, 1)


@dataclass(slots=True)
class Catalog:
    """All usable snapshots, by namespace and by prefix.

    Evicted is what saves least: seconds / bytes / time since its last use. Seconds are saved by
    what no longer one holds as well: of a conversation whose answers come back changed, as without
    their reasoning, each state leaves the one before it little.
    """

    limits: SnapshotLimits = field(default_factory=SnapshotLimits)
    _entries: dict[SnapshotId, _Entry] = field(default_factory=dict)
    _index: dict[Namespace, PrefixIndex[SnapshotId]] = field(default_factory=dict)
    _ranks: Ranks[SnapshotId] = field(default_factory=Ranks)
    _doubtful: dict[SnapshotId, None] = field(default_factory=dict)  # not valued by their own
    _anew: list[SnapshotId] = field(default_factory=list)  # of these; still to be valued anew
    _value: Callable[[Snapshot], tuple[float, Basis]] = lambda _: (0.0, Basis.GUESS)  # how
    total_bytes: int = 0
    total_tokens: int = 0
    evicted: int = 0
    gone: Ghosts = field(default_factory=Ghosts)  # evicted, or found to be unusable
    changes: int = 0  # of what there is; what was found out before the last one may be wrong

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, snapshot: SnapshotId) -> bool:
        entry = self._entries.get(snapshot)
        return entry is not None and not entry.doomed

    def __getitem__(self, snapshot: SnapshotId) -> Snapshot:
        return self._entries[snapshot].snapshot

    def snapshots(self) -> list[tuple[Snapshot, int, int]]:
        """Every usable snapshot with its uses and references."""
        return [(e.snapshot, e.uses, e.references) for e in self._entries.values() if not e.doomed]

    def namespaces(self) -> Set[Namespace]:
        """Of the usable snapshots."""
        return self._index.keys()

    def add(
        self, snapshot: Snapshot, kind: MemoryKind, value_s: float, basis: Basis = Basis.OWN
    ) -> list[Snapshot]:
        """Take in a committed snapshot; returns the ones to delete now, perhaps itself.

        1. It is there: nothing changes. It was withdrawn and is still being read: it is taken
           back, or else leaves with its last reader.
        2. Larger than a limit by itself, or of no use to anybody: the newcomer goes, and not
           everything else before it.
        3. Equal tokens are stored once: the newcomer goes.
        4. What it makes superfluous goes, unless other prompts branch off there.
        5. What it holds of others that end otherwise is theirs no more.
        6. The least valuable go, as with `shrink`.
        """
        known = self._entries.get(snapshot.id)
        if known is not None and not known.kept:
            return []
        too_large = self.limits.exceeded_by(len(snapshot), snapshot.size_bytes)
        given_up = known is not None and known.given_up
        if too_large or given_up or not snapshot.shape.useful:
            return self._turn_away(snapshot, known)
        index = self._index.setdefault(snapshot.namespace, PrefixIndex())
        alike = index.match(snapshot.tokens, limit=4)
        if any(match.common == match.length == len(snapshot) for match in alike):
            return self._turn_away(snapshot, known)
        entry = _Entry(snapshot, kind, value_s, basis)
        if known is not None:
            entry.uses, entry.used_at = known.uses, known.used_at
            entry.references = known.references
        self._entries[snapshot.id] = entry
        if basis is not Basis.OWN:
            self._doubtful[snapshot.id] = None
        index.insert(snapshot.tokens, snapshot.id)
        self.changes += 1
        self.total_bytes += snapshot.size_bytes
        self.total_tokens += len(snapshot)
        self._ranks.use(snapshot.id, entry.density)
        # Asked after the insertion: one branch at a prefix is then the newcomer's own.
        superfluous = [
            match.item
            for match in index.prefixes(snapshot.tokens)
            if subsumes(kind) and index.branches_at(self[match.item].tokens) == 1
        ]
        doomed = [gone for item in superfluous for gone in self.remove(item)]
        if goes_back(kind):
            part = [match for match in alike if match.common < match.length < len(snapshot)]
            self._outdate(part)
        return doomed + self.shrink()

    def _turn_away(self, snapshot: Snapshot, known: _Entry | None) -> list[Snapshot]:
        """There is to be no such snapshot. One that is being read leaves with its last reader."""
        if known is None:
            return [snapshot]
        known.kept = False
        return []

    def value_anew(self, value: Callable[[Snapshot], tuple[float, Basis]]) -> None:
        """More is known of what snapshots are worth: those that were not valued by their own are,
        if that is better now. Little by little (`shrink`): one takes 10 µs."""
        self._value, self._anew = value, list(self._doubtful)

    def _value_some(self) -> None:
        for snapshot in self._anew[-_VALUED_AT_ONCE:]:
            entry = self._entries.get(snapshot)
            if entry is None:
                continue
            value_s, basis = self._value(entry.snapshot)
            if basis < entry.basis:
                entry.value_s, entry.basis = value_s, basis
                if basis is Basis.OWN:
                    self._doubtful.pop(snapshot, None)
                self._ranks.value(snapshot, entry.density)
        del self._anew[-_VALUED_AT_ONCE:]

    def _outdate(self, shorter: list[Match[SnapshotId]]) -> None:
        """A longer one holds what these have in common with it, and can be cut to that."""
        for match in shorter:
            entry = self._entries.get(match.item)
            own = 1 - match.common / match.length
            if entry is not None and not entry.doomed and own < entry.own:
                entry.own = own
                self._ranks.value(match.item, entry.density)

    def _regains(self, entry: _Entry) -> bool:
        """The longer one is gone, and what it held is of worth here again."""
        if entry.own == 1:
            return False
        tokens = entry.snapshot.tokens
        others = self._index[entry.snapshot.namespace].match(tokens, limit=4)
        longer = [m.common for m in others if m.length > len(entry.snapshot)]
        own = 1 - max(longer, default=0) / len(entry.snapshot)
        regains, entry.own = own > entry.own, own
        return regains

    @property
    def is_over(self) -> bool:
        """`shrink` has more to do: some are to be valued anew, or the limits do not hold yet."""
        return bool(self._anew) or self._exceeds

    @property
    def _exceeds(self) -> bool:
        return self.limits.exceeded_by(self.total_tokens, self.total_bytes)

    def shrink(self) -> list[Snapshot]:
        """Give up the least valuable until the limits hold, or as many as there is time for;
        returns the ones to delete now. None while it is not known which those are."""
        doomed: list[Snapshot] = []
        self._value_some()
        if self._anew:
            return doomed
        for _ in range(_AT_ONCE):
            if not self._exceeds:
                break
            doomed += self._evict()
        return doomed

    def covered(self, namespace: Namespace, tokens: Tokens) -> int:
        """How many leading tokens of `tokens` some snapshot holds."""
        index = self._index.get(namespace)
        return index.longest(tokens) if index else 0

    def nearest(self, namespace: Namespace, tokens: Tokens) -> tuple[int, bool]:
        """As `covered`, and whether a snapshot that holds so many goes on after them."""
        index = self._index.get(namespace)
        return index.nearest(tokens) if index else (0, False)

    def useful(
        self, kind: MemoryKind, namespace: Namespace, tokens: Tokens, n_prompt: int, limit: int = 4
    ) -> list[tuple[Match[SnapshotId], int]]:
        """Snapshots that spare a prompt of `n_prompt` tokens, which begins with `tokens`,
        something; and how many tokens. At least the best are among them.

        Kinds that cannot go back: those that share most are of no use if they are longer, so the
        whole prefixes are looked at as well.
        """
        index = self._index.get(namespace)
        if index is None:
            return []
        matches = index.match(tokens, limit)
        if not goes_back(kind):
            known = {match.item for match in matches}
            prefixes = [match for match in index.prefixes(tokens) if match.item not in known]
            matches += prefixes[-limit:]
        found = []
        for match in matches:
            shape = self[match.item].shape
            reused = reusable_tokens(
                kind,
                n_prompt,
                match.common,
                match.length,
                checkpoints=shape.checkpoints,
                extendable=shape.extendable,
            )
            if reused:
                found.append((match, reused))
        return found

    def reach(self, kind: MemoryKind, namespace: Namespace, tokens: Tokens) -> int:
        """How many of `tokens` a restore would spare a prompt that goes on after them."""
        if goes_back(kind):
            return self.covered(namespace, tokens)
        found = self.useful(kind, namespace, tokens, count(tokens) + 1)
        return max((reused for _, reused in found), default=0)

    def match(
        self, namespace: Namespace, tokens: Tokens, limit: int = 8
    ) -> list[Match[SnapshotId]]:
        """Snapshots that share a prefix with `tokens`, the longest share first."""
        index = self._index.get(namespace)
        return index.match(tokens, limit) if index else []

    def used_at(self, snapshot: SnapshotId) -> float | None:
        """When a snapshot was acquired last, in clock seconds. None: not since it was added, or
        there is none."""
        entry = self._entries.get(snapshot)
        return None if entry is None else entry.used_at

    def acquire(self, snapshot: SnapshotId, now: float) -> Snapshot:
        """Use a snapshot; it stays on disk until `release`."""
        entry = self._entries[snapshot]
        entry.references += 1
        entry.uses += 1
        entry.used_at = now
        if not entry.doomed:
            self._ranks.use(snapshot, entry.density)
        return entry.snapshot

    def release(self, snapshot: SnapshotId) -> list[Snapshot]:
        """End a use; returns the snapshot if it was only waiting for this to be deleted."""
        entry = self._entries[snapshot]
        entry.references -= 1
        if entry.doomed and entry.references == 0:
            del self._entries[snapshot]
            return [] if entry.kept else [entry.snapshot]
        return []

    def forget(self, snapshot: SnapshotId) -> bool:
        """Take a snapshot out of use and never name it for deletion. False: done already."""
        entry = self._entries.get(snapshot)
        if entry is None or entry.kept:
            return False
        entry.kept, entry.given_up = True, entry.doomed
        self.gone.add(entry.snapshot.namespace, entry.snapshot.tokens)
        self.remove(snapshot)
        return True

    def is_forgotten(self, snapshot: SnapshotId) -> bool:
        """Somebody who acquired it earlier must not use it any more."""
        return self._entries[snapshot].kept

    def remove(self, snapshot: SnapshotId) -> list[Snapshot]:
        """Take a snapshot out of use; returns it if its file may be deleted now."""
        entry = self._entries.get(snapshot)
        if entry is None or entry.doomed:
            return []
        index = self._index[entry.snapshot.namespace]
        index.remove(entry.snapshot.tokens, snapshot)
        if not index:
            del self._index[entry.snapshot.namespace]
        self._doubtful.pop(snapshot, None)
        self._ranks.drop(snapshot)
        self.changes += 1
        self.total_bytes -= entry.snapshot.size_bytes
        self.total_tokens -= len(entry.snapshot)
        if entry.references:
            entry.doomed = True
            return []
        del self._entries[snapshot]
        return [entry.snapshot]

    def _evict(self) -> list[Snapshot]:
        """Give up the least valuable. There is one: the limits are exceeded."""
        while self._regains(entry := self._entries[self._ranks.least()]):
            self._ranks.value(entry.snapshot.id, entry.density)
        self.evicted += 1
        self.gone.add(entry.snapshot.namespace, entry.snapshot.tokens)
        return self.remove(entry.snapshot.id)
