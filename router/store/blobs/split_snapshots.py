"""The snapshots of a store that are, or will be, split into blobs.

Shares the dictionary of held snapshots with `KvStore`, and changes it where a snapshot gets blobs,
loses its whole file, or loses a blob. A snapshot without a whole file is held in the directory of
the tier.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

import structlog
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.tasks import supervise
from router.base.types import Blob, KvDir, Snapshot, SnapshotId, TierStatus
from router.store import files, records
from router.store.blobs.tier import BlobTier
from router.store.blobs.whole_files import WholeFiles
from router.store.blobs.write_behind import WriteBehind
from router.store.blobs.write_budget import WriteBudget
from router.store.files import Identity
from router.store.format.split import LEAST_BYTES
from router.store.listener import StoreListener
from router.store.records import KvDirectory, StoredSnapshot

log = structlog.get_logger(__name__)

_NO_FILE = Identity(0, 0, 0)
_SHARE = 0.5  # of a KV directory's file system that whole files may take by default


@dataclass(frozen=True, slots=True)
class BlobSettings:
    """Settings of the tier of blobs; its directory is on a disk, KV directories in memory."""

    directory: KvDir
    write_after_s: float = 60.0
    whole_bytes: int | None = None  # of files in each KV directory; None: half its file system
    max_written_per_day: float = inf  # bytes
    least_bytes: int = LEAST_BYTES  # of a blob of rows


@dataclass(slots=True)
class SplitSnapshots:
    """Snapshots with blobs, with a whole file, or with both. Implements `write_behind.Owner`."""

    settings: BlobSettings
    tier: BlobTier
    held: dict[SnapshotId, StoredSnapshot]
    listener: Callable[[], StoreListener]
    wall_now: Callable[[], float]
    reading: Counter[SnapshotId]  # whole files, by their readers
    behind: WriteBehind = field(init=False)
    directories: dict[KvDir, KvDirectory] = field(default_factory=dict)
    _left_to: dict[SnapshotId, list[SnapshotId]] = field(default_factory=dict)  # by heir
    _running: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        budget = WriteBudget(self.settings.max_written_per_day, self.wall_now)
        self.behind = WriteBehind(
            self.tier, budget, self.settings.write_after_s, self, self.reading
        )

    async def load(self) -> None:
        """Read the directory of the tier, and hold its snapshots. Raises KvError."""
        directory = self.tier.directory
        await directory.threads.unhurried(partial(self.behind.budget.read, directory.path))
        for snapshot in await self.tier.load():
            self.held[snapshot.id] = StoredSnapshot(snapshot, directory, _NO_FILE)
        self._running = supervise(self.behind.run, name="write blobs")

    def opened(self, directory: KvDirectory, found: Sequence[StoredSnapshot]) -> None:
        """Note a KV directory and its whole files; those without blobs will get them."""
        room = directory.disk_bytes * _SHARE
        self.directories[directory.kv_dir] = directory
        limit = self.settings.whole_bytes
        self.behind.directories[directory.kv_dir] = WholeFiles(room if limit is None else limit)
        for one in found:
            split = self.held.get(one.snapshot.id)
            if split is not None:
                one.snapshot = replace(one.snapshot, blobs=split.snapshot.blobs)
            self.behind.add(one)

    def gone(self, held: StoredSnapshot) -> None:
        """Note that a snapshot is deleted: its whole file is not written any more."""
        if held.snapshot.whole:
            self.behind.gone(held)

    async def remove(self, held: StoredSnapshot) -> None:
        """Remove the blobs of a deleted snapshot, or leave them to its heir."""
        name = held.snapshot.id
        if name in self.tier:
            await self.tier.forget(name)
        left = [*self._left_to.pop(name, ()), name]
        heir = self._heir_of(held.snapshot)
        if heir is not None:
            self._left_to.setdefault(heir, []).extend(left)
            return
        for one in left:
            await self.tier.remove(one)

    def _heir_of(self, snapshot: Snapshot) -> SnapshotId | None:
        """Return a whole file that is not written yet and goes on from a snapshot.

        It has the rows of the snapshot, whose blobs would have to be written once more.
        """
        for whole in self.behind.directories.values():
            for name in whole.unwritten():
                other = self.held.get(name)
                if other is not None and other.snapshot.goes_on_from(snapshot):
                    return name
        return None

    async def _inherited(self, heir: SnapshotId) -> None:
        """Remove what was left to a snapshot that is written now."""
        for one in self._left_to.pop(heir, ()):
            await self.tier.remove(one)

    async def damaged(self, blob: Blob) -> None:
        """Put a blob aside that cannot be read, and give up what cannot do without it.

        A snapshot with a whole file is split again.
        """
        names = await self.tier.damaged(blob)
        for name in names:
            held = self.held.get(name)
            if held is not None and held.snapshot.whole:
                held.snapshot = replace(held.snapshot, blobs=())
                self.listener().stored(held.snapshot)
                self.behind.add(held)
            elif held is not None:
                del self.held[name]
                self.listener().lost(held.snapshot, "a blob of it is damaged")
        for name in names:
            await self.tier.remove(name)

    async def aclose(self) -> None:
        """Write what is not written yet; the directories must still be open."""
        if self._running is not None:
            self.behind.stop()
            await asyncio.wait([self._running])
            with suppress(KvError):
                await self.behind.finish()

    def status(self) -> TierStatus:
        """Return the state of the tier."""
        tier, behind = self.tier, self.behind
        directories = behind.directories.values()
        return TierStatus(
            snapshots=len(tier.shared),
            blobs=tier.shared.n_blobs,
            blob_bytes=tier.shared.total_bytes,
            sum_bytes=tier.shared.sum_bytes,
            whole_files=sum(len(one) for one in directories),
            whole_bytes=sum(one.total_bytes for one in directories),
            unwritten=sum(len(one.unwritten()) for one in directories),
            written_bytes=tier.counts.written_bytes,
            split_bytes=tier.counts.split_bytes,
            put_off=behind.put_off,
            damaged=tier.counts.damaged,
            budget_left_bytes=behind.budget.left_bytes,
        )

    # -- for the task that writes and drops ---------------------------------------------------

    def hangs(self, kv_dir: KvDir) -> bool:
        """Return whether a KV directory, or that of the blobs, does not answer."""
        found = self.directories.get(kv_dir)
        return self.tier.directory.threads.hangs or found is None or found.threads.hangs

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        """Return whether a snapshot would be kept, and not evicted next."""
        return self.listener().is_worth_writing(snapshot)

    async def write_blobs(self, snapshot: SnapshotId) -> None:
        """Write the blobs of a whole file. Raises KvError."""
        held = self._whole(snapshot)
        threads = held.directory.threads
        if await threads.quick(partial(files.identity, held.path)) != held.identity:
            await threads.bulk(partial(records.check_again, held))  # touched, or another file
        split = await self.tier.write(held)
        if self.held.get(snapshot) is not held:
            await self.tier.remove(snapshot)
            raise KvFileError(f"snapshot {snapshot} was deleted while it was split")
        held.snapshot = split
        self.listener().stored(split)
        await self._inherited(snapshot)

    async def drop_whole(self, snapshot: SnapshotId) -> None:
        """Delete a whole file whose blobs are written. Raises KvError."""
        held = self._whole(snapshot)
        if not held.snapshot.blobs or snapshot not in self.tier:
            raise KvFileError(f"the blobs of {snapshot} are not written")
        split = replace(held.snapshot, kv_dir=self.tier.kv_dir, whole=False)
        self.held[snapshot] = StoredSnapshot(split, self.tier.directory, _NO_FILE)
        self.behind.gone(held)
        self.listener().stored(split)
        await self._delete(held)

    async def give_up(self, snapshot: SnapshotId, reason: str) -> None:
        """Delete a snapshot for which there is no room. Raises KvError."""
        held = self._whole(snapshot)
        if held.snapshot.blobs:
            await self.drop_whole(snapshot)
            return
        del self.held[snapshot]
        log.warning("snapshot_given_up", snapshot=snapshot, reason=reason)
        self.listener().lost(held.snapshot, reason)
        await self._delete(held)
        await self.remove(held)

    def _whole(self, snapshot: SnapshotId) -> StoredSnapshot:
        held = self.held.get(snapshot)
        if held is None or not held.snapshot.whole:
            raise KvFileError(f"snapshot {snapshot} has no whole file")
        return held

    async def _delete(self, held: StoredSnapshot) -> None:
        held.gone = True
        await held.directory.threads.unhurried(partial(records.take_out, held, held.unlink))
