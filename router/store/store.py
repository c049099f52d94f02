"""Snapshots as files in the KV directories that the backends save to (the SnapshotStore port).

Owns every file in them that is named `kvf-*`; the manifests say which of them exist. Decides
nothing: the engine decides which snapshots are saved, restored or evicted, and when a file is no
longer in use.

Each directory has its own threads for blocking work (`io_pool.py`). The snapshots of a directory
that hangs are withdrawn, and offered again when it answers. Calls raise KvError or KvFileError.
"""

# over 600 lines: it owns all files; what it does for each kind was moved out.

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path

import structlog
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.tasks import Tasks
from router.base.tokens import TokenPieces
from router.base.types import (
    KvDir,
    MemoryKind,
    Namespace,
    Snapshot,
    SnapshotId,
    StagedFile,
    Tenant,
    TierStatus,
)
from router.store import files, io_pool, records, shapes
from router.store.blobs.blobs import BlobError
from router.store.blobs.exchange import Exchange
from router.store.blobs.split_snapshots import FOLDER, BlobSettings, SplitSnapshots, status_of
from router.store.blobs.tier import BlobTier
from router.store.blobs.write_budget import WriteBudget
from router.store.files import Identity
from router.store.format.head import tokens_of
from router.store.io_pool import Threads, loop_now
from router.store.listener import StoreListener
from router.store.purges import Purges
from router.store.records import KvDirectory, StateFile, StoredSnapshot

log = structlog.get_logger(__name__)

# Records that one call in a thread checks: ten thousand calls for one record each would hold up the
# event loop for a third of a second.
_RECOVERED_AT_ONCE = 100
_WRITTEN_S = 5.0  # Linux looks so often for data that has waited for 30 s
_TOLD_AT_ONCE = 10  # to find ten thousand in an index at once would hold it up, too


