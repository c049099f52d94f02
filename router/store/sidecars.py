"""Sidecars: the record `kvf-ID.json` beside each state file, and the lock on the directory.

A snapshot exists when its sidecar does. A sidecar is written by rename, so it is there whole or not
at all. It ends with a checksum: a flipped bit could name another model, or a version that stops the
start. Records without a checksum are older.

Knows nothing of state files: `records.py` checks whether a record still agrees with its file.
Everything here blocks: call it in a thread.
"""

import fcntl
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import structlog
import xxhash

from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import KvError, KvFileError
from router.base.types import Namespace, SnapshotId
from router.store import files

log = structlog.get_logger(__name__)

LOCK = "kvferry.lock"
FORMAT_VERSION = 1

_SUM = re.compile(rb',"sum":"[^"]*"\}\Z')
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def os_errors(what: str, error: type[KvError] = KvError) -> Iterator[None]:
    """Turn an OSError inside into `error`, the only kind that callers of the store see."""
    try:
        yield
    except OSError as exc:
        raise error(f"{what}: {exc.strerror or exc}") from exc


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one committed file.

    `mtime_ns` and `inode` show cheaply that a file is still the same one; `checksum` (xxh3_128,
    hex) proves it. `media` holds the fingerprints that stand for media in the tokens: the only part
    of the tokens that is not in the file. `added_at` is wall time in seconds. The last three are
    the file's shape (router.base.types.StateShape).
    """

    version: int = FORMAT_VERSION
    id: SnapshotId
    namespace: Namespace
    n_tokens: int
    size_bytes: int
    mtime_ns: int
    inode: int
    checksum: str
    added_at: float
    media: tuple[int, ...] = ()
    n_stream: int = 1
    checkpoints: tuple[int, ...] = ()
    extendable: bool = True


class _Version(msgspec.Struct):
    version: int


_version_of = json_decoder(_Version)
_record_of = json_decoder(SnapshotRecord)


class DirectoryLock:
    """A lock for one router per directory; the kernel releases it when the process ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock. Raises KvError if another router or store of this process holds it."""
        with os_errors(f"{self._directory}: cannot open the lock file"):
            fd = os.open(self._directory / LOCK, _OPEN, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            if isinstance(exc, BlockingIOError):
                raise KvError(f"{self._directory} is in use by another kvferry") from exc
            raise KvError(f"{self._directory}: cannot lock: {exc.strerror}") from exc
        self._fd = fd

    def check(self) -> None:
        """Raise KvFileError if the lock that is held is not the file in the directory.

        Another directory has then taken the place of the opened one: a file system was unmounted,
        say. Raises OSError.
        """
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._directory / LOCK), os.fstat(self._fd)):
                return
        raise KvFileError(f"{self._directory} is not the directory that was opened")

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Sidecars:
    """The records of one directory. Thread-safe.

    A lost removal is harmless (its missing file is noticed); a lost record costs one snapshot.
    """

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self._directory = directory
        self._fsync = fsync
        self._lock = threading.Lock()  # guards `_records`
        self._records: dict[SnapshotId, SnapshotRecord] = {}
        self._closed = False
        self.names: list[str] = []  # of the records that were there at the opening

    @property
    def records(self) -> dict[SnapshotId, SnapshotRecord]:
        """Return a copy of the records that were read or added."""
        with self._lock:
            return dict(self._records)

    def get(self, snapshot: SnapshotId) -> SnapshotRecord | None:
        """Return one record, or None, without the copy of all that `records` makes."""
        with self._lock:
            return self._records.get(snapshot)

    def open(self) -> None:
        """List the records as `names`; `read` reads them. Raises KvError."""
        with os_errors(f"{self._directory}: cannot read the records"):
            found = os.listdir(self._directory)
        self.names = [name for name in found if files.SIDECAR.fullmatch(name)]

    def read(self, names: Iterable[str]) -> list[SnapshotRecord]:
        """Read the named records, and return them. Raises KvError, also for a later version.

        A damaged record is logged and left out. Ten thousand take minutes on a slow mount: read a
        few at a time.
        """
        found = [record for name in names if (record := self._read(name)) is not None]
        with self._lock:
            self._records |= {record.id: record for record in found}
        return found

    def add(self, record: SnapshotRecord) -> None:
        """Write a record durably, in place of an older one. Raises KvError.

        The state file's name becomes durable with it. An error of the last step, the sync of the
        directory, leaves the new record on the disk; after any other the record is as before.
        """
        path = self._directory / files.sidecar_name(record.id)
        new = self._directory / files.new_sidecar_name(record.id)
        if self._closed:
            raise KvError(f"{self._directory}: the store is closed")
        with os_errors(f"{self._directory}: cannot write the record of a snapshot"):
            put_durably(path, new, _summed(msgspec.json.encode(record)), fsync=self._fsync)
        with self._lock:
            self._records.pop(record.id, None)
            self._records[record.id] = record

    def drop(self, snapshot: SnapshotId) -> None:
        """Remove the record of a file, if there is one. Raises KvError.

        Not synced: if the removal gets lost, the file is missing, which is noticed too.
        """
        with self._lock:
            self._records.pop(snapshot, None)
        path = self._directory / files.sidecar_name(snapshot)
        with os_errors(f"{path}: cannot be removed"), suppress(FileNotFoundError):
            os.unlink(path)

    def close(self) -> None:
        """Refuse further records."""
        self._closed = True

    def _read(self, name: str) -> SnapshotRecord | None:
        try:
            path = self._directory / name
            with os_errors(str(path)), files.open_regular(path) as file:
                raw = file.read()
        except KvFileError as error:
            log.warning("record_damaged", kv_dir=str(self._directory), file=name, error=str(error))
            return None
        try:
            raw = _checked(raw)
            # By itself: a later version may have other fields, and is not damaged.
            version = _version_of(raw).version
            if version != FORMAT_VERSION:
                raise KvError(f"{self._directory}: unknown version {version} of {name}")
            record = _record_of(raw)
        except UndecodableError as error:
            log.warning("record_damaged", kv_dir=str(self._directory), file=name, error=str(error))
            return None
        if files.sidecar_name(record.id) != name:
            log.warning("record_damaged", kv_dir=str(self._directory), file=name, error="its id")
            return None
        return record


def _summed(record: bytes) -> bytes:
    """Return a record, a JSON object, with the checksum of its bytes as the last field."""
    return b'%b,"sum":"%b"}' % (record[:-1], xxhash.xxh3_128_hexdigest(record).encode())


def _checked(raw: bytes) -> bytes:
    """Return a record without its checksum. Raises UndecodableError if that is another one."""
    found = _SUM.search(raw)
    if found is None:
        return raw
    record = raw[: found.start()] + b"}"
    if raw != _summed(record):
        raise UndecodableError("its checksum is another one")
    return record


def put_durably(path: Path, new: Path, content: bytes, *, fsync: bool) -> None:
    """Write a small file as `new` and rename it to `path`; with `fsync`, both are durable.

    Raises OSError; no `new` is left then.
    """
    try:
        files.write_new(new, content, fsync=fsync)
        os.rename(new, path)
    except OSError:
        with suppress(OSError):
            os.unlink(new)
        raise
    if fsync:
        sync_directory(path.parent)


def make_directory(directory: Path, *, fsync: bool) -> None:
    """Make a private directory below an existing one, if it is missing. Raises OSError."""
    if not directory.exists():
        directory.mkdir(mode=0o700, exist_ok=True)
        if fsync:
            sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
