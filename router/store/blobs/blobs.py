"""Blobs: bytes of state files, named by their content, at any place.

The id of a blob is the blake3 hash of its bytes, so a blob is never changed and never written
twice. Two checks: a read on this host compares the xxh3 that the manifest has, which keeps up with
the disk; what comes from elsewhere is hashed for its id. Blocks: call all in threads.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import xxhash
from blake3 import blake3

from router.base.errors import KvError, KvFileError
from router.base.types import Blob
from router.store import copies, files
from router.store.blobs.buffer import Buffer
from router.store.files import Identity
from router.store.format.rewrite import Span
from router.store.io_pool import Threads
from router.store.manifests import Manifest, Part
from router.store.places.directory import Directory
from router.store.places.place import MissingError, Place, Progress, Readable
from router.store.places.seals import Sealed

# Blobs that are read and written at a time: a disk works on one while another is checked.
_AT_ONCE = 2

sum_of = xxhash.xxh3_64_digest  # of the bytes of a blob, as a manifest has it

_FOLDERS = re.compile("[0-9a-f]{2}|manifests")
_NAME = re.compile(r"([0-9a-f]{2})/(\1[0-9a-f]{62})\.blob")
# What a crash leaves, whole files in a folder of blobs, and the manifests of kvferry 0.1.0.
_LEFT = re.compile(r"(?:[0-9a-f]{2}/)?[^/]+-[0-9a-f]{8}\.new|kvf-[0-9a-f]{32}\.kv|manifests/kvf-.+")


class BlobError(KvFileError):
    """A blob is missing, or its bytes are not what they were."""

    def __init__(self, blob: Blob, message: str, *, is_missing: bool) -> None:
        """`blob`: the one that no snapshot may use any more."""
        super().__init__(message)
        self.blob = blob
        self.is_missing = is_missing


def blob_of(raw: memoryview) -> Blob:
    """Return the blob that has these bytes."""
    return Blob(blake3(raw).digest(), len(raw))


def local_name(blob: Blob) -> str:
    """Return the name on this host: 256 folders, because large ones are slow or full early."""
    name = blob.id.hex()
    return f"{name[:2]}/{name}.blob"


def read(
    place: Readable,
    name: str,
    blob: Blob,
    buffer: Buffer,
    *,
    progress: Progress = lambda _: None,
    seal: Sealed | None = None,
    known: bytes = b"",
) -> memoryview:
    """Return the bytes of a blob, checked; valid until the next use of `buffer`.

    `known`: their xxh3, if this host computed it. Raises KvError, BlobError.
    """
    raw = buffer.of(blob.size_bytes)
    try:
        if seal is None:
            place.read(name, raw, progress)
        else:
            sealed = Buffer().of(seal.sealed_bytes(len(raw)))
            place.read(name, sealed, progress)
            seal.open(name, sealed, raw)
        if sum_of(raw) != known if known else blob_of(raw) != blob:
            raise KvFileError(f"{name} has other content than its name says")
    except KvFileError as error:
        missing = isinstance(error, MissingError)
        raise BlobError(blob, str(error), is_missing=missing) from error
    return raw


class BlobReader:
    """Reads the blobs of one state from another place, in threads. Call `stop` last."""

    def __init__(
        self,
        place: Readable,
        name_of: Callable[[Blob], str],
        *,
        seal: Sealed | None = None,
        ends_at: float = inf,
        now: Callable[[], float] = monotonic,
        close: Callable[[], None] = lambda: None,
        threads: Threads | None = None,
    ) -> None:
        """`name_of`: what a blob is called there. `ends_at`: clock seconds; nothing is read then.

        `close`: called by `stop`. `threads`: has the one that waits for the reads, if the place may
        hang: those of other places go on.
        """
        self.threads = threads
        self._place = place
        self._name_of = name_of
        self._seal = seal
        self._ends_at = ends_at
        self._now = now
        self._close = close
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # guards all below
        self._first_at: float | None = None
        self._last_at = 0.0
        self._done_bytes = 0

    @property
    def done_bytes(self) -> int:
        """Return the bytes read so far."""
        with self._lock:
            return self._done_bytes

    @property
    def reading_s(self) -> float:
        """Return the seconds from the first question to the last byte."""
        with self._lock:
            return max(self._last_at - (self._first_at or 0.0), 0.0)

    def stop(self) -> None:
        """Let all reads fail with their next bytes. Idempotent."""
        with self._lock:
            first = not self._stopped.is_set()
            self._stopped.set()
        if first:
            self._close()

    def read(self, blob: Blob, buffer: Buffer) -> memoryview:
        """Return the bytes of a blob, checked; valid until the next use of `buffer`.

        Raises KvError, BlobError.
        """
        with self._lock:
            self._first_at = self._now() if self._first_at is None else self._first_at
        self._progress(0)
        name = self._name_of(blob)
        return read(self._place, name, blob, buffer, progress=self._progress, seal=self._seal)

    def _progress(self, n_bytes: int) -> None:
        if self._stopped.is_set() or self._now() > self._ends_at:
            raise KvError("it takes too long")
        if n_bytes:
            with self._lock:
                self._done_bytes += n_bytes
                self._last_at = self._now()


class Found(NamedTuple):
    """What is in a directory of blobs: blobs, and names of what broken writes left there."""

    blobs: set[Blob]
    leftovers: list[str]


def scan(place: Directory) -> Found:
    """List all blobs by name and size; only `read` looks into them. Other folders stay closed."""
    found = Found(set(), [])
    for entry in place.listing("", _FOLDERS):
        if name := _NAME.fullmatch(entry.name):
            found.blobs.add(Blob(bytes.fromhex(name[2]), entry.size_bytes))
        elif _LEFT.fullmatch(entry.name):
            found.leftovers.append(entry.name)
    return found


def blobs_in(
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
    """The blobs of a file that was split, the xxh3 of each, and those that were new."""

    blobs: tuple[Blob, ...]
    sums: bytes
    new: tuple[Blob, ...]


def write_blobs(
    place: Place,
    source: Path,
    expected: Identity,
    spans: Iterable[list[Span]],
    wrote: Callable[[int], object] = lambda _: None,
) -> Written:
    """Write the blobs of a state file that are not there yet; call `wrote` with the bytes of each.

    Raises KvFileError if `source` is no longer `expected`. No new blob is left on failure.
    """
    blobs: list[Blob] = []
    new: list[Blob] = []
    sums = bytearray()
    try:
        for blob, raw in blobs_in(source, expected, spans):
            blobs.append(blob)
            sums += sum_of(raw)
            there = place.head(local_name(blob))
            if there is None or there.size_bytes != len(raw):
                new.append(blob)
                place.put(local_name(blob), raw)
                wrote(len(raw))
    except BaseException:
        with suppress(KvError):
            place.delete([local_name(blob) for blob in new])
        raise
    return Written(tuple(blobs), bytes(sums), tuple(new))


def assemble(
    manifest: Manifest, target: Path, mode: int, read: Callable[[Part, Buffer], memoryview]
) -> Identity:
    """Put a state file together as the new file `target`, removed again on failure.

    `read` is called in two threads at a time, once for each blob; what it raises ends the work.
    """
    places = dict[Blob, list[Part]]()
    for part in manifest.parts:  # a checkpoint has rows that the window has
        places.setdefault(part.blob, []).append(part)
    todo = list(places.values())
    turns = count()  # its next() is one step of the interpreter: each turn is taken once
    failed = threading.Event()

    def work(writer: int) -> None:
        buffer = Buffer()
        try:
            while (turn := next(turns)) < len(todo) and not failed.is_set():
                raw = read(todo[turn][0], buffer)
                for part in todo[turn]:
                    copies.scatter(writer, raw, part.spans)
        except BaseException:
            failed.set()
            raise

    with files.created(target) as writer:
        os.fchmod(writer, mode)
        os.ftruncate(writer, manifest.split.size_bytes)
        copies.write_all(writer, memoryview(manifest.head), 0)
        with ThreadPoolExecutor(_AT_ONCE, "kv-assemble") as pool:
            for done in [pool.submit(work, writer) for _ in range(_AT_ONCE)]:
                done.result()
        return files.identity_from(os.fstat(writer), target)
