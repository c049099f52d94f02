"""Snapshots as files in the directories that the backends save to (the SnapshotStore port).

Owns every file in them that is named `kvf-*`, and through the manifest the answer to which of
them exist. Decides nothing: what is saved, restored or evicted, and when a file is no longer in
use, is the engine's business.

Blocking work runs in two small pools, so that a restore that waits for a stat does not queue
behind the checksum of ten gigabytes. What it may raise is KvError or KvFileError.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog

from router import tokens as tok
from router.adapters import kv_files
from router.adapters.kv_files import Identity
from router.adapters.manifest import DirectoryLock, Entry, Manifest, os_errors, sync_directory
from router.errors import KvError, KvFileError
from router.kvfile.head import collapse_media, read_head
from router.tasks import Tasks
from router.types import Namespace, Place, Snapshot, SnapshotId, StagedFile

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Directory:
    path: Path
    place: Place
    lock: DirectoryLock
    manifest: Manifest


@dataclass(slots=True)
class _Held:
    """A snapshot that exists. `checksum` is empty until the background part got that far."""

    snapshot: Snapshot
    directory: _Directory
    identity: Identity
    checksum: str = ""
    gone: bool = False  # deleted, quarantined or lost: no record may be written any more
    lock: threading.Lock = field(default_factory=threading.Lock)  # `gone` against `manifest.add`

    @property
    def path(self) -> Path:
        return self.directory.path / f"kvf-{self.snapshot.id}.kv"

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


class KvStore:
    """See the module. `load` comes first, `aclose` last; all calls from one event loop."""

    def __init__(
        self,
        places: Sequence[Place],
        *,
        on_lost: Callable[[Snapshot, str], None],
        wall_now: Callable[[], float],
        fsync: bool = True,
    ) -> None:
        """`on_lost` is told of a committed snapshot whose file could not be made durable.

        `wall_now` is seconds since the epoch. Without `fsync` a crash of the machine (not of
        the router) may lose snapshots; it never brings back a wrong one.
        """
        self._places = tuple(dict.fromkeys(places))
        self._on_lost = on_lost
        self._wall_now = wall_now
        self._fsync = fsync
        self._directories: dict[Place, _Directory] = {}
        self._held: dict[SnapshotId, _Held] = {}
        self._staged: dict[tuple[Place, str], Identity] = {}
        self._opened: set[tuple[Place, str]] = set()
        self._background = Tasks()
        self._quick = ThreadPoolExecutor(2, "kv-quick")  # stat, rename, head
        self._bulk = ThreadPoolExecutor(2, "kv-bulk")  # fsync, checksum, copy

    async def load(self) -> list[Snapshot]:
        """Lock and read the directories; what is left after a cross-check, oldest first.

        Raises KvError if a directory cannot be used; none is locked then.
        """
        try:
            for place in self._places:
                await self._run(self._bulk, self._open_directory, place)
            entries = [
                (directory, entry)
                for directory in self._distinct()
                for entry in directory.manifest.entries.values()
            ]
            entries.sort(key=lambda pair: pair[1].added_at)
            checks = [self._run(self._bulk, self._recover, *pair) for pair in entries]
            found = [held for held in await asyncio.gather(*checks) if held is not None]
            for directory in self._distinct():
                await self._run(self._bulk, self._sweep, directory)
        except KvError:
            await self.aclose()
            raise
        self._held = {held.snapshot.id: held for held in found}
        return [held.snapshot for held in found]

    async def flush(self) -> None:
        """Wait until everything committed so far is durable, or reported lost."""
        await self._background.join()

    async def aclose(self) -> None:
        """Finish the background work, remove what `open` made, let go of the directories."""
        await self.flush()
        for place, name in tuple(self._opened):
            with suppress(KvError):
                await self._unlink(place, name)
        self._opened.clear()
        for directory in self._distinct():
            await self._run(self._bulk, directory.manifest.close)
            directory.lock.release()
        self._directories.clear()
        self._held.clear()
        for pool in (self._quick, self._bulk):
            pool.shutdown(wait=False)

    def staging_name(self) -> str:
        """A fresh name to let a backend write to."""
        return kv_files.staging_name()

    async def verify(self, place: Place, name: str, size_bytes: int) -> StagedFile:
        """Check what a backend wrote: its size as reported, and every section of it.

        Raises KvFileError, and the file is removed then.
        """
        path = self._staging_path(place, name)
        try:
            found, head = await self._run(self._quick, kv_files.inspect, path, size_bytes)
        except KvError as error:
            with suppress(KvError):
                await self.discard(place, name)
            raise KvFileError(str(error)) from error
        self._staged[place, name] = found
        return StagedFile(place, name, head.tokens, size_bytes)

    async def commit(self, staged: StagedFile, namespace: Namespace) -> Snapshot:
        """Give a verified file its final name. Usable at once; durable after `flush`.

        `staged.tokens` may have been replaced by tokens in which media is one negative id each.
        Raises KvFileError if the file was not verified or has changed since.
        """
        known = self._staged.pop((staged.place, staged.name), None)
        path = self._staging_path(staged.place, staged.name)
        if known is None:
            raise KvFileError(f"{staged.name} was not verified")
        directory = self._directory(staged.place)
        number = SnapshotId(path.stem.removeprefix("kvf-"))
        snapshot = Snapshot(number, namespace, staged.place, staged.tokens, staged.size_bytes)
        held = _Held(snapshot, directory, known)
        await self._finish(self._quick, partial(_rename, path, held), held.unlink)
        self._held[number] = held
        self._background.spawn(self._make_durable(held), name=f"kv_durable {number}")
        return snapshot

    async def discard(self, place: Place, name: str) -> None:
        """Remove a staged file that is not wanted; it need not exist."""
        self._staged.pop((place, name), None)
        self._staging_path(place, name)
        await self._unlink(place, name)

    async def open(self, snapshot: Snapshot, place: Place) -> str:
        """A name under which a backend of `place` can read the snapshot, checked unchanged.

        Raises KvFileError if the file is not what was committed. The name is the caller's until
        `close`; in another directory it is a link or a copy, made here.
        """
        held = self._held.get(snapshot.id)
        if held is None:
            raise KvFileError(f"snapshot {snapshot.id} does not exist")
        target_directory = self._directory(place)
        found = await self._run(self._quick, kv_files.identity, held.path, error=KvFileError)
        if found != held.identity:
            await self._run(self._bulk, _check_again, held, error=KvFileError)
        if target_directory is held.directory:
            return held.path.name
        target = target_directory.path / kv_files.staging_name()
        undo = partial(target.unlink, missing_ok=True)
        if not await self._finish(self._quick, partial(kv_files.link, held.path, target), undo):
            copy = partial(kv_files.copy, held.path, target, held.identity)
            await self._finish(self._bulk, copy, undo)
        self._opened.add((place, target.name))
        return target.name

    async def close(self, snapshot: Snapshot, place: Place, name: str) -> None:
        """Give back what `open` returned."""
        if (place, name) in self._opened:
            self._opened.discard((place, name))
            await self._unlink(place, name)

    async def delete(self, snapshot: Snapshot) -> None:
        """Remove a snapshot: from the manifest first, then the file. Idempotent."""
        held = self._held.pop(snapshot.id, None)
        if held is not None:
            held.gone = True
            await self._run(self._bulk, _take_out, held, held.unlink)

    async def quarantine(self, snapshot: Snapshot, reason: str) -> None:
        """Take a snapshot that misbehaved out of the manifest; keep its file for the operator."""
        held = self._held.pop(snapshot.id, None)
        if held is not None:
            held.gone = True
            log.warning("snapshot_quarantined", snapshot=snapshot.id, reason=reason)
            await self._run(self._bulk, _take_out, held, partial(kv_files.quarantine, held.path))

    def _distinct(self) -> list[_Directory]:
        return list({id(d): d for d in self._directories.values()}.values())

    def _directory(self, place: Place) -> _Directory:
        try:
            return self._directories[place]
        except KeyError:
            raise KvError(f"{place} is not a place of this store") from None

    def _staging_path(self, place: Place, name: str) -> Path:
        if not kv_files.STAGING.fullmatch(name):
            raise KvError(f"{name!r} is not a staging name")
        return self._directory(place).path / name

    async def _unlink(self, place: Place, name: str) -> None:
        path = self._directory(place).path / name
        await self._run(self._quick, partial(path.unlink, missing_ok=True))

    async def _run(
        self, pool: Executor, function: Callable[..., T], *args: Any, error: type[KvError] = KvError
    ) -> T:
        with os_errors("kv store", error):
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)

    async def _finish(
        self, pool: Executor, function: Callable[[], T], undo: Callable[[], None]
    ) -> T:
        """As `_run`; if the caller is cancelled meanwhile, the effect is undone in the background.

        A thread cannot be cancelled: without this the file that it makes belongs to nobody.
        """
        with os_errors("kv store", KvFileError):
            future = asyncio.get_running_loop().run_in_executor(pool, function)
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                self._background.spawn(self._undo(future, undo), name="kv_undo")
                raise

    async def _undo(self, future: asyncio.Future[T], undo: Callable[[], None]) -> None:
        with suppress(KvError, OSError):
            await future
        with suppress(KvError):
            await self._run(self._quick, undo)

    def _open_directory(self, place: Place) -> None:
        path = Path(place)
        with os_errors(f"{place} cannot be used for state files"):
            kv_files.prepare_directory(path)
            for other in self._distinct():
                if path.samefile(other.path):  # one directory under two names
                    self._directories[place] = other
                    return
        directory = _Directory(path, place, DirectoryLock(path), Manifest(path, fsync=self._fsync))
        directory.lock.acquire()
        self._directories[place] = directory
        directory.manifest.open()

    def _recover(self, directory: _Directory, entry: Entry) -> _Held | None:
        """Cross-check a record with its file; None if it is not to be offered."""
        path = directory.path / f"kvf-{entry.id}.kv"
        if entry.file != path.name or not kv_files.FINAL.fullmatch(entry.file):
            _drop(directory, entry.id)
            return None
        try:
            with kv_files.open_regular(path) as file:
                head = read_head(file)
                found = kv_files.identity_of(file)
                if found.size_bytes != entry.size_bytes:
                    raise KvFileError(f"{found.size_bytes} bytes, recorded {entry.size_bytes}")
                if head.n_tokens != entry.n_tokens:
                    raise KvFileError(f"{head.n_tokens} tokens, recorded {entry.n_tokens}")
                if found != Identity(entry.size_bytes, entry.mtime_ns, entry.inode):
                    # A directory that was copied or restored from a backup.
                    if kv_files.checksum(file) != entry.checksum:
                        raise KvFileError("another checksum than recorded")
                    _refresh(directory, entry.id, found)
        except (KvFileError, OSError) as error:
            log.warning("snapshot_not_recovered", snapshot=entry.id, reason=str(error))
            _drop(directory, entry.id)
            kv_files.quarantine(path)
            return None
        tokens = collapse_media(head, entry.media)
        if tokens is None:  # committed without fingerprints: matches nothing, and ages out
            tokens = head.tokens
        snapshot = Snapshot(entry.id, entry.namespace, directory.place, tokens, entry.size_bytes)
        return _Held(snapshot, directory, found, entry.checksum)

    def _sweep(self, directory: _Directory) -> None:
        known = frozenset(entry.file for entry in directory.manifest.entries.values())
        if removed := kv_files.sweep(directory.path, known):
            log.info("leftovers_removed", place=directory.place, files=removed)

    async def _make_durable(self, held: _Held) -> None:
        try:
            await self._run(self._bulk, self._record, held)
        except KvError as error:
            if held.gone:
                return  # deleted meanwhile, and its file with it
            held.gone = True
            self._held.pop(held.snapshot.id, None)
            with suppress(KvError):
                await self._run(self._bulk, _take_out, held, held.unlink)
            log.warning("snapshot_lost", snapshot=held.snapshot.id, reason=str(error))
            self._on_lost(held.snapshot, str(error))

    def _record(self, held: _Held) -> None:
        """Order matters: data, then name, then directory; only then the record."""
        with kv_files.open_regular(held.path) as file:
            if self._fsync:
                os.fsync(file.fileno())
                sync_directory(held.directory.path)
            checksum = kv_files.checksum(file)
            head = read_head(file)
            if kv_files.identity_of(file) != held.identity:
                raise KvFileError(f"{held.path.name} changed after it was committed")
        snapshot = held.snapshot
        media = tuple(i for i in tok.iterate(snapshot.tokens) if i < 0)
        entry = Entry(
            id=snapshot.id,
            namespace=snapshot.namespace,
            file=held.path.name,
            n_tokens=head.n_tokens,
            size_bytes=snapshot.size_bytes,
            mtime_ns=held.identity.mtime_ns,
            inode=held.identity.inode,
            checksum=checksum,
            added_at=self._wall_now(),
            media=media if len(media) == len(head.media_starts) else (),
        )
        with held.lock:
            if not held.gone:
                held.checksum = checksum
                held.directory.manifest.add(entry)


def _check_again(held: _Held) -> None:
    """The file was touched or replaced since the commit: only the same bytes will do."""
    with kv_files.open_regular(held.path) as file:
        found = kv_files.identity_of(file)
        same = found.size_bytes == held.identity.size_bytes
        if not same or not held.checksum or kv_files.checksum(file) != held.checksum:
            raise KvFileError(f"{held.path.name} changed after it was committed")
    with held.lock:
        held.identity = found
        if not held.gone:
            _refresh(held.directory, held.snapshot.id, found)


def _refresh(directory: _Directory, snapshot: SnapshotId, found: Identity) -> None:
    """Record how the same bytes are to be recognised from now on; only saves a checksum later."""
    entry = directory.manifest.entries[snapshot]
    with suppress(KvError):
        directory.manifest.add(replace(entry, mtime_ns=found.mtime_ns, inode=found.inode))


def _drop(directory: _Directory, snapshot: SnapshotId) -> None:
    """Take a record out, or not: one without a file is dropped at the next start, and a full
    disk must not be kept full by a drop that cannot be written."""
    try:
        directory.manifest.drop(snapshot)
    except KvError as error:
        log.warning("drop_not_recorded", snapshot=snapshot, error=str(error))


def _rename(staged: Path, held: _Held) -> None:
    if kv_files.identity(staged) != held.identity:
        raise KvFileError(f"{staged.name} changed after it was verified")
    staged.rename(held.path)


def _take_out(held: _Held, remove: Callable[[], None]) -> None:
    """The record first, then the file."""
    with held.lock:
        _drop(held.directory, held.snapshot.id)
    remove()
