"""Catalog of snapshots: which exist, which are in use, and which to evict at the limits.

Names the snapshots to delete; deletes nothing itself. A snapshot in use is named only when its
last reference is released.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

from router.base.prefix_hash import BLOCK
from router.base.shared_bytes import SharedBytes
from router.base.tokens import Tokens, count
from router.base.types import Blob, MemoryKind, Namespace, Snapshot, SnapshotId, Tenant
from router.core.inventory.eviction import EvictionOrder, Protection
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.policy import UNLIMITED, SnapshotLimits
from router.core.model.prefix_index import GhostList, Match, PrefixIndex
from router.core.model.tenancy import is_of, tenant_of
from router.core.model.tuning import TUNING

# Called with a snapshot that became usable (True), or is usable no more.
_EMPTY: PrefixIndex[SnapshotId] = PrefixIndex()
Watch = Callable[[Snapshot, bool], None]


class Basis(IntEnum):
    """Origin of the rates that a snapshot was valued by; a better one is a lower number."""

    OWN = 0  # of a backend that can use it
    OTHERS = 1  # of other backends: those that can use it are not up
    GUESS = 2  # priors: no backend is known yet


@dataclass(slots=True)
class _Entry:
    snapshot: Snapshot
    kind: MemoryKind
    value_s: float  # seconds that computing it again would take
    basis: Basis
    uses: int = 1
    references: int = 0
    failed_restores: int = 0  # in a row
    used_at: float | None = None  # last use, in clock seconds; None: not since it was added
    doomed: bool = False  # out of the index; to delete after its last reference
    quarantined: bool = False  # never named for deletion: `forget` took it out of use
    given_up: bool = False  # it was `doomed` before it was quarantined
    own: float = 1.0  # share of its tokens that no longer snapshot also holds

    @property
    def density(self) -> float:
        """Return its value in seconds saved per byte."""
        return self.own * self.value_s / max(self.snapshot.size_bytes, 1)


@dataclass(slots=True)
class Catalog:
    """All usable snapshots, by namespace and by prefix.

    The snapshot with the least seconds / bytes / time since its last use is evicted first, but no
    protected one while these fit their share. Tokens that a longer snapshot also holds save no
    seconds. In a conversation with answers that come back changed, as without their reasoning, each
    state leaves the one before it little value. A state of a kind that cannot go back, which a
    longer one contains, is worth what it has beyond the next shorter one: of a loop of tools that
    is a round, and of the prompt before the loop all of it.
    """

    limits: SnapshotLimits = field(default_factory=SnapshotLimits)
    _entries: dict[SnapshotId, _Entry] = field(default_factory=dict)
    _index: dict[Namespace, PrefixIndex[SnapshotId]] = field(default_factory=dict)
    _ranks: EvictionOrder[SnapshotId] = field(default_factory=EvictionOrder)
    protection: Protection = field(default_factory=Protection)  # these have no rank
    _doubtful: dict[SnapshotId, None] = field(default_factory=dict)  # basis is not `OWN`
    _anew: list[SnapshotId] = field(default_factory=list)  # of these, still to value again
    _value: Callable[[Snapshot], tuple[float, Basis]] = lambda _: (0.0, Basis.GUESS)
    _shared: SharedBytes[SnapshotId] = field(default_factory=SharedBytes)
    room_bytes: float = inf  # on the disk, for all snapshots: less than `max_bytes` if it is full
    total_tokens: int = 0
    evicted: int = 0
    gone: GhostList = field(default_factory=GhostList)  # evicted or unusable snapshots
    changes: int = 0  # additions and removals; results from before the last may be stale
    watch: Watch = field(default=lambda snapshot, added: None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, snapshot: SnapshotId) -> bool:
        entry = self._entries.get(snapshot)
        return entry is not None and not entry.doomed

    def __getitem__(self, snapshot: SnapshotId) -> Snapshot:
        return self._entries[snapshot].snapshot

    def get(self, snapshot: SnapshotId) -> Snapshot | None:
        """Return a usable snapshot. None: it is gone."""
        entry = self._entries.get(snapshot)
        return None if entry is None or entry.doomed else entry.snapshot

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all usable snapshots; a blob that several have counts once."""
        return self._shared.total_bytes

    def snapshots(self) -> list[tuple[Snapshot, int, int]]:
        """Return every usable snapshot with its uses and references."""
        return [(e.snapshot, e.uses, e.references) for e in self._entries.values() if not e.doomed]

    def namespaces(self) -> Set[Namespace]:
        """Return the namespaces of the usable snapshots."""
        return self._index.keys()

    def add(
        self,
        snapshot: Snapshot,
        kind: MemoryKind,
        value_s: float,
        basis: Basis = Basis.OWN,
        *,
        until: float = -inf,
        owner: str = "",
    ) -> list[Snapshot]:
        """Add a committed snapshot; return the snapshots to delete now, perhaps itself.

        `until`: so long it is protected for `owner`, or the equal one that there is.

        1. It is in the catalog: nothing changes. If it was forgotten but is still being read, it
           becomes usable again, or is deleted after its last use.
        2. It exceeds a limit by itself, or can never be reused: reject it. Else everything else
           would be evicted before it.
        3. A snapshot with equal tokens exists: reject the new one.
        4. Remove the snapshots that it makes superfluous, unless other prompts branch off there,
           or they are kept for good.
        5. Shorter snapshots that diverge from it lose the value of the shared prefix; of kinds
           that cannot go back, the next shorter one that it contains loses that of those before.
        6. Evict the least valuable, as in `shrink`.
        """
        known = self._entries.get(snapshot.id)
        if known is not None and not known.quarantined:
            return []
        too_large = self._exceeds(len(snapshot), snapshot.size_bytes)
        given_up = known is not None and known.given_up
        if too_large or given_up or not snapshot.shape.useful:
            return self._turn_away(snapshot, known)
        index = self._index.setdefault(snapshot.namespace, PrefixIndex())
        alike = index.match(snapshot.tokens, limit=4)
        for match in alike:
            if match.common == match.length == len(snapshot):
                if until > -inf:
                    self.protect(match.item, until, owner)
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
        self.watch(snapshot, True)
        self._shared.put(snapshot.id, _blobs(snapshot))
        self.total_tokens += len(snapshot)
        self._ranks.use(snapshot.id, entry.density)
        # Counted after the insertion: a single branch at a prefix is the new snapshot's own.
        superfluous = [
            match.item
            for match in index.prefixes(snapshot.tokens)
            if kind.goes_back
            and index.branches_at(self[match.item].tokens) == 1
            and self.protection.until(match.item) < inf
        ]
        until, owner = max([(until, owner), *map(self.protection.of, superfluous)])
        doomed = [gone for item in superfluous for gone in self.remove(item)]
        if until > -inf:
            self._protect(entry, until, owner)
        if kind.goes_back:
            part = [match for match in alike if match.common < match.length < len(snapshot)]
            self._outdate(part)
        else:
            shorter = [match.item for match in index.prefixes(snapshot.tokens)][-2:]
            for one in (self._entries[item] for item in {*shorter, snapshot.id}):
                one.own = min(one.own, self._share_beyond(one.snapshot))
                self._ranks.value(one.snapshot.id, one.density)
        snapshot.pieces.share(index.edges(snapshot.tokens))
        return doomed + self.shrink()

    def _turn_away(self, snapshot: Snapshot, known: _Entry | None) -> list[Snapshot]:
        """Return the snapshot for deletion; if it is being read, delete it after its last use."""
        if known is None:
            return [snapshot]
        known.quarantined = False
        return []

    def stored(self, snapshot: Snapshot) -> None:
        """Note that a snapshot has blobs now, or no whole file any more."""
        entry = self._entries.get(snapshot.id)
        if entry is None:
            return
        entry.snapshot = snapshot
        if not entry.doomed:
            self._shared.put(snapshot.id, _blobs(snapshot))

    def is_evicted_next(self, snapshot: SnapshotId) -> bool:
        """Return whether a snapshot goes as soon as there is a new one.

        False for an unknown one: the store has just found it.
        """
        entry = self._entries.get(snapshot)
        if entry is None or entry.doomed:
            return entry is not None
        is_full = self._exceeds(self.total_tokens, self.total_bytes + entry.snapshot.size_bytes)
        return is_full and len(self._ranks) > 1 and self._ranks.least() == snapshot

    def value_anew(self, value: Callable[[Snapshot], tuple[float, Basis]]) -> None:
        """Value again the snapshots not valued by `Basis.OWN`, where `value` has a better basis.

        `shrink` does so step by step: one snapshot takes 10 µs.
        """
        self._value, self._anew = value, list(self._doubtful)

    def _value_some(self) -> None:
        for snapshot in self._anew[-TUNING.valued_at_once :]:
            entry = self._entries.get(snapshot)
            if entry is None:
                continue
            value_s, basis = self._value(entry.snapshot)
            if basis < entry.basis:
                entry.value_s, entry.basis = value_s, basis
                if basis is Basis.OWN:
                    self._doubtful.pop(snapshot, None)
                self._ranks.value(snapshot, entry.density)
        del self._anew[-TUNING.valued_at_once :]

    def _outdate(self, shorter: list[Match[SnapshotId]]) -> None:
        """Lower the `own` share of shorter snapshots: a cut of the longer one can replace them."""
        for match in shorter:
            entry = self._entries.get(match.item)
            own = 1 - match.common / match.length
            if entry is not None and not entry.doomed and own < entry.own:
                entry.own = own
                self._ranks.value(match.item, entry.density)

    def _share_beyond(self, snapshot: Snapshot) -> float:
        """Return the share of a state beyond the next shorter one; 1 if no longer one has it."""
        tokens, n = snapshot.tokens, len(snapshot)
        index = self._index[snapshot.namespace]
        if not any(match.common == n < match.length for match in index.match(tokens, limit=4)):
            return 1.0
        shorter = (
            match.length
            for match in index.prefixes(tokens)
            if match.length < n and self[match.item].shape.extendable
        )
        return 1 - max(shorter, default=0) / n

    def _own_share(self, entry: _Entry) -> float:
        """Return the `own` share as it is now: it rises when another snapshot was removed."""
        if entry.own == 1:
            return 1.0
        if not entry.kind.goes_back:
            return self._share_beyond(entry.snapshot)
        tokens = entry.snapshot.tokens
        others = self._index[entry.snapshot.namespace].match(tokens, limit=4)
        longer = [m.common for m in others if m.length > len(entry.snapshot)]
        return 1 - max(longer, default=0) / len(entry.snapshot)

    @property
    def is_over(self) -> bool:
        """Return whether `shrink` has more to do: snapshots to value again, or to evict."""
        return bool(self._anew) or self._is_full

    @property
    def _is_full(self) -> bool:
        return self._exceeds(self.total_tokens, self.total_bytes)

    def _exceeds(self, n_tokens: int, size_bytes: float) -> bool:
        """Return whether so much exceeds a limit, or the room on the disk."""
        most = self.limits
        too_many = n_tokens > most.max_tokens != UNLIMITED
        return too_many or size_bytes > self.room_bytes or size_bytes > most.max_bytes != UNLIMITED

    def admits(self, n_tokens: int, size_bytes: float) -> bool:
        """Return whether a snapshot of this size could be kept at all."""
        most = self.limits
        is_on = most.max_bytes != 0 and most.max_tokens != 0
        return is_on and n_tokens >= most.min_tokens and not self._exceeds(n_tokens, size_bytes)

    def most_valuable(self) -> list[SnapshotId]:
        """Return all usable snapshots, those first that save most seconds for their bytes."""
        usable = (entry for entry in self._entries.values() if not entry.doomed)
        ranked = sorted(usable, key=lambda entry: entry.density, reverse=True)
        return [entry.snapshot.id for entry in ranked]

    def found_room(self, spare_bytes: int | None) -> None:
        """Note how many bytes more the disk has for snapshots; less than 0: so many have to go.

        None: nothing is known of the disk.
        """
        self.room_bytes = inf if spare_bytes is None else max(self.total_bytes + spare_bytes, 0)

    def found_on_disk(self, size_bytes: int) -> None:
        """Note that snapshots are to be added that take no more room: they are on the disk."""
        self.room_bytes += size_bytes

    def shrink(self) -> list[Snapshot]:
        """Evict the least valuable until the limits hold; return the snapshots to delete now.

        Evicts a few per call, and none while snapshots are still to value again.
        """
        doomed: list[Snapshot] = []
        self._value_some()
        if self._anew:
            return doomed
        for _ in range(TUNING.evicted_at_once):
            if not self._is_full:
                break
            doomed += self._evict()
        return doomed

    def covered(self, namespace: Namespace, tokens: Tokens) -> int:
        """Return the most leading tokens of `tokens` that a snapshot holds."""
        return self.nearest(namespace, tokens)[0]

    def nearest(self, namespace: Namespace, tokens: Tokens) -> tuple[int, bool]:
        """Return `covered`, and whether a snapshot that holds so many tokens has more."""
        return self._index.get(namespace, _EMPTY).nearest(tokens)

    def useful(
        self,
        kind: MemoryKind | None,
        namespace: Namespace,
        tokens: Tokens,
        n_prompt: int,
        limit: int = 4,
    ) -> list[tuple[Match[SnapshotId], int]]:
        """Return snapshots that a prompt can reuse, each with its number of reused tokens.

        The prompt has `n_prompt` tokens and begins with `tokens`. `kind` None: no backend tells it
        now, and each snapshot is of the kind that it was saved as. The result includes the best
        snapshots. For kinds that cannot go back, a longer snapshot may be of no use although it
        shares most. For these kinds, whole prefixes are therefore examined as well.
        """
        index = self._index.get(namespace)
        if index is None:
            return []
        matches = index.match(tokens, limit)
        if kind is None or not kind.goes_back:
            known = {match.item for match in matches}
            prefixes = [match for match in index.prefixes(tokens) if match.item not in known]
            matches += prefixes[-limit:]
        found = []
        for match in matches:
            entry = self._entries[match.item]
            shape = entry.snapshot.shape
            reused = reusable_tokens(
                entry.kind if kind is None else kind,
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
        """Return how many of `tokens` a restore would spare a prompt that goes on after them."""
        if kind.goes_back:
            return self.covered(namespace, tokens)
        found = self.useful(kind, namespace, tokens, count(tokens) + 1)
        return max((reused for _, reused in found), default=0)

    def match(
        self, namespace: Namespace, tokens: Tokens, limit: int = 8
    ) -> list[Match[SnapshotId]]:
        """Return snapshots that share a prefix with `tokens`, the longest share first."""
        return self._index.get(namespace, _EMPTY).match(tokens, limit)

    def alike(self, namespace: Namespace, tokens: Tokens) -> list[Match[SnapshotId]]:
        """Return the snapshots that share most with `tokens`, a block at least, the best first."""
        return [one for one in self.match(namespace, tokens, limit=3) if one.common >= BLOCK]

    def used_at(self, snapshot: SnapshotId) -> float | None:
        """Return when a snapshot was last acquired, in clock seconds.

        None: not since it was added, or there is no such snapshot.
        """
        entry = self._entries.get(snapshot)
        return None if entry is None else entry.used_at

    def kind_of(self, snapshot: SnapshotId) -> MemoryKind:
        """Return the memory kind that a snapshot was saved as; UNKNOWN: it was found on disk."""
        entry = self._entries.get(snapshot)
        return MemoryKind.UNKNOWN if entry is None else entry.kind

    def add_reference(self, snapshot: SnapshotId, now: float) -> Snapshot:
        """Use a snapshot and return it; it stays on disk until `drop_reference`."""
        entry = self._entries[snapshot]
        entry.references += 1
        entry.uses += 1
        entry.used_at = now
        if not entry.doomed and snapshot not in self.protection:
            self._ranks.use(snapshot, entry.density)
        return entry.snapshot

    def protect(self, snapshot: SnapshotId, until: float, owner: str = "") -> None:
        """Keep a usable snapshot from eviction until a time, in clock seconds.

        `owner`: who wants that; "": the operator.
        """
        entry = self._entries.get(snapshot)
        if entry is not None and not entry.doomed:
            self._protect(entry, until, owner)

    def _protect(self, entry: _Entry, until: float, owner: str) -> None:
        self.protection.add(entry.snapshot.id, until, entry.snapshot.size_bytes, owner)
        self._ranks.drop(entry.snapshot.id)

    def lapse(self, now: float) -> None:
        """End the protection of the snapshots whose time is over, or that exceed the share."""
        share = self.limits.protected_share * self.limits.max_bytes
        limited = self.limits.max_bytes != UNLIMITED
        self._rank_again(self.protection.lapsed(now, share if limited else inf))

    def _rank_again(self, snapshots: list[SnapshotId]) -> None:
        for snapshot in snapshots:
            self._ranks.use(snapshot, self._entries[snapshot].density)

    def kept_for_good(self) -> list[tuple[Snapshot, int]]:
        """Return the snapshots whose protection has no end, each with its uses."""
        return [
            (entry.snapshot, entry.uses)
            for name, entry in self._entries.items()
            if self.protection.until(name) == inf
        ]

    def of(self, tenant: Tenant) -> list[SnapshotId]:
        """Return the usable snapshots of a tenant, with any salt."""
        return [one.id for one, _, _ in self.snapshots() if is_of(tenant_of(one.namespace), tenant)]

    def equal(self, namespace: Namespace, tokens: Tokens) -> SnapshotId | None:
        """Return the snapshot with exactly these tokens; None if there is none."""
        for match in self.match(namespace, tokens, limit=4):
            if match.common == match.length == count(tokens):
                return match.item
        return None

    def drop_reference(self, snapshot: SnapshotId) -> list[Snapshot]:
        """End a use; return the snapshot if its deletion waited for this."""
        entry = self._entries[snapshot]
        entry.references -= 1
        if entry.doomed and entry.references == 0:
            del self._entries[snapshot]
            return [] if entry.quarantined else [entry.snapshot]
        return []

    def note_restore(self, snapshot: SnapshotId, *, failed: bool) -> int:
        """Note the end of a restore; return how many have failed in a row.

        0: there is no such snapshot.
        """
        entry = self._entries.get(snapshot)
        if entry is None:
            return 0
        entry.failed_restores = entry.failed_restores + 1 if failed else 0
        return entry.failed_restores

    def forget(self, snapshot: SnapshotId) -> Snapshot | None:
        """Take a snapshot out of use, never name it for deletion, and return it.

        None: this was done before.
        """
        entry = self._entries.get(snapshot)
        if entry is None or entry.quarantined:
            return None
        entry.quarantined, entry.given_up = True, entry.doomed
        self.gone.add(entry.snapshot.namespace, entry.snapshot.tokens)
        self.remove(snapshot)
        return entry.snapshot

    def is_forgotten(self, snapshot: SnapshotId) -> bool:
        """Return whether a snapshot was forgotten: its earlier users must not read it."""
        return self._entries[snapshot].quarantined

    def remove(self, snapshot: SnapshotId) -> list[Snapshot]:
        """Take a snapshot out of use; return it if its file may be deleted now."""
        entry = self._entries.get(snapshot)
        if entry is None or entry.doomed:
            return []
        index = self._index[entry.snapshot.namespace]
        index.remove(entry.snapshot.tokens, snapshot)
        if not index:
            del self._index[entry.snapshot.namespace]
        self._doubtful.pop(snapshot, None)
        self._ranks.drop(snapshot)
        self.protection.drop(snapshot)
        self.changes += 1
        self.watch(entry.snapshot, False)
        self._shared.remove(snapshot)
        self.total_tokens -= len(entry.snapshot)
        if entry.references:
            entry.doomed = True
            return []
        del self._entries[snapshot]
        return [entry.snapshot]

    def _evict(self) -> list[Snapshot]:
        """Evict the least valuable snapshot. There is one, because the limits are exceeded."""
        if not len(self._ranks):  # a limit of tokens, say: it has no share for the protected
            self._rank_again(self.protection.lapsed(-inf, 0.0))
        while True:
            entry = self._entries[self._ranks.least()]
            before, entry.own = entry.own, self._own_share(entry)
            if entry.own <= before:
                break
            self._ranks.value(entry.snapshot.id, entry.density)
        self.evicted += 1
        self.gone.add(entry.snapshot.namespace, entry.snapshot.tokens)
        return self.remove(entry.snapshot.id)


def _blobs(snapshot: Snapshot) -> tuple[Blob, ...]:
    """Return the blobs of a snapshot; one of its own if it is not split."""
    return snapshot.blobs or (Blob(snapshot.id.encode(), snapshot.size_bytes),)
