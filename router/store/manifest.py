"""The manifest of a directory, which lists its state files, and the lock on the directory.

Owns `kvferry.manifest` and `kvferry.lock`. Knows nothing of state files: `records.py` checks
whether an entry still agrees with its file. Everything here blocks: call it in a thread.
"""

import fcntl
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import orjson
import structlog

from router.base.errors import KvError
from router.base.types import Namespace, SnapshotId

log = structlog.get_logger(__name__)

MANIFEST = "kvferry.manifest"
NEW_MANIFEST = "kvferry.manifest.new"
LOCK = "kvferry.lock"
FORMAT_VERSION = 1

# Below this many drops a compaction (two fsyncs) costs more than the lines that it saves (about
# 300 bytes each).
MIN_DROPS = 64

_HEADER = {"format": "kvferry.manifest", "version": FORMAT_VERSION}
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


@contextmanager
def os_errors(what: str, error: type[KvError] = KvError) -> Iterator[None]:
    """Turn an OSError inside into `error`, the only kind that callers of the store see."""
    try:
        yield
    except OSError as exc:
        raise error(f"{what}: {exc.strerror or exc}") from exc


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The record of one committed file.

    `mtime_ns` and `inode` show cheaply that a file is still the same one; `checksum` (xxh3_128,
    hex) proves it. `media` holds the fingerprints that stand for media in the tokens: the only part
    of the tokens that is not in the file. `added_at` is wall time in seconds. The last three are
    the file's shape (router.base.types.StateShape).
    """

    id: SnapshotId
    namespace: Namespace
    file: str
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


_NAMES = frozenset(field.name for field in fields(ManifestEntry))
# For records of older routers, which have no shape.
_SHAPE: dict[str, Any] = {"n_stream": 1, "checkpoints": [], "extendable": True}
_STRINGS = ("id", "namespace", "file", "checksum")
_INTS = ("n_tokens", "size_bytes", "mtime_ns", "inode", "n_stream")
_INT_LISTS = ("media", "checkpoints")


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

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Manifest:
    """An append-only file of one record per line, `crc32-of-json json`. Thread-safe.

    A record counts from its newline on. A torn last line is cut off; a damaged line is skipped and
    counted. A lost drop is harmless (its missing file is noticed); a lost add costs one snapshot.
    """

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self._directory = directory
        self._fsync = fsync
        self._lock = threading.Lock()
        self._entries: dict[SnapshotId, ManifestEntry] = {}
        self._fd = -1
        # Device and inode of the manifest; during a compaction, of the old and the new file.
        self._ours: frozenset[tuple[int, int]] = frozenset()
        self._end = 0  # bytes of whole lines
        self._torn = False  # whether bytes behind `_end` are no record
        self._drops = 0
        self.corrupt = 0

    @property
    def entries(self) -> dict[SnapshotId, ManifestEntry]:
        """Return a copy of the live records, oldest first."""
        with self._lock:
            return dict(self._entries)

    def get(self, snapshot: SnapshotId) -> ManifestEntry | None:
        """Return one live record, or None, without the copy of all that `entries` makes."""
        with self._lock:
            return self._entries.get(snapshot)

    def open(self) -> None:
        """Replay the manifest, or begin a new one. Raises KvError, also for a later version."""
        with self._lock, os_errors(f"{self._directory}: cannot open the manifest"):
            # Left behind by a compaction that did not reach its rename.
            with suppress(FileNotFoundError):
                os.unlink(self._directory / NEW_MANIFEST)
            self._fd = os.open(self._directory / MANIFEST, _OPEN, 0o600)
            self._ours = frozenset({_which(os.fstat(self._fd))})
            self._replay()
            if self._end == 0:
                self._append(_line(_HEADER), sync=self._fsync)
                self._sync_directory()
            elif self.corrupt:
                log.warning("manifest_damaged", kv_dir=str(self._directory), lines=self.corrupt)
                self._compact()

    def add(self, entry: ManifestEntry) -> None:
        """Record a file durably. Raises KvError and leaves the manifest as it was before."""
        with self._lock, os_errors(f"{self._directory}: cannot write the manifest"):
            self._append(_line({"op": "add"} | asdict(entry)), sync=self._fsync)
            self._entries.pop(entry.id, None)
            self._entries[entry.id] = entry

    def drop(self, snapshot: SnapshotId) -> None:
        """Drop the record of a file, if there is one.

        Not synced: if the drop gets lost, the file is missing, which is noticed too.
        """
        with self._lock, os_errors(f"{self._directory}: cannot write the manifest"):
            if snapshot not in self._entries:
                return
            self._append(_line({"op": "drop", "id": snapshot}), sync=False)
            del self._entries[snapshot]
            self._drops += 1
            if self._drops >= MIN_DROPS and self._drops > len(self._entries):
                self._compact()

    def is_there(self) -> bool:
        """Return whether the open manifest is the file in the directory. Raises OSError.

        Takes no lock: a thread that holds it may be writing, which can take a disk seconds.
        """
        with suppress(FileNotFoundError):
            return _which(os.stat(self._directory / MANIFEST)) in self._ours
        return False

    def compact(self) -> None:
        """Rewrite with the live records only. Never raises: the old manifest stays valid."""
        with self._lock:
            self._compact()

    def close(self) -> None:
        """Close the file; afterwards every write raises KvError."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd, self._ours = -1, frozenset()

    def _replay(self) -> None:
        with open(os.dup(self._fd), "rb") as file:
            for number, raw in enumerate(file):
                if not raw.endswith(b"\n"):
                    self._torn = True
                    break
                self._end += len(raw)
                record = _parse(raw)
                if record is not None and "format" in record:
                    if record != _HEADER:
                        raise KvError(f"{self._directory}: unknown manifest format {record}")
                    continue
                if not self._apply(record) or number == 0:
                    self.corrupt += 1

    def _apply(self, record: dict[str, Any] | None) -> bool:
        """Apply one record to the entries; return False if it is invalid."""
        if record is None:
            return False
        if record.get("op") == "drop" and isinstance(record.get("id"), str):
            self._drops += self._entries.pop(SnapshotId(record["id"]), None) is not None
            return True
        entry = _entry(record)
        if entry is None:
            return False
        self._entries.pop(entry.id, None)
        self._entries[entry.id] = entry
        return True

    def _append(self, line: bytes, *, sync: bool) -> None:
        if self._torn:
            os.ftruncate(self._fd, self._end)
            self._torn = False
        try:
            _write(self._fd, line, self._end)
            if sync:
                os.fsync(self._fd)
        except OSError:
            self._torn = True  # part of the line may be there; the next append cuts it off
            with suppress(OSError):
                os.ftruncate(self._fd, self._end)
                self._torn = False
            raise
        self._end += len(line)

    def _compact(self) -> None:
        new = self._directory / NEW_MANIFEST
        adds = (_line({"op": "add"} | asdict(entry)) for entry in self._entries.values())
        content = b"".join([_line(_HEADER), *adds])
        fd, old = -1, self._ours
        try:
            fd = os.open(new, _OPEN | os.O_TRUNC, 0o600)
            self._ours = old | {_which(os.fstat(fd))}
            _write(fd, content, 0)
            if self._fsync:
                os.fsync(fd)
            os.rename(new, self._directory / MANIFEST)
        except OSError as exc:
            log.warning("manifest_not_compacted", kv_dir=str(self._directory), error=str(exc))
            if fd >= 0:
                os.close(fd)
            with suppress(OSError):
                os.unlink(new)
            self._ours = old
            self._drops = 0  # no retry at once
            return
        os.close(self._fd)
        self._ours -= old
        self._fd, self._end, self._torn, self._drops = fd, len(content), False, 0
        with suppress(OSError):  # both the old and the new one are valid
            self._sync_directory()

    def _sync_directory(self) -> None:
        if self._fsync:
            sync_directory(self._directory)


def _which(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        n = os.pwrite(fd, view, offset)
        view, offset = view[n:], offset + n


def _line(record: dict[str, Any]) -> bytes:
    payload = orjson.dumps(record)
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the record in `line`; None unless every byte of it is as it was written."""
    payload = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(payload):
        return None
    try:
        record = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _entry(record: dict[str, Any]) -> ManifestEntry | None:
    record = dict(record)
    if record.pop("op", None) != "add" or not _NAMES - _SHAPE.keys() <= record.keys() <= _NAMES:
        return None
    record = _SHAPE | record
    if not (
        all(isinstance(record[name], str) for name in _STRINGS)
        and all(type(record[name]) is int for name in _INTS)
        and isinstance(record["added_at"], int | float)
        and isinstance(record["extendable"], bool)
        and all(_is_ints(record[name]) for name in _INT_LISTS)
    ):
        return None
    return ManifestEntry(**(record | {name: tuple(record[name]) for name in _INT_LISTS}))


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and all(type(i) is int for i in value)
