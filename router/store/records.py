"""Snapshots that are whole files, and their manifests, kept in agreement.

The blocking half of `store.py`. The order of writes makes a crash harmless: data, then name, then
manifest; the directory is synced after both names. A deletion removes the manifest before the file.
"""

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.types import KvDir, Snapshot, SnapshotId
from router.store import files, manifests
from router.store.files import DirectoryLock, Identity, os_errors
from router.store.format.head import read_head
from router.store.io_pool import Threads
from router.store.manifests import Manifest, WholeFile
from router.store.places.directory import Directory

if TYPE_CHECKING:
    from router.store.blobs.split_snapshots import SplitSnapshots

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class KvDirectory:
    """A KV directory, or one of blobs, that this process has locked."""

    place: Directory
    kv_dir: KvDir
    lock: DirectoryLock
    threads: Threads
    status: os.stat_result  # from the opening: a later stat could hang
    fsync: bool = True
    disk_bytes: int = 0  # of its file system
    on_disk: bool = True  # and not in memory
    names: list[str] = field(default_factory=list)  # of the manifests at the opening
    unread: set[SnapshotId] = field(default_factory=set)  # which could not be opened
    closed: bool = False  # no more is recorded
    split: "SplitSnapshots | None" = None  # what has its snapshots as blobs

    @property
    def path(self) -> Path:
        return self.place.root


@dataclass(slots=True)
class StoredSnapshot:
    """A snapshot on disk. `checksum` is empty until the background work has computed it."""

    snapshot: Snapshot
    directory: KvDirectory
    identity: Identity
    checksum: str = ""
    gone: bool = False  # deleted or lost: its manifest may not be written any more
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards `gone`, `write`

    @property
    def path(self) -> Path:
        return self.directory.path / files.final_name(self.snapshot.id)

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)


@dataclass(slots=True)
class StateFile:
    """A state file that can be read; `made`: from blobs, for this reader, who may keep it."""

    directory: KvDirectory
    path: Path
    identity: Identity
    made: bool = False
    keep: bool = False


def open_directory(
    kv_dir: KvDir,
    others: Iterable[KvDirectory],
    threads: Threads,
    *,
    fsync: bool,
    group_access: bool,
) -> KvDirectory:
    """Lock a directory and list its manifests. Raises KvError.

    Return the one of `others` that is the same directory, if there is one.
    """
    path = Path(kv_dir)
    with os_errors(f"{kv_dir} cannot be used for state files"):
        files.prepare_directory(path, group_access=group_access)
        status = path.stat()
        disk, on_disk = os.statvfs(path), files.is_on_disk(status.st_dev)
        for other in others:
            if os.path.samestat(status, other.status):  # one directory under two names
                return other
    size, lock = disk.f_blocks * disk.f_frsize, DirectoryLock(path)
    place = Directory(path, fsync=fsync)
    directory = KvDirectory(place, kv_dir, lock, threads, status, fsync, size, on_disk)
    lock.acquire()
    try:
        with os_errors(f"{path}: cannot read the manifests"):
            directory.names = [n for n in os.listdir(path) if files.MANIFEST.fullmatch(n)]
    except BaseException:
        close_directory(directory)
        raise
    return directory


def close_directory(directory: KvDirectory) -> None:
    """Refuse further manifests and release the lock."""
    directory.closed = True
    directory.lock.release()


def recover_all(directory: KvDirectory, names: Iterable[str]) -> list[StoredSnapshot]:
    """Read the named manifests; return the snapshots that may be offered.

    Raises KvError, also for a manifest of a later version.
    """
    found = (_recover(directory, name) for name in names)
    return [held for held in found if held is not None]


def _recover(directory: KvDirectory, name: str) -> StoredSnapshot | None:
    """Cross-check a manifest with its file; return None if it may not be offered."""
    try:
        manifest = manifests.read(directory.place, name)
    except KvFileError as error:
        log.warning("manifest_damaged", kv_dir=directory.kv_dir, file=name, error=str(error))
        return None
    file_path, whole = directory.path / files.final_name(manifest.id), manifest.file
    try:
        if whole is None:
            raise KvFileError("its manifest is one of blobs")
        with files.open_regular(file_path) as file:
            found = files.identity_of(file)
            if file.read(len(manifest.head)) != manifest.head:  # zeros, after a loss of power
                raise KvFileError("the file has another head than its manifest")
            if found != whole.identity:
                # The directory was copied or restored from a backup.
                if found.size_bytes != whole.size_bytes or files.checksum(file) != whole.checksum:
                    raise KvFileError("the file is not the one that was saved")
                _refresh(directory, manifest, found)
    except (KvFileError, OSError) as error:
        log.warning("snapshot_not_recovered", snapshot=manifest.id, reason=str(error))
        if isinstance(error, OSError) and error.errno not in (errno.ENOENT, errno.EIO):
            directory.unread.add(manifest.id)  # it may be sound: the next start reads it
        else:
            drop(directory, manifest.id)
        return None
    return StoredSnapshot(manifest.snapshot(directory.kv_dir), directory, found, whole.checksum)


