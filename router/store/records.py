"""Snapshots on disk: each file and its record, kept in agreement.

The blocking half of `store.py`. The order of writes makes a crash harmless: data, then name, then
record; the directory is synced after both names. A deletion removes the record before the file.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from msgspec.structs import replace

from router.base import tokens as tok
from router.base.errors import KvError, KvFileError
from router.base.types import KvDir, Snapshot, SnapshotId, StateShape
from router.store import files
from router.store.files import Identity
from router.store.format.head import read_head, tokens_of
from router.store.io_pool import Threads
from router.store.sidecars import DirectoryLock, Sidecars, SnapshotRecord, os_errors

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class KvDirectory:
    """A KV directory that this process has locked."""

    path: Path
    kv_dir: KvDir
    lock: DirectoryLock
    sidecars: Sidecars
    threads: Threads
    status: os.stat_result  # from the opening: a later stat could hang
    disk_bytes: int = 0  # of its file system


@dataclass(slots=True)
class StoredSnapshot:
    """A snapshot on disk. `checksum` is empty until the background work has computed it."""

    snapshot: Snapshot
    directory: KvDirectory
    identity: Identity
    checksum: str = ""
    gone: bool = False  # deleted, quarantined or lost: its record may not be written any more
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards `gone`, `sidecars.add`

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
    """Lock a directory and list its records. Raises KvError.

    Return the one of `others` that is the same directory, if there is one.
    """
    path = Path(kv_dir)
    with os_errors(f"{kv_dir} cannot be used for state files"):
        files.prepare_directory(path, group_access=group_access)
        status = path.stat()
        disk = os.statvfs(path)
        for other in others:
            if os.path.samestat(status, other.status):  # one directory under two names
                return other
    sidecars = Sidecars(path, fsync=fsync)
    directory = KvDirectory(
        path, kv_dir, DirectoryLock(path), sidecars, threads, status, disk.f_blocks * disk.f_frsize
    )
    directory.lock.acquire()
    try:
        directory.sidecars.open()
    except BaseException:
        close_directory(directory)
        raise
    return directory


def close_directory(directory: KvDirectory) -> None:
    """Refuse further records and release the lock."""
    directory.sidecars.close()
    directory.lock.release()


def recover_all(directory: KvDirectory, names: Iterable[str]) -> list[StoredSnapshot]:
    """Read the named records; return the snapshots that may be offered. Raises KvError."""
    found = (recover(directory, each) for each in directory.sidecars.read(names))
    return [held for held in found if held is not None]


def recover(directory: KvDirectory, entry: SnapshotRecord) -> StoredSnapshot | None:
    """Cross-check a record with its file; return None if it may not be offered."""
    path = directory.path / files.final_name(entry.id)
    try:
        with files.open_regular(path) as file:
            head = read_head(file)
            found = files.identity_of(file)
            if found.size_bytes != entry.size_bytes:
                raise KvFileError(f"file of {found.size_bytes} bytes, record of {entry.size_bytes}")
            if head.n_tokens != entry.n_tokens:
                raise KvFileError(f"file of {head.n_tokens} tokens, record of {entry.n_tokens}")
            if found != Identity(entry.size_bytes, entry.mtime_ns, entry.inode):
                # The directory was copied or restored from a backup.
                if files.checksum(file) != entry.checksum:
                    raise KvFileError("the checksum of the file is not the recorded one")
                _refresh(directory, entry, found)
    except (KvFileError, OSError) as error:
        log.warning("snapshot_not_recovered", snapshot=entry.id, reason=str(error))
        drop(directory, entry.id)
        with suppress(OSError):  # the router starts nevertheless
            files.quarantine(path)
        return None
    snapshot = Snapshot(
        entry.id,
        entry.namespace,
        directory.kv_dir,
        tokens_of(head, entry.media),
        entry.size_bytes,
        StateShape(
            entry.n_stream, entry.checkpoints, entry.extendable, media=bool(head.media_starts)
        ),
        entry.added_at,
    )
    return StoredSnapshot(snapshot, directory, found, entry.checksum)


def sweep(directory: KvDirectory) -> None:
    """Remove the router's own files that no record names."""
    ids = directory.sidecars.records
    known = {files.final_name(each) for each in ids} | {files.sidecar_name(each) for each in ids}
    if removed := files.sweep(directory.path, frozenset(known)):
        log.info("leftovers_removed", kv_dir=directory.kv_dir, files=removed)


def record(held: StoredSnapshot, *, fsync: bool) -> None:
    """Make a committed file durable, and its record after it."""
    with files.open_regular(held.path) as file:
        if fsync:
            os.fsync(file.fileno())
        checksum = files.checksum(file)
        head = read_head(file)
        if files.identity_of(file) != held.identity:
            raise KvFileError(f"{held.path.name} changed after it was committed")
    snapshot = held.snapshot
    media = tok.media_of(snapshot.tokens)
    entry = SnapshotRecord(
        id=snapshot.id,
        namespace=snapshot.namespace,
        n_tokens=head.n_tokens,
        size_bytes=snapshot.size_bytes,
        mtime_ns=held.identity.mtime_ns,
        inode=held.identity.inode,
        checksum=checksum,
        added_at=snapshot.saved_at,
        media=media if len(media) == len(head.media_starts) else (),
        n_stream=snapshot.shape.n_stream,
        checkpoints=snapshot.shape.checkpoints,
        extendable=snapshot.shape.extendable,
    )
    with held.lock:
        if not held.gone:
            held.checksum = checksum
            held.directory.sidecars.add(entry)


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
        entry = held.directory.sidecars.get(held.snapshot.id)
        changed = entry is not None and found != Identity(
            entry.size_bytes, entry.mtime_ns, entry.inode
        )
        if entry is not None and changed and not held.gone:  # None: it cannot be written
            _refresh(held.directory, entry, found)


def rename(staged: Path, held: StoredSnapshot, mode: int) -> None:
    """Give a staged file its mode and its final name, if it is still the one that was verified.

    Raises KvFileError if it is not, or if another directory has replaced the opened one.
    """
    held.directory.lock.check()
    if files.identity(staged) != held.identity:
        raise KvFileError(f"{staged.name} changed after it was verified")
    files.set_mode(staged, mode)
    staged.rename(held.path)


def take_out(held: StoredSnapshot, remove: Callable[[], None]) -> None:
    """Drop the record first, then call `remove` for the file."""
    with held.lock:
        drop(held.directory, held.snapshot.id)
    remove()


def drop(directory: KvDirectory, snapshot: SnapshotId) -> None:
    """Drop a record; only log a failure.

    The next start drops a record without a file. A drop that cannot be written must not keep a
    full disk full.
    """
    try:
        directory.sidecars.drop(snapshot)
    except KvError as error:
        log.warning("drop_not_recorded", snapshot=snapshot, error=str(error))


def _refresh(directory: KvDirectory, entry: SnapshotRecord, found: Identity) -> None:
    """Record the new identity of the same bytes; this only saves a checksum later."""
    with suppress(KvError):
        directory.sidecars.add(replace(entry, mtime_ns=found.mtime_ns, inode=found.inode))
