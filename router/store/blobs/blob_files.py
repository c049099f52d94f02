"""Blob files: bytes of state files, named by their content.

`ab/abcd….blob` is a header and the bytes. The name is the blake3 hash of the bytes, so a blob is
never changed and never written twice. Two checks: a read compares the header's xxh3, which keeps up
with the disk; `is_damaged` computes the name anew. Every function blocks, and may raise OSError.
"""

import errno
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import xxhash
from blake3 import blake3

from router.base.errors import KvFileError
from router.base.types import Blob
from router.store import copies, files
from router.store.files import Identity, make_directory, sync_directory
from router.store.format.rewrite import Span

_MAGIC = b"KVFB"
_VERSION = 1
_RAW = 0  # the codec; compressed blobs would have another
_HEADER = Struct("<4sBBHQ16s32s")  # magic, version, codec, 0, bytes, their xxh3_128, their blake3

# Blobs that are read and written at a time: a disk works on one while another is checked.
_AT_ONCE = 2

_NAME = re.compile(r"([0-9a-f]{64})\.blob")
_TEMPORARY = re.compile(r"[0-9a-f]{64}\.blob-[0-9a-f]+\.new")
_OLD_MANIFESTS = "manifests"  # of kvferry 0.1.0
_FOLDER = re.compile(r"[0-9a-f]{2}")


class DamagedBlobError(KvFileError):
    """A blob is missing, or its bytes are not what they were."""

    def __init__(self, blob: Blob, message: str) -> None:
        """`blob`: the one that no snapshot may use any more."""
        super().__init__(message)
        self.blob = blob


class Buffer:
    """Memory that is used for one blob after the other, as large as the largest so far.

    Mapped, since a bytearray of 32 MiB is zeroed for 24 ms under the interpreter's lock.
    """

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, size: int) -> memoryview:
        """Return `size` bytes, valid until the next call."""
        if len(self._memory) < size:
            self._memory = memoryview(mmap.mmap(-1, size))
        return self._memory[:size]


def blob_of(raw: memoryview) -> Blob:
    """Return the blob that has these bytes."""
    return Blob(blake3(raw).digest(), len(raw))


def path_of(root: Path, blob: bytes) -> Path:
    """Return the path of a blob: 256 directories, because large ones are slow or full early."""
    name = blob.hex()
    return root / name[:2] / f"{name}.blob"


def is_there(root: Path, blob: Blob) -> bool:
    """Return whether a blob is on disk, with the right size."""
    try:
        return path_of(root, blob.id).lstat().st_size == _HEADER.size + blob.size_bytes
    except FileNotFoundError:
        return False


def write(root: Path, blob: Blob, raw: memoryview, *, fsync: bool) -> int:
    """Write a blob durably, whole or not at all; return the bytes written."""
    path = path_of(root, blob.id)
    make_directory(path.parent, fsync=fsync)
    header = _HEADER.pack(_MAGIC, _VERSION, _RAW, 0, len(raw), xxhash.xxh3_128_digest(raw), blob.id)
    files.put_whole(path, (memoryview(header), raw), fsync=fsync)
    if fsync:
        sync_directory(path.parent)
    return len(header) + len(raw)


def read(root: Path, blob: Blob, buffer: Buffer) -> memoryview:
    """Return the bytes of a blob, checked; valid until the next use of `buffer`.

    Raises KvFileError if the file is missing or damaged.
    """
    path = path_of(root, blob.id)
    try:
        file = files.open_regular(path)
    except FileNotFoundError:
        raise KvFileError(f"blob {path.name} is missing") from None
    raw, n = buffer.of(blob.size_bytes), 0
    try:
        with file:
            header = os.pread(file.fileno(), _HEADER.size, 0)
            while n < len(raw) and (
                more := os.preadv(file.fileno(), [raw[n : n + copies.CALL]], len(header) + n)
            ):
                n += more
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise KvFileError(f"blob {path.name} cannot be read") from error  # nor ever will be
    expected = (_MAGIC, _VERSION, _RAW, 0, n, xxhash.xxh3_128_digest(raw), blob.id)
    whole = n == len(raw) and len(header) == _HEADER.size
    if not whole or _HEADER.unpack(header) != expected:
        raise KvFileError(f"blob {path.name} is damaged")
    return raw


def is_damaged(root: Path, blob: Blob) -> bool:
    """Return whether a blob is missing, or has other content than it is named by."""
    try:
        return blob_of(read(root, blob, Buffer())) != blob
    except KvFileError:
        return True


