"""Blocking file operations of the store: names, identity, checksum, copies, permissions.

Knows paths, not snapshots. Every function may raise OSError (the store maps it) or KvFileError.
No function follows a symbolic link or opens a pipe: another process writes the directory.
"""

import errno
import fcntl
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import structlog
import xxhash

from router.base.errors import KvError, KvFileError
from router.store import copies
from router.store.format.rewrite import Rewrite

log = structlog.get_logger(__name__)

# Flat names of safe characters: llama-server takes no others (docs/llama-server.md section 1.1).
STAGING = re.compile(r"kvf-([0-9a-f]{32})\.part")
FINAL = re.compile(r"kvf-([0-9a-f]{32})\.kv")
MANIFEST = re.compile(r"kvf-([0-9a-f]{32})\.manifest")
# Left by a crash in `put_whole`.
BROKEN = re.compile(r"(kvf-.+|purged-tenants\.json|written\.json)-[0-9a-f]{8}\.new")
OLD_RECORD = re.compile(r"kvf-[0-9a-f]{32}\.json(\.new)?")  # of kvferry 0.1.0
_SET_ASIDE = re.compile(r"kvf-[0-9a-f]{32}\.kv\.quarantined")  # by earlier builds
_SWEPT = (STAGING, FINAL, MANIFEST, BROKEN, OLD_RECORD, _SET_ASIDE)

OF_FILES = (errno.ENOENT, errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES)
LOCK = "kvferry.lock"
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
SMALL_BYTES = 64 << 20  # the longest manifest
_CHUNK = 4 << 20  # bytes; xxh3 does about 10 GB/s, so the chunk only has to amortise the call


@contextmanager
def os_errors(what: str, error: type[KvError] = KvError) -> Iterator[None]:
    """Turn an OSError inside into `error`, the only kind that callers of the store see.

    KvFileError only of what the file is to blame for: without descriptors or memory none is.
    """
    try:
        yield
    except OSError as exc:
        kind = error if exc.errno in OF_FILES else KvError
        raise kind(f"{what}: {exc.strerror or exc}") from exc


@dataclass(frozen=True, slots=True)
class Identity:
    """The attributes that show, without a read, that a file is still the same one."""

    size_bytes: int
    mtime_ns: int
    inode: int


def staging_name() -> str:
    """Return a fresh name; its 128 random bits keep the names of two routers apart."""
    return f"kvf-{secrets.token_hex(16)}.part"


def final_name(number: str) -> str:
    """Return the file name of the snapshot with the id `number`."""
    return f"kvf-{number}.kv"


def manifest_name(number: str) -> str:
    """Return the file name of the manifest of the snapshot with the id `number`."""
    return f"kvf-{number}.manifest"


def identity(path: Path) -> Identity:
    """Return the identity of a regular file. Raises KvFileError for anything else."""
    return identity_from(path.lstat(), path)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises KvFileError for anything else."""
    # Without O_NONBLOCK the open of a pipe waits for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    identity_from(path.lstat(), path)  # first: opening a socket or a symlink fails obscurely
    file = open(os.open(path, flags), "rb")  # noqa: SIM115 - the caller closes it
    try:
        identity_from(os.fstat(file.fileno()), path)
    except KvFileError:
        file.close()
        raise
    return file


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Create a private file, and yield its descriptor; remove it if the block fails.

    Raises OSError if something is there.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        yield file
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(file)


def identity_of(file: BinaryIO) -> Identity:
    """Return the identity of an open file. Raises KvFileError unless it is regular."""
    return identity_from(os.fstat(file.fileno()), Path(str(file.name)))


def identity_from(status: os.stat_result, path: Path) -> Identity:
    """Return the identity of what has this status. Raises KvFileError unless it is a file."""
    if not stat.S_ISREG(status.st_mode):
        raise KvFileError(f"{path.name} is not a regular file")
    return Identity(status.st_size, status.st_mtime_ns, status.st_ino)


def checksum(file: BinaryIO) -> str:
    """Return the xxh3_128 of the whole file, in hex."""
    digest = xxhash.xxh3_128()
    file.seek(0)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def link(source: Path, target: Path) -> bool:
    """Hard-link `source` as `target`; return False where the system does not allow it."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or `fs.protected_hardlinks`
        return False
    return True


def copy(source: Path, target: Path, expected: Identity) -> None:
    """Copy `source` to the new file `target`, which is removed again on failure.

    Keep owner and mode as far as allowed: the backend that reads the file may be another user.
    """
    size = expected.size_bytes
    write_rewritten(source, target, expected, Rewrite(size, (), size))


