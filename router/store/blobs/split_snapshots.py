"""The snapshots of a store that are, or will be, split into blobs.

Shares the dictionary of held snapshots with `KvStore`, and changes it where a snapshot gets blobs,
loses its whole file, or loses a blob. A snapshot without a whole file is held in the directory of
the tier. Files are split and dropped off the path of every request: one at a time, when it is due
(`whole_files.py`).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
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
from router.store.blobs.write_budget import WriteBudget
from router.store.files import Identity
from router.store.format.split import LEAST_BYTES
from router.store.io_pool import loop_now
from router.store.listener import StoreListener
from router.store.records import KvDirectory, StoredSnapshot

log = structlog.get_logger(__name__)

_NO_FILE = Identity(0, 0, 0)
# Seconds until a file is tried again that could not be split: a full disk, or no budget left.
_AGAIN_S = 60.0
_AT_ONCE = 10  # files that are looked at in one turn of the event loop
FOLDER = "kvf-blobs"
_SHARED = 256  # tokens at the begin of two snapshots, from which on it pays to store them once
_SHARE = 0.5  # of a KV directory's file system that whole files may take by default


@dataclass(frozen=True, slots=True)
class BlobSettings:
    """Settings of blobs. `directory`: None: each KV directory has a folder `FOLDER` for its own."""

    directory: KvDir | None = None
    write_after_s: float = 30.0
    # Of split files in each KV directory. None: none on the disk of the blobs; elsewhere half of
    # its file system.
    whole_bytes: int | None = None
    max_written_per_day: float = inf  # bytes
    least_bytes: int = LEAST_BYTES  # of a blob of rows


@dataclass(slots=True)
class SplitSnapshots:
    """Snapshots with blobs, with a whole file, or with both, of KV directories with one tier."""

    settings: BlobSettings
    tier: BlobTier
    held: dict[SnapshotId, StoredSnapshot]
    listener: Callable[[], StoreListener]
    budget: WriteBudget
    reading: Counter[SnapshotId]  # whole files, by their readers
    put_off: int = 0  # splits: no budget or no room, or the snapshot would soon be evicted
    directories: dict[KvDir, tuple[KvDirectory, WholeFiles]] = field(default_factory=dict)
    _left_to: dict[SnapshotId, list[SnapshotId]] = field(default_factory=dict)  # by heir
    _running: asyncio.Task[None] | None = None
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    # Held while a file is split: a second split that finds the file dropped would undo the first.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Set: look what is to be done. A directory answers again, or a file is read no more.
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def load(self) -> None:
        """Read the directory of the tier, and hold its snapshots. Raises KvError."""
        directory = self.tier.directory
        directory.split = self
        for snapshot in await self.tier.load():
            self.held[snapshot.id] = StoredSnapshot(snapshot, directory, _NO_FILE)
        self._running = supervise(self._run, name="write blobs")

    def opened(self, directory: KvDirectory, found: Sequence[StoredSnapshot]) -> None:
        """Note a KV directory and its whole files; those without blobs may get them."""
        directory.split = self
        same_disk = directory.status.st_dev == self.tier.directory.status.st_dev
        limit = self.settings.whole_bytes
        if same_disk and self.settings.directory is None:
            whole = WholeFiles(inf, limit or 0, same_disk=True)
        else:
            whole = WholeFiles(directory.disk_bytes * _SHARE if limit is None else limit)
        self.directories[directory.kv_dir] = directory, whole
        for one in found:
            split = self.held.get(one.snapshot.id)
            if split is not None:
                one.snapshot = replace(one.snapshot, blobs=split.snapshot.blobs)
            self._add(one)

    def saved(self, held: StoredSnapshot) -> None:
        """Note a new whole file, which llama-server has written."""
        snapshot = held.snapshot
        shared = max((n for _, n in self.listener().alike(snapshot)), default=0)
        new_bytes = round(snapshot.size_bytes * (1 - shared / max(len(snapshot), 1)))
        self.budget.spend(snapshot.size_bytes if held.directory.on_disk else 0, new_bytes)
        self._add(held)

    def _add(self, held: StoredSnapshot) -> None:
        """Note a whole file: a new one, one found at the start, or one whose blobs are damaged."""
        snapshot = held.snapshot
        due = None if snapshot.blobs else loop_now() + self.settings.write_after_s
        self._whole_files(held).add(snapshot.id, snapshot.size_bytes, due)
        self.wake.set()

    def used(self, held: StoredSnapshot) -> None:
        """Note that a whole file was read."""
        self._whole_files(held).use(held.snapshot.id)

    def gone(self, held: StoredSnapshot) -> None:
        """Note that a snapshot is deleted: its whole file is not split any more."""
        if held.snapshot.whole:
            self._whole_files(held).drop(held.snapshot.id)

    def _whole_files(self, held: StoredSnapshot) -> WholeFiles:
        # A directory may be open under two names: that of the snapshot may be the other one.
        return self.directories[held.directory.kv_dir][1]

    async def note(self) -> None:
        """Write down for the next run what was written; a restart then may allow it once more."""
        with suppress(KvError):
            await self.tier.note(self.budget)

    async def remove(self, held: StoredSnapshot) -> None:
        """Remove the blobs of a deleted snapshot, or leave them to its heir."""
        name = held.snapshot.id
        if name in self.tier:
            await self.tier.forget(name)
        left = [*self._left_to.pop(name, ()), *([name] if name in self.tier else ())]
        heir = self._heir_of(held.snapshot) if left else None
        if heir is not None:
            self._left_to.setdefault(heir, []).extend(left)
            return
        for one in left:
            await self.tier.remove(one)

    def _heir_of(self, snapshot: Snapshot) -> SnapshotId | None:
        """Return a whole file that is to be split and goes on from a snapshot.

        It has the rows of the snapshot, whose blobs would have to be written once more.
        """
        space, n, tokens = snapshot.namespace, len(snapshot), snapshot.tokens
        for _, whole in self.directories.values():
            for other in (self.held[name].snapshot for name in whole.due if name in self.held):
                alike = other.namespace == space and len(other) >= n
                if alike and other.tokens.startswith(tokens):
                    return other.id
        return None

    async def damaged(self, blob: Blob) -> None:
        """Remove a blob that cannot be read, and give up what cannot do without it.

        A snapshot with a whole file is split again.
        """
        names = await self.tier.damaged(blob)
        for name in names:
            held = self.held.get(name)
            if held is not None and held.snapshot.whole:
                held.snapshot = replace(held.snapshot, blobs=())
                self.listener().stored(held.snapshot)
                self._add(held)
            elif held is not None:
                del self.held[name]
                self.listener().lost(held.snapshot, "a blob of it is damaged")
        for name in names:
            with suppress(KvError):  # the next start removes it
                await self.tier.remove(name)

    async def aclose(self) -> None:
        """Split what memory may lose; the directories must still be open."""
        if self._running is not None:
            self._over.set()  # a thread that writes cannot be cancelled
            self.wake.set()
            await asyncio.wait([self._running])
            with suppress(KvError):
                await self.finish()

    async def finish(self) -> None:
        """Split all files that memory may lose: the router ends."""
        for _, whole in tuple(self.directories.values()):
            for snapshot in [] if whole.same_disk else whole.unwritten():
                async with self._turn:
                    if whole.is_unwritten(snapshot):  # `_run` may have split it meanwhile
                        await self._split(whole, snapshot)

    # -- the task that splits and drops -----------------------------------------------------------

    async def _run(self) -> None:
        """Split and drop files until `aclose`."""
        while not self._over.is_set():
            self.wake.clear()
            for directory, whole in tuple(self.directories.values()):
                while self._goes_on(directory) and await self._round(directory, whole):
                    pass
            there = [whole for one, whole in self.directories.values() if self._goes_on(one)]
            due = min((whole.wakeup() for whole in there), default=inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due == inf else max(due - loop_now(), 0)):
                    await self.wake.wait()

    def _goes_on(self, directory: KvDirectory) -> bool:
        hangs = directory.threads.hangs or self.tier.directory.threads.hangs
        return not (self._over.is_set() or hangs)

    async def _round(self, directory: KvDirectory, whole: WholeFiles) -> bool:
        """Split what is due, and drop what has no room; return whether there may be more to do."""
        goes_on = await self._drop_all(directory, whole)
        for number, snapshot in enumerate(whole.to_write(loop_now())):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if not self._goes_on(directory):
                return False
            async with self._turn:
                if snapshot in whole.due:
                    goes_on |= await self._consider(whole, snapshot)
                    goes_on |= await self._drop_all(directory, whole)
        return goes_on

    async def _drop_all(self, directory: KvDirectory, whole: WholeFiles) -> bool:
        """Drop the split files that have no room; return whether there were any."""
        dropped = False
        while self._goes_on(directory) and (snapshot := whole.to_drop(self.reading)):
            whole.drop(snapshot)
            with suppress(KvError):
                await self.drop_whole(snapshot)
            dropped = True
        return dropped

    async def _consider(self, whole: WholeFiles, snapshot: SnapshotId) -> bool:
        """Split a file that is due, if that pays; return whether there may be more to do."""
        sharers = self._sharers(snapshot) if whole.same_disk else ()
        if whole.same_disk and not sharers:
            whole.leave(snapshot)
            return True
        if await self._split(whole, snapshot):
            whole.split_soon(sharers, loop_now())
            return True
        if not self.listener().is_worth_writing(snapshot) and snapshot not in self.reading:
            return whole.is_full and await self._give_up(whole, snapshot)
        return await self._give_up(whole, whole.to_give_up(self.reading))

    def _sharers(self, snapshot: SnapshotId) -> Sequence[SnapshotId]:
        """Return snapshots that share bytes with one here, or itself if it was left blobs."""
        if snapshot in self._left_to:
            return [snapshot]
        held = self.held.get(snapshot)
        alike = () if held is None else self.listener().alike(held.snapshot)
        whole = [one for _, one in self.directories.values()]
        return [
            name
            for name, n_tokens in alike
            if n_tokens >= _SHARED and (name in self.tier or any(name in one for one in whole))
        ]

    async def _split(self, whole: WholeFiles, snapshot: SnapshotId) -> bool:
        """Split one file; return False if that has to wait."""
        problem = ""
        if not self.budget.left_bytes:
            problem = "as much was written as is allowed in a day"
        elif self.listener().is_worth_writing(snapshot):
            before = self.tier.counts.written_bytes
            try:
                await self._write_blobs(snapshot)
                whole.written(snapshot)
                return True
            except KvError as error:
                problem = str(error)
            finally:
                if self.tier.directory.on_disk:
                    self.budget.spend(self.tier.counts.written_bytes - before)
                await self.note()
        if problem:
            log.warning("write_put_off", snapshot=snapshot, reason=problem)
        self.put_off += 1
        whole.put_off(snapshot, loop_now() + _AGAIN_S)
        return False

    async def _write_blobs(self, snapshot: SnapshotId) -> None:
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
        for one in self._left_to.pop(snapshot, ()):
            with suppress(KvError):  # its manifest is gone
                await self.tier.remove(one)

    async def drop_whole(self, snapshot: SnapshotId) -> None:
        """Delete a whole file whose blobs are written. Raises KvError."""
        held = self._whole(snapshot)
        if not held.snapshot.blobs or snapshot not in self.tier:
            raise KvFileError(f"the blobs of {snapshot} are not written")
        split = replace(held.snapshot, kv_dir=self.tier.kv_dir, whole=False)
        self.held[snapshot] = StoredSnapshot(split, self.tier.directory, _NO_FILE)
        self.gone(held)
        self.listener().stored(split)
        await self._delete(held)

    async def _give_up(self, whole: WholeFiles, snapshot: SnapshotId | None) -> bool:
        """Delete a file to make room, as none can be split; return whether there was one."""
        if snapshot is None:
            return False
        whole.drop(snapshot)
        with suppress(KvError):
            held = self._whole(snapshot)
            if held.snapshot.blobs:
                await self.drop_whole(snapshot)
                return True
            del self.held[snapshot]
            log.warning("snapshot_given_up", snapshot=snapshot)
            self.listener().lost(held.snapshot, "no room for it, and it could not be written")
            await self._delete(held)
            await self.remove(held)
        return True

    def _whole(self, snapshot: SnapshotId) -> StoredSnapshot:
        held = self.held.get(snapshot)
        if held is None or not held.snapshot.whole:
            raise KvFileError(f"snapshot {snapshot} has no whole file")
        return held

    async def _delete(self, held: StoredSnapshot) -> None:
        held.gone = True
        await held.directory.threads.unhurried(partial(records.take_out, held))


def status_of(splits: Sequence[SplitSnapshots], budgets: Collection[WriteBudget]) -> TierStatus:
    """Return the state of all tiers: blobs count once in each of them, budgets once for a disk."""
    shared = [one.tier.shared for one in splits]
    counts = [one.tier.counts for one in splits]
    whole = [files for one in splits for _, files in one.directories.values()]
    return TierStatus(
        snapshots=sum(map(len, shared)),
        blobs=sum(one.n_blobs for one in shared),
        blob_bytes=sum(one.total_bytes for one in shared),
        sum_bytes=sum(one.sum_bytes for one in shared),
        whole_files=sum(map(len, whole)),
        whole_bytes=sum(one.total_bytes for one in whole),
        unwritten=sum(len(one.due) for one in whole),
        written_bytes=sum(one.written_bytes for one in counts),
        split_bytes=sum(one.split_bytes for one in counts),
        put_off=sum(one.put_off for one in splits),
        damaged=sum(one.damaged for one in counts),
        budget_left_bytes=sum(one.left_bytes for one in budgets),
        today_bytes=sum(one.spent_bytes for one in budgets),
        new_today_bytes=sum(one.new_bytes for one in budgets),
    )
