"""Blobs behind the whole files of a simulated host: what is written, when, and each blob once.

The rules are those of production (`router.store.blobs`). Equal tokens are equal bytes here; where a
server computes an answer anew, they are not (docs/adr/0029).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from math import inf

from msgspec.structs import replace

from router.base.shared_bytes import SharedBytes
from router.base.tokens import WIDTH
from router.base.types import Blob, MemoryKind, Snapshot, SnapshotId
from router.core.model import events as ev
from router.store.blobs.whole_files import WholeFiles
from router.store.blobs.write_budget import WriteBudget
from router.store.format.split import LEAST_BYTES, TOKENS, tokens_in_blob

_AGAIN_S = 60.0  # a file that may not be written is looked at again, as in production
# Kinds with rows that the next state of a conversation has, too.
_WITH_ROWS = MemoryKind.FULL, MemoryKind.HYBRID


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """When snapshots become blobs, and how much of whole files stays; inf: no limit."""

    whole_bytes: float
    write_after_s: float
    max_written_per_day: float


@dataclass(slots=True)
class SimulatedBlobs:
    """The blobs of one host. `is_worth_writing`: whether a snapshot is not evicted next.

    `now`: seconds of the last call. `due`: for when a call of `changes` is scheduled.
    """

    settings: SplitSettings
    bytes_per_token: int
    scale: int  # tokens of the workload in one of the simulation
    kind: MemoryKind
    is_worth_writing: Callable[[SnapshotId], bool]
    now: float = 0.0
    due: float = inf
    written_bytes: int = 0
    shared: SharedBytes[SnapshotId] = field(default_factory=SharedBytes)
    _snapshots: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    _left_to: dict[SnapshotId, list[SnapshotId]] = field(default_factory=dict)  # by heir
    _files: WholeFiles = field(init=False)
    _budget: WriteBudget = field(init=False)

    def __post_init__(self) -> None:
        self._files = WholeFiles(self.settings.whole_bytes)
        self._budget = WriteBudget(self.settings.max_written_per_day, lambda: self.now)

    @property
    def wakeup(self) -> float:
        """Return when the next file is to be written, or dropped; inf: none is."""
        return self.now if self._files.is_full else self._files.wakeup()

    def add(self, snapshot: Snapshot, now: float) -> None:
        """Note a new whole file."""
        self.now = now
        self._snapshots[snapshot.id] = snapshot
        self._files.add(snapshot.id, snapshot.size_bytes, now + self.settings.write_after_s)

    def used(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot was restored."""
        self._files.use(snapshot)

    def gone(self, snapshot: SnapshotId) -> None:
        """Note that a snapshot is deleted; its blobs stay until an heir of it is written."""
        gone = self._snapshots.pop(snapshot, None)
        self._files.drop(snapshot)
        if gone is None:
            return
        left = [*self._left_to.pop(snapshot, ()), snapshot]
        heir = next(
            (h for h in self._files.unwritten() if self._snapshots[h].goes_on_from(gone)), None
        )
        if heir is not None:
            self._left_to.setdefault(heir, []).extend(left)
        else:
            self._remove(left)

    def changes(self, now: float) -> Iterator[ev.Event]:
        """Write and drop what is due; yield what the scheduler has to know."""
        self.now, self.due = now, inf
        while True:
            if name := self._files.to_drop(()):
                self._files.drop(name)
                yield self._stored(replace(self._snapshots[name], whole=False))
                continue
            name = self._files.to_write(now)
            if name is None:
                return
            if self._budget.left_bytes and self.is_worth_writing(name):
                yield self._write(name)
            else:
                self._files.put_off(name, now + _AGAIN_S)
                # What would be evicted next goes at once, or else what was not used for longest.
                worthless = not self.is_worth_writing(name)
                given_up = name if worthless else self._files.to_give_up(())
                if self._files.is_full and given_up is not None:
                    yield from self._give_up(given_up)

    def _give_up(self, name: SnapshotId) -> Iterator[ev.Event]:
        """Lose a whole file; a snapshot that has blobs lives on."""
        snapshot = self._snapshots[name]
        self._files.drop(name)
        if snapshot.blobs:
            yield self._stored(replace(snapshot, whole=False))
        else:
            self.gone(name)
            yield ev.SnapshotLost(name)

    def _write(self, name: SnapshotId) -> ev.Event:
        snapshot = self._snapshots[name]
        blobs = self._blobs(snapshot)
        new_bytes = sum(blob.size_bytes for blob in blobs if not self.shared.has(blob))
        self.shared.put(name, blobs)
        self.written_bytes += new_bytes
        self._budget.spend(new_bytes)
        self._files.written(name)
        self._remove(self._left_to.pop(name, []))
        return self._stored(replace(snapshot, blobs=blobs))

    def _stored(self, snapshot: Snapshot) -> ev.Event:
        self._snapshots[snapshot.id] = snapshot
        return ev.SnapshotStored(snapshot)

    def _remove(self, names: list[SnapshotId]) -> None:
        for name in names:
            self.shared.remove(name)

    def _blobs(self, snapshot: Snapshot) -> tuple[Blob, ...]:
        """Return the blobs of a snapshot: rows, and one of its own with the rest."""
        at_least = max(TOKENS // self.scale, 1)
        n_tokens = tokens_in_blob(self.bytes_per_token, LEAST_BYTES, at_least)
        blobs = list[Blob]()
        if self.kind in _WITH_ROWS:
            hasher, width = blake2b(digest_size=16), n_tokens * WIDTH
            for end in range(width, len(snapshot.tokens) + 1, width):
                hasher.update(snapshot.tokens[end - width : end])
                blobs.append(Blob(hasher.copy().digest(), n_tokens * self.bytes_per_token))
        if rest_bytes := snapshot.size_bytes - sum(blob.size_bytes for blob in blobs):
            blobs.append(Blob(snapshot.id.encode(), rest_bytes))
        return tuple(blobs)