def write_rewritten(source: Path, target: Path, expected: Identity, rewrite: Rewrite) -> Identity:
    """Write the rewritten `source` to the new file `target`, removed again on failure.

    Keep owner and mode as `copy` does. Raises KvFileError if `source` is no longer `expected`.
    """
    with open_regular(source) as reader:
        if identity_of(reader) != expected:
            raise KvFileError(f"{source.name} was replaced")
        status = os.fstat(reader.fileno())
        with created(target) as writer:
            copies.write(reader.fileno(), writer, rewrite)
            with suppress(PermissionError):
                os.fchmod(writer, stat.S_IMODE(status.st_mode))
                os.fchown(writer, status.st_uid, status.st_gid)
            return identity_from(os.fstat(writer), target)


def rewrite_tail(path: Path, rewrite: Rewrite) -> Identity:
    """Rewrite `path` in place: write only the bytes behind `rewrite.start`.

    For staged files that have no other reader yet. A failure midway leaves a worthless file.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    identity_from(path.lstat(), path)
    file = os.open(path, flags)
    try:
        identity_from(os.fstat(file), path)
        copies.shift(file, rewrite)
        return identity_from(os.fstat(file), path)
    finally:
        os.close(file)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file until the end of the block; wait for it. Blocks. Raises OSError."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def read_small(path: Path, most_bytes: int = SMALL_BYTES) -> bytes:
    """Return the content of a small file. Raises OSError; KvFileError if it is none."""
    with open_regular(path) as file:
        if identity_of(file).size_bytes > most_bytes:
            raise KvFileError(f"{path.name} is too large")
        return file.read()


def put_whole(path: Path, content: bytes | memoryview, *, fsync: bool = False) -> None:
    """Write a file whole or not at all: under another name first. Raises OSError.

    With `fsync`, it is durable then. What a crash leaves is called `NAME-XXXXXXXX.new`.
    """
    new = path.with_name(f"{path.name}-{os.urandom(4).hex()}.new")
    with created(new) as file:
        copies.write_all(file, memoryview(content), 0)
        if fsync:
            os.fsync(file)
        os.rename(new, path)
    if fsync:
        sync_directory(path.parent)


def sweep(directory: Path, known: frozenset[str]) -> list[str]:
    """Remove the router's own files that no manifest names; return their names.

    Other files stay, and files that cannot be removed. States of 0.1.0 have no manifest.
    """
    removed: list[str] = []
    for path in directory.iterdir():
        if path.name in known or not any(kind.fullmatch(path.name) for kind in _SWEPT):
            continue
        with suppress(OSError):
            path.unlink()
            removed.append(path.name)
    return removed


def is_on_disk(device: int) -> bool:
    """Return whether a file system is on a disk, and not in memory. Raises OSError."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = Path("/proc/self/mountinfo")  # major:minor is the third word; the type follows " - "
    lines = mounts.read_text(errors="replace").splitlines() if mounts.exists() else []
    kinds = {one.partition(" - ")[2].split(" ")[0] for one in lines if one.split()[2] == wanted}
    return not kinds & {"tmpfs", "ramfs"}


def set_mode(path: Path, mode: int) -> None:
    """Set the mode, unless another user owns the file: then only the directory protects it."""
    with open_regular(path) as file, suppress(PermissionError):
        os.fchmod(file.fileno(), mode)


def openness(mode: int, *, group_access: bool) -> tuple[str, str] | None:
    """Return which users must not have access but do, and the mode to set; None if all is well."""
    right = "770" if group_access else "700"
    if mode & stat.S_IRWXO:
        return "all users", right
    return ("its group", right) if mode & stat.S_IRWXG and not group_access else None


def prepare_directory(directory: Path, *, group_access: bool = False) -> None:
    """Create a private directory if missing; prove that files can be made in it.

    Raises KvError if other users have access to it: state files are transcripts. Raises KvError if
    its parent is missing: the path is a mistake then, or a file system is not mounted.
    """
    try:
        directory.mkdir(mode=0o770 if group_access else 0o700, exist_ok=True)
    except FileNotFoundError as error:
        raise KvError(
            f"{directory} cannot be used for state files: there is no {directory.parent}; correct"
            " kv_dir (--kv-dir), or mount or create that directory first"
        ) from error
    mode = stat.S_IMODE(directory.stat().st_mode)
    if found := openness(mode, group_access=group_access):
        open_to, right = found
        way_out = f"chmod {right} {shlex.quote(str(directory))}"
        if mode & stat.S_ISVTX:  # others use it, as /tmp
            own = shlex.quote(str(directory / "kvferry"))
            way_out = f"use a directory of its own: install -d -m {right} {own}"
        if open_to == "its group":
            way_out += ", or set store.group_access: true if llama-server is another user of it"
        raise KvError(
            f"{directory} is open to {open_to} (mode {mode:o}), and state files are transcripts of"
            f" conversations: {way_out}"
        )
    probe = directory / staging_name()
    os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    probe.unlink()


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
        raise KvFileError(
            f"{self._directory} is not the directory that was opened: restart kvferry"
        )

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