def sweep(directory: KvDirectory, held: Iterable[SnapshotId]) -> None:
    """Remove the router's own files that no manifest names."""
    sound = {*held, *directory.unread}
    known = {name for each in sound for name in (files.final_name(each), files.manifest_name(each))}
    if removed := files.sweep(directory.path, frozenset(known)):
        old = any(map(files.OLD_RECORD.fullmatch, removed))
        why = "states of kvferry 0.1.0, which cannot be read" if old else "no manifest names them"
        log.info("leftovers_removed", kv_dir=directory.kv_dir, files=len(removed), why=why)


def record(held: StoredSnapshot) -> None:
    """Make a committed file durable, and its manifest after it."""
    directory = held.directory
    with files.open_regular(held.path) as file:
        if directory.fsync:
            os.fsync(file.fileno())
        end = read_head(file).end
        file.seek(0)
        head, checksum = file.read(end), files.checksum(file)
        if files.identity_of(file) != held.identity:
            raise KvFileError(f"{held.path.name} changed after it was committed")
    manifest = manifests.of_file(held.snapshot, head, _whole(held.identity, checksum))
    with held.lock:
        if not held.gone:
            held.checksum = checksum
            write(directory, manifest)


def write(directory: KvDirectory, manifest: Manifest) -> None:
    """Write a manifest durably, in place of an older one. Raises KvError.

    The state file's name becomes durable with it.
    """
    if directory.closed:
        raise KvError(f"{directory.kv_dir}: the store is closed")
    manifests.write(directory.place, manifest)


def _whole(identity: Identity, checksum: str) -> WholeFile:
    return WholeFile(identity.size_bytes, identity.mtime_ns, identity.inode, checksum)


def _refresh(directory: KvDirectory, manifest: Manifest, found: Identity) -> None:
    """Note the new identity of a file with the same bytes; only log a failure."""
    assert manifest.file is not None
    try:
        write(directory, replace(manifest, file=_whole(found, manifest.file.checksum)))
    except KvError as error:
        log.warning("identity_not_recorded", snapshot=manifest.id, reason=str(error))


def check_again(held: StoredSnapshot) -> None:
    """Check a file that was touched or replaced since the commit.

    Raises KvFileError unless its bytes are the same.
    """
    with files.open_regular(held.path) as file:
        found = files.identity_of(file)
        same = found.size_bytes == held.identity.size_bytes
        if not same or not held.checksum or files.checksum(file) != held.checksum:
            raise KvFileError(f"{held.path.name} changed after it was committed")
    with held.lock:
        held.identity = found
        with suppress(KvFileError):  # None is written yet, or cannot be
            name = files.manifest_name(held.snapshot.id)
            manifest = manifests.read(held.directory.place, name)
            if manifest.file is not None and manifest.file.identity != found and not held.gone:
                _refresh(held.directory, manifest, found)


def rename(staged: Path, held: StoredSnapshot, mode: int) -> None:
    """Give a staged file its mode and its final name, if it is still the one that was verified.

    Raises KvFileError if it is not, or if another directory has replaced the opened one.
    """
    held.directory.lock.check()
    if files.identity(staged) != held.identity:
        raise KvFileError(f"{staged.name} changed after it was verified")
    files.set_mode(staged, mode)
    staged.rename(held.path)


def take_out(held: StoredSnapshot) -> None:
    """Drop the manifest first, then delete the file."""
    with held.lock:
        drop(held.directory, held.snapshot.id)
    held.unlink()


def drop(directory: KvDirectory, snapshot: SnapshotId) -> None:
    """Remove a manifest, if there is one; only log a failure.

    Not synced: the next start drops a manifest without a file. A drop that cannot be written must
    not keep a full disk full.
    """
    try:
        directory.place.delete([files.manifest_name(snapshot)])
    except KvError as error:
        log.warning("drop_not_recorded", snapshot=snapshot, error=str(error))