class KvStore:
    """The store of snapshots. Call `load` first, `aclose` last, and all from one event loop."""

    def __init__(
        self,
        kv_dirs: Sequence[KvDir],
        *,
        wall_now: Callable[[], float],
        fsync: bool = True,
        group_access: bool = False,
        blobs: BlobSettings | None = None,
        tenant_of: Callable[[Namespace], Tenant] = lambda _: Tenant(""),
        purges: Path | None = None,
    ) -> None:
        """Configure the store; `load` opens `kv_dirs`.

        Set `listener` before. `wall_now` returns seconds since the epoch. Without `fsync` a crash
        of the machine (not of the router) may lose snapshots, but never brings back a wrong one.
        `group_access`: the group of a directory may read and write in it, as a backend of another
        user has to. `blobs`: split snapshots in the background, and store equal bytes once.
        `tenant_of`: the tenant of a namespace. `purges`: the list of this user's purges.
        """
        self.purges = Purges(tenant_of, purges)
        self._kv_dirs = tuple(dict.fromkeys(kv_dirs))
        self.listener = StoreListener()
        self._wall_now = wall_now
        self._fsync = fsync
        self._group_access = group_access
        self._directories: dict[KvDir, KvDirectory] = {}
        self._held: dict[SnapshotId, StoredSnapshot] = {}
        self._staged: dict[tuple[KvDir, str], Identity] = {}
        self._opened: dict[tuple[KvDir, str], float] = {}  # since when, in clock seconds
        self._unwanted: list[tuple[KvDir, str]] = []  # to delete when their directory answers
        self._blobs = blobs
        self._splits: dict[KvDir, SplitSnapshots] = {}  # by the directory of their blobs
        self._budgets: dict[int, WriteBudget] = {}  # by device
        self._mode = 0o660 if group_access else 0o600  # whatever the umask of the backend
        self.exchange = Exchange(self, self._held, blobs, self._mode)
        self._reading: Counter[SnapshotId] = Counter()  # whole files, by their readers
        self._threads: list[Threads] = []
        self._loaded: set[KvDir] = set()  # directories whose snapshots are held
        self._between: dict[tuple[KvDir, KvDir], Threads] = {}
        self._telling: defaultdict[KvDir, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._background = Tasks()

    async def load(self) -> list[Snapshot]:
        """Lock and read the directories; return the snapshots that pass a cross-check.

        Oldest first. Raises KvError if a directory cannot be used; none is locked then.
        """
        try:
            return await self.add(self._kv_dirs)
        except KvError:
            await self.aclose()
            raise

    async def add(self, kv_dirs: Sequence[KvDir]) -> list[Snapshot]:
        """Lock and read more directories; return their snapshots that pass a cross-check.

        Oldest first. Directories that are open already stay as they are. Raises KvError if a new
        one cannot be used; none of the new ones is locked then.
        """
        before = dict(self._directories)
        found: list[StoredSnapshot] = []
        try:
            if self._blobs is not None and self._blobs.directory is not None:
                await self._blobs_at(self._blobs.directory, self._blobs)
            fresh = await self._open_all(kv_dirs)
            for some in await asyncio.gather(*map(self._recover, fresh)):
                found += some
            splits: list[SplitSnapshots | None] = []
            for directory in fresh:
                ids = [held.snapshot.id for held in found if held.directory is directory]
                await directory.threads.unhurried(partial(records.sweep, directory, ids))
                splits.append(await self._blobs_for(directory))
        except KvError:
            await self._close_but(before)
            raise
        for split, directory in zip(splits, fresh, strict=True):
            if split is not None:
                split.opened(directory, [held for held in found if held.directory is directory])
        self._held |= {held.snapshot.id: held for held in found}
        opened = self._opened_since(before.values())
        self._loaded |= {directory.kv_dir for directory in opened}
        await self._obey()
        here = [h.snapshot for h in self._held.values() if any(h.directory is d for d in opened)]
        return sorted(here, key=lambda snapshot: snapshot.saved_at)

    async def _blobs_for(self, directory: KvDirectory) -> SplitSnapshots | None:
        """Return what splits the files of a KV directory. Raises KvError.

        Where blobs are elsewhere now, those that an earlier run left in it are used, too.
        """
        if self._blobs is None:
            return None
        own = directory.path / FOLDER
        if self._blobs.directory is None:
            return await self._blobs_at(KvDir(str(own)), self._blobs)
        if await directory.threads.quick(own.is_dir):
            await self._blobs_at(KvDir(str(own)), self._blobs)
        return await self._blobs_at(self._blobs.directory, self._blobs)

    async def _open_all(self, kv_dirs: Sequence[KvDir]) -> list[KvDirectory]:
        """Open the directories that are not open; return those that are under no other name."""
        fresh: list[KvDirectory] = []
        for kv_dir in dict.fromkeys(kv_dirs):
            if kv_dir not in self._directories:
                known = self._distinct()
                await self._open_directory(kv_dir)
                fresh += self._opened_since(known)
        return fresh

    async def _close_but(self, before: dict[KvDir, KvDirectory]) -> None:
        """Close the directories that were not open before, and forget what is in them."""
        opened = self._opened_since(before.values())
        for name in [name for name in self._splits if name not in before]:
            await self._splits.pop(name).aclose()
        for held in [one for one in self._held.values() if any(one.directory is d for d in opened)]:
            del self._held[held.snapshot.id]
        self._directories = before
        await self._close(opened)

    async def _blobs_at(self, name: KvDir, settings: BlobSettings) -> SplitSnapshots:
        """Return what splits files to a directory of blobs, opened now. Raises KvError."""
        if name not in self._splits:
            await self._open_directory(name)
            directory = self._directories[name]
            tier = BlobTier(directory, settings.least_bytes)
            fresh = WriteBudget(settings.max_written_per_day, self._wall_now)
            budget = self._budgets.setdefault(directory.status.st_dev, fresh)
            await directory.threads.unhurried(partial(budget.read, directory.path))
            split = SplitSnapshots(
                settings, tier, self._held, lambda: self.listener, budget, self._reading
            )
            self._splits[name] = split
            await split.load()
        return self._splits[name]

    async def _recover(self, directory: KvDirectory) -> list[StoredSnapshot]:
        names = directory.names
        found: list[StoredSnapshot] = []
        for start in range(0, len(names), _RECOVERED_AT_ONCE):
            some = names[start : start + _RECOVERED_AT_ONCE]
            work = partial(records.recover_all, directory, some)
            found += await directory.threads.unhurried(work)
        return found

    @property
    def kv_dirs(self) -> tuple[KvDir, ...]:
        """Return the directories that are open."""
        return tuple(self._directories)

    async def flush(self) -> None:
        """Wait until everything committed so far is durable, or reported lost."""
        await self._background.join()

    async def aclose(self) -> None:
        """Finish the background work, remove the files that `open` made, release the directories.

        A directory that hangs is released as it is: a thread that waits there cannot be ended.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(io_pool.QUICK_S if self.hangs else io_pool.BULK_S):
                await self.flush()
                await asyncio.gather(*(split.aclose() for split in self._splits.values()))
        await self._background.aclose()
        for kv_dir, name in tuple(self._opened):
            with suppress(KvError):
                await self._unlink(kv_dir, name)
        self._opened.clear()
        await self._close(self._distinct())
        self.exchange.threads.close()
        for threads in self._between.values():
            threads.close()
        self._directories.clear()
        self._held.clear()

    async def _close(self, directories: Sequence[KvDirectory]) -> None:
        for directory in directories:
            if not directory.threads.hangs:
                with suppress(KvError, TimeoutError):
                    async with asyncio.timeout(io_pool.BULK_S):
                        # Queued behind the deletes that have been requested.
                        await directory.threads.unhurried(lambda: None)
            directory.threads.close()
            records.close_directory(directory)

    @property
    def hangs(self) -> bool:
        """Return True if a directory does not answer."""
        return any(threads.hangs for threads in self._threads)

    @property
    def works(self) -> bool:
        """Return True if a call in a thread has not returned; after `aclose` nothing awaits it."""
        return self.exchange.threads.works or any(threads.works for threads in self._threads)

    def tier_status(self) -> TierStatus | None:
        """Return the state of the tier of blobs; None: there is none."""
        splits = list(self._splits.values())
        return status_of(splits, self._budgets.values()) if splits else None

    def is_on_disk(self, kv_dir: KvDir) -> bool:
        """Return whether a KV directory that is open is on a disk, and not in memory."""
        return kv_dir in self._directories and self._directories[kv_dir].on_disk

    def check_budget(self, kv_dir: KvDir) -> None:
        """Raise KvError if no more may be written to the disk of a KV directory today."""
        split = self._directory(kv_dir).split if self.is_on_disk(kv_dir) else None
        if split is not None and not split.budget.left_bytes:
            raise KvError("as much was written as store.max_written_per_day allows")

    def staging_name(self) -> str:
        """Return a fresh name for a backend to write to."""
        return files.staging_name()

    async def verify(
        self,
        kv_dir: KvDir,
        name: str,
        size_bytes: int,
        kind: MemoryKind | None = None,
        media: Sequence[int] = (),
    ) -> StagedFile:
        """Check a file that a backend wrote: its size as reported, and every section of it.

        `kind`: the backend's memory kind; None: as the file looks. `media`: the ids that stand for
        the media in its tokens. Of an opaque state only size and
        head are checked. A sliding window is padded where possible; `size_bytes` of the result is
        then larger. Raises KvFileError and removes the file then.
        """
        path = self._staging_path(kv_dir, name)
        try:
            directory = self._directory(kv_dir)
            found = await directory.threads.quick(partial(shapes.inspect, path, size_bytes, kind))
            if found.has_window:
                found = await directory.threads.bulk(partial(shapes.pad, path, found))
            named = partial(tokens_of, found.head, media)
            tokens = await directory.threads.quick(named) if media else found.head.tokens
        except KvError as error:
            with suppress(KvError):
                await self.discard(kv_dir, name)
            raise KvFileError(str(error)) from error
        return replace(self.stage(kv_dir, name, found), tokens=tokens)

    async def cut(self, snapshot: Snapshot, n_tokens: int) -> StagedFile:
        """Cut the first `n_tokens` out of a full-attention snapshot, as a file to commit.

        Raises KvFileError with the reason if the cut is impossible; no file is left then.
        """
        self.check_budget(self.kv_directory().kv_dir)
        async with self._as_file(snapshot, self.kv_directory()) as file:
            name = files.staging_name()
            target = file.directory.path / name
            make = partial(shapes.cut, file.path, target, file.identity, n_tokens)
            threads = file.directory.threads
            found = await threads.bulk(make, lambda _: target.unlink(missing_ok=True))
        return self.stage(file.directory.kv_dir, name, found)

    def stage(self, kv_dir: KvDir, name: str, found: shapes.Inspected) -> StagedFile:
        """Return a file that was checked, to commit it."""
        self._staged[kv_dir, name] = found.identity
        return StagedFile(kv_dir, name, found.head.tokens, found.identity.size_bytes, found.shape)

    async def commit(self, staged: StagedFile, namespace: Namespace) -> Snapshot:
        """Give a verified file its final name: usable at once, durable after `flush`.

        `staged.tokens` may have been replaced by tokens with one negative id for each medium.
        Raises KvFileError if the file was not verified or has changed since.
        """
        path = self._staging_path(staged.kv_dir, staged.name)
        if (known := self._staged.pop((staged.kv_dir, staged.name), None)) is None:
            raise KvFileError(f"{staged.name} was not verified")
        directory = self._directory(staged.kv_dir)
        number = SnapshotId(path.stem.removeprefix("kvf-"))
        facts = TokenPieces(staged.tokens), staged.size_bytes, staged.shape, self._wall_now()
        snapshot = Snapshot(number, namespace, staged.kv_dir, *facts)
        held = StoredSnapshot(snapshot, directory, known)
        rename = partial(records.rename, path, held, self._mode)
        await directory.threads.quick(rename, lambda _: held.unlink(), blame_file=True)
        self._held[number] = held
        if directory.split is not None:
            directory.split.saved(held)
        self._background.spawn(self._make_durable(held), name=f"kv_durable {number}")
        return snapshot

    async def discard(self, kv_dir: KvDir, name: str) -> None:
        """Remove an unwanted staged file, if it exists."""
        self._staged.pop((kv_dir, name), None)
        self._staging_path(kv_dir, name)
        await self._unlink(kv_dir, name)

    async def open(self, snapshot: Snapshot, kv_dir: KvDir, n_stream: int) -> str:
        """Return a name under which a backend of `kv_dir` can read the snapshot, checked unchanged.

        Raises KvFileError if the file is not as committed. The caller owns the name until `close`;
        in another directory it is a link or a copy, made here. `n_stream` is the number of streams
        in the backend's files: a file with another number is restreamed; 0 takes any.
        """
        target_directory, begun = self._directory(kv_dir), loop_now()
        async with self._as_file(snapshot, target_directory) as file:
            restream = snapshot.shape.needs_restream(n_stream)
            if file.directory is target_directory and not restream:
                if file.made:
                    file.keep = True
                    self._opened[kv_dir, file.path.name] = begun
                else:
                    self._reading[snapshot.id] += 1  # until `close`
                return file.path.name
            target = target_directory.path / files.staging_name()

            def undo(_: object) -> None:
                target.unlink(missing_ok=True)

            threads = self._threads_of(file.directory, target_directory)
            if restream:
                make = partial(shapes.restream, file.path, target, file.identity, n_stream)
                await threads.bulk(make, undo)
            elif await threads.quick(partial(files.link, file.path, target), undo):
                begun = inf  # nothing is written
            else:
                copy = partial(files.copy, file.path, target, file.identity)
                await threads.bulk(copy, undo)
        self._opened[kv_dir, target.name] = begun
        return target.name

    @asynccontextmanager
    async def _as_file(
        self, snapshot: Snapshot, directory: KvDirectory
    ) -> AsyncIterator[StateFile]:
        """Yield the whole file of a snapshot, or one made in `directory` from its blobs.

        Raises KvFileError if the file is not as committed, or a blob is damaged.
        """
        self._reading[snapshot.id] += 1  # its whole file is not dropped meanwhile
        try:
            held = await self._readable(snapshot)
            if held.snapshot.whole:
                if held.directory.split is not None:
                    held.directory.split.used(held)
                yield StateFile(held.directory, held.path, held.identity)
                return
            target = directory.path / files.staging_name()
            identity = await self._assemble(held, directory, target)
            file = StateFile(directory, target, identity, made=True)
            try:
                yield file
            finally:
                if not file.keep:
                    with suppress(KvError):
                        await self._unlink(directory.kv_dir, target.name)
        finally:
            self._read(snapshot.id)

    async def _assemble(
        self, held: StoredSnapshot, directory: KvDirectory, target: Path
    ) -> Identity:
        assert held.directory.split is not None
        work = held.directory.split.tier.assembly(held.snapshot.id, target, self._mode)
        threads = self._threads_of(held.directory, directory)
        try:
            return await threads.bulk(work, lambda _: target.unlink(missing_ok=True))
        except BlobError as error:
            losing = held.directory.split.damaged(error.blob)
            self._background.spawn(losing, name=f"blob_damaged {held.snapshot.id}")
            raise

    async def _readable(self, snapshot: Snapshot) -> StoredSnapshot:
        """Return the held snapshot. Raises KvFileError if it has no file that is as committed.

        A whole file that has changed is dropped if the snapshot has blobs.
        """
        held = self._held.get(snapshot.id)
        if held is None:
            raise KvFileError(f"snapshot {snapshot.id} does not exist")
        if not held.snapshot.whole:
            return held
        threads = held.directory.threads
        try:
            found = await threads.quick(partial(files.identity, held.path), blame_file=True)
            if found != held.identity:
                await threads.bulk(partial(records.check_again, held), blame_file=True)
        except KvFileError:
            if not await self._blobs_make_up_for(snapshot.id):
                raise
            return self._held[snapshot.id]
        return held

    async def _blobs_make_up_for(self, snapshot: SnapshotId) -> bool:
        """Drop a damaged whole file if the snapshot has blobs; return whether it has."""
        held = self._held.get(snapshot)
        split = None if held is None else held.directory.split
        if held is None or split is None or snapshot not in split.tier:
            return False
        if held.snapshot.whole:  # no other reader has found it before
            await split.drop_whole(snapshot)
        return True

    def _read(self, snapshot: SnapshotId) -> None:
        """Note the end of a read of a whole file."""
        self._reading[snapshot] -= 1
        if not self._reading[snapshot]:
            del self._reading[snapshot]
            held = self._held.get(snapshot)
            if held is not None and held.directory.split is not None:
                held.directory.split.wake.set()

    def kv_directory(self) -> KvDirectory:
        """Return a directory for a file that the router makes. Raises KvError."""
        found = next((one for one in self._distinct() if one.kv_dir not in self._splits), None)
        if found is None:
            raise KvError("there is no KV directory to make a state file in")
        return found

    def _threads_of(self, source: KvDirectory, target: KvDirectory) -> Threads:
        """Return the threads that read one directory and write another.

        Raises KvError if the target hangs. Two directories have threads in common, because a call
        that takes too long does not show which of the two hangs. Neither is blamed: only transfers
        in this direction fail until it returns. Work in each directory alone shows which one hangs.
        """
        if source is target:
            return source.threads
        if target.threads.hangs:
            raise KvError(f"{target.kv_dir} does not answer")
        way = source.kv_dir, target.kv_dir
        if way not in self._between:
            name = f"{source.kv_dir} or {target.kv_dir}"
            self._between[way] = Threads(name, lambda: None, self._background.spawn)
            self._threads.append(self._between[way])
        return self._between[way]

    async def close(self, snapshot: Snapshot, kv_dir: KvDir, name: str) -> None:
        """Release a name that `open` returned; remove its link or copy.

        A disk gets none of a file that is removed soon after its first byte was written.
        """
        if (since := self._opened.pop((kv_dir, name), None)) is not None:
            split = self._directory(kv_dir).split if self.is_on_disk(kv_dir) else None
            if split is not None and loop_now() - since > _WRITTEN_S:
                split.budget.spend(snapshot.size_bytes)
            await self._unlink(kv_dir, name)
        elif snapshot.id in self._reading:
            self._read(snapshot.id)

    async def delete(self, snapshot: Snapshot) -> None:
        """Remove a snapshot: first its record, then its file. Idempotent."""
        held = self._held.pop(snapshot.id, None)
        if held is not None:
            held.gone = True
            await self._background.complete(self._remove(held), name=f"delete {snapshot.id}")

    async def _remove(self, held: StoredSnapshot) -> None:
        if held.directory.split is not None:
            held.directory.split.gone(held)
        if held.snapshot.whole:
            await held.directory.threads.unhurried(partial(records.take_out, held))
        if held.directory.split is not None:
            await held.directory.split.remove(held)

    async def purge(self, tenant: Tenant, note: str) -> dict[KvDir, str]:
        """Delete all of a tenant, now or when a directory answers; return what failed, and why."""
        self.purges.add(note, tenant)
        return await self._obey()

    async def note_told(self, notes: Iterable[str]) -> None:
        """Note that the cold tier has heard of purges."""
        self.purges.tell(notes)
        await self._obey()

    async def _obey(self) -> dict[KvDir, str]:
        loaded = [one for one in self._distinct() if one.kv_dir in self._loaded]
        loaded.sort(key=lambda one: one.kv_dir in self._splits)  # where files become blobs: last
        return await self.purges.obey(loaded, self._held, self._purged)

    async def _purged(self, held: StoredSnapshot) -> None:
        self.listener.lost(held.snapshot, "its tenant was purged")
        await self.delete(held.snapshot)

    def _distinct(self) -> list[KvDirectory]:
        return list({id(d): d for d in self._directories.values()}.values())

    def _opened_since(self, known: Collection[KvDirectory]) -> list[KvDirectory]:
        """Return the open directories that are none of `known`, under whatever name."""
        return [d for d in self._distinct() if all(d is not other for other in known)]

    def _directory(self, kv_dir: KvDir) -> KvDirectory:
        try:
            return self._directories[kv_dir]
        except KeyError:
            raise KvError(f"{kv_dir} is not a KV directory of this store") from None

    def _staging_path(self, kv_dir: KvDir, name: str) -> Path:
        if not files.STAGING.fullmatch(name):
            raise KvError(f"{name!r} is not a staging name")
        return self._directory(kv_dir).path / name

    async def _unlink(self, kv_dir: KvDir, name: str) -> None:
        directory = self._directory(kv_dir)
        path = directory.path / name
        try:
            await directory.threads.quick(partial(path.unlink, missing_ok=True))
        except KvError:
            if directory.threads.hangs:
                self._unwanted.append((kv_dir, name))
            raise

    async def _open_directory(self, kv_dir: KvDir) -> None:
        self._drop_threads()
        if any(threads.kv_dir == kv_dir and threads.hangs for threads in self._threads):
            raise KvError(f"{kv_dir} does not answer")
        threads = Threads(kv_dir, lambda: self._changed(kv_dir), self._background.spawn)
        make = partial(
            records.open_directory,
            kv_dir,
            self._distinct(),
            threads,
            fsync=self._fsync,
            group_access=self._group_access,
        )

        def undo(directory: KvDirectory) -> None:
            if directory.threads is threads:  # else it was open before
                records.close_directory(directory)

        self._threads.append(threads)
        try:
            self._directories[kv_dir] = await threads.bulk(lambda: self.purges.read(make()), undo)
        finally:
            self._drop_threads()

    def _drop_threads(self) -> None:
        """Close idle threads of directories that were not opened, or are open by another name."""
        used = [d.threads for d in self._directories.values()] + [*self._between.values()]
        for threads in [t for t in self._threads if t not in used and not t.works]:
            threads.close()
            self._threads.remove(threads)

    def _changed(self, kv_dir: KvDir) -> None:
        """Withdraw the snapshots of a directory that hangs, or offer them when it answers again."""
        if (directory := self._directories.get(kv_dir)) is not None:
            there = [one.snapshot for one in self._held.values() if one.directory is directory]
            telling = self._tell(directory.kv_dir, there, lost=directory.threads.hangs)
            self._background.spawn(telling, name=f"kv_dir {kv_dir}")

    async def _tell(self, kv_dir: KvDir, snapshots: Sequence[Snapshot], *, lost: bool) -> None:
        """Report one change of a directory completely before its next change.

        A loss that is reported late would withdraw snapshots that were offered again.
        """
        async with self._telling[kv_dir]:
            if not lost:
                await self._remove_unwanted()
                await self.listener.found([one for one in snapshots if one.id in self._held])
                return
            for number, snapshot in enumerate(snapshots):
                self.listener.lost(snapshot, "its directory does not answer")
                if number % _TOLD_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _remove_unwanted(self) -> None:
        await self._obey()
        for split in self._splits.values():
            split.wake.set()
        unwanted, self._unwanted = self._unwanted, []
        for kv_dir, name in unwanted:
            with suppress(KvError):
                await self._unlink(kv_dir, name)

    async def _make_durable(self, held: StoredSnapshot) -> None:
        try:
            await held.directory.threads.unhurried(partial(records.record, held))
            if held.directory.split is not None:
                await held.directory.split.note()
        except KvError as error:
            if held.gone:
                return  # deleted meanwhile, and its file with it
            held.gone = True
            self._held.pop(held.snapshot.id, None)
            with suppress(KvError):
                await self._remove(held)
            log.warning("snapshot_lost", snapshot=held.snapshot.id, reason=str(error))
            self.listener.lost(held.snapshot, str(error))