def unlink(root: Path, blob: bytes) -> None:
    """Remove a blob, if it is there."""
    path_of(root, blob).unlink(missing_ok=True)


class Found(NamedTuple):
    """What is in the directories of blobs: blobs, and what broken writes left there."""

    blobs: set[Blob]
    leftovers: list[Path]


def scan(root: Path) -> Found:
    """List all blobs by name and size; only `read` looks into them."""
    found = Found(set(), [])
    for folder in os.scandir(root):
        if folder.name == _OLD_MANIFESTS and folder.is_dir(follow_symlinks=False):
            old = [one for one in os.scandir(folder.path) if one.name.startswith("kvf-")]
            found.leftovers.extend(Path(one.path) for one in old)
        if files.NEW_MANIFEST.fullmatch(folder.name) or files.FINAL.fullmatch(folder.name):
            found.leftovers.append(Path(folder.path))
        if not (_FOLDER.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False)):
            continue
        for entry in os.scandir(folder.path):
            if name := _NAME.fullmatch(entry.name):
                size = entry.stat(follow_symlinks=False).st_size - _HEADER.size
                found.blobs.add(Blob(bytes.fromhex(name[1]), size))
            elif _TEMPORARY.fullmatch(entry.name):
                found.leftovers.append(Path(entry.path))
    return found


def parts_of(
    source: Path, expected: Identity, spans: Iterable[list[Span]]
) -> Iterator[tuple[Blob, memoryview]]:
    """Yield the blobs of a state file with their bytes, each valid until the next.

    Raises KvFileError at the end if `source` is no longer `expected`.
    """
    buffer = Buffer()
    with files.open_regular(source) as file:
        for parts in spans:
            raw = buffer.of(sum(part.size for part in parts))
            copies.gather(file.fileno(), parts, raw)
            yield blob_of(raw), raw
        if files.identity_of(file) != expected:
            raise KvFileError(f"{source.name} changed while it was split")


@dataclass(frozen=True, slots=True)
class Written:
    """The blobs of a file that was split, and those that were new."""

    blobs: tuple[Blob, ...]
    new: tuple[Blob, ...]


def write_blobs(
    root: Path,
    source: Path,
    expected: Identity,
    spans: Iterable[list[Span]],
    *,
    fsync: bool,
    wrote: Callable[[int], object] = lambda _: None,
) -> Written:
    """Write the blobs of a state file that are not there yet; call `wrote` with the bytes of each.

    Raises KvFileError if `source` is no longer `expected`. No new blob is left on failure.
    """
    blobs: list[Blob] = []
    new: list[Blob] = []
    try:
        for blob, raw in parts_of(source, expected, spans):
            blobs.append(blob)
            if not is_there(root, blob):
                new.append(blob)
                wrote(write(root, blob, raw, fsync=fsync))
    except BaseException:
        for blob in new:
            with suppress(OSError):
                unlink(root, blob.id)
        raise
    return Written(tuple(blobs), tuple(new))


def read_checked(root: Path, blob: Blob, buffer: Buffer) -> memoryview:
    """Return the bytes of a blob, as `read`. Raises DamagedBlobError."""
    try:
        return read(root, blob, buffer)
    except KvFileError as error:
        raise DamagedBlobError(blob, str(error)) from error


def assemble(
    head: bytes,
    blobs: Iterable[tuple[Blob, list[Span]]],
    target: Path,
    size_bytes: int,
    mode: int,
    read: Callable[[Blob, Buffer], memoryview],
) -> Identity:
    """Put a state file together as the new file `target`, removed again on failure.

    `read` is called in two threads at a time, and what it raises ends the work.
    """
    todo = list(blobs)
    turns = count()  # its next() is one step of the interpreter: each turn is taken once
    writer = files.create(target)

    def work() -> None:
        buffer = Buffer()
        while (turn := next(turns)) < len(todo):
            blob, parts = todo[turn]
            copies.scatter(writer, read(blob, buffer), parts)

    try:
        os.fchmod(writer, mode)
        os.ftruncate(writer, size_bytes)
        copies.write_all(writer, memoryview(head), 0)
        with ThreadPoolExecutor(_AT_ONCE, "kv-assemble") as pool:
            for done in [pool.submit(work) for _ in range(_AT_ONCE)]:
                done.result()
        return files.identity_of_fd(writer, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(target)
        raise
    finally:
        os.close(writer)
