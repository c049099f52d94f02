"""Manifests: what a snapshot is, and the file or the blobs that have its bytes.

`kvf-ID.manifest` is MessagePack and a checksum: a flipped bit could name another model, or a
version that stops the start. It is written by rename after all that it names, so a snapshot exists
when its manifest does. It begins with the head of the state file, which has the tokens: a manifest
is a transcript, as the file is.
"""

import io
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import xxhash

from router.base.decoding import UndecodableError, msgpack_decoder
from router.base.errors import KvError, KvFileError
from router.base.tokens import TokenPieces, Tokens, media_of
from router.base.types import Blob, KvDir, Namespace, Snapshot, SnapshotId, StateShape
from router.store import files
from router.store.files import Identity
from router.store.format.head import Head, read_head, tokens_of
from router.store.format.rewrite import Span
from router.store.format.split import Split
from router.store.places.directory import Directory

FORMAT_VERSION = 2

_DIGEST_BYTES = 16  # of the manifest itself
_SUM_BYTES = 8  # of a blob


class WholeFile(msgspec.Struct, frozen=True, array_like=True):
    """A state file that is not split. `checksum` (xxh3_128, hex) proves that it is the same."""

    size_bytes: int
    mtime_ns: int
    inode: int
    checksum: str

    @property
    def identity(self) -> Identity:
        """Return what shows cheaply that it is the same."""
        return Identity(self.size_bytes, self.mtime_ns, self.inode)


class Part(msgspec.Struct, frozen=True):
    """One blob of a state: its xxh3, and the ranges of the file that it has."""

    blob: Blob
    known: bytes
    spans: list[Span]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot. `head`: the first bytes of its file; `blobs`: the ids of all others, in order.

    `sums`: the xxh3 of each blob, 8 bytes, for this host alone; none: the ids are compared.
    `added_at` is wall time in seconds. `media` holds the fingerprints that stand for media in the
    tokens: the only part of the tokens that is not in the head. `n_stream`, `checkpoints` and
    `extendable` are the file's shape (router.base.types.StateShape). `file`: a state in one piece,
    in the directory of the manifest, which has no split.
    """

    version: int = FORMAT_VERSION
    id: SnapshotId
    namespace: Namespace
    added_at: float
    head: bytes
    split: Split
    blobs: tuple[bytes, ...] = ()
    sums: bytes = b""
    media: tuple[int, ...] = ()
    n_stream: int = 1
    checkpoints: tuple[int, ...] = ()
    extendable: bool = True
    file: WholeFile | None = None

    @property
    def parts(self) -> Iterator[Part]:
        """Return the blobs with their ranges of the file."""
        for index, (blob, spans) in enumerate(zip(self.sized, self.split.spans(), strict=True)):
            yield Part(blob, self._sum(index), spans)

    def part(self, index: int) -> Part:
        """Return one of the parts."""
        spans = self.split.spans_of(index)
        blob = Blob(self.blobs[index], sum(span.size for span in spans))
        return Part(blob, self._sum(index), spans)

    def _sum(self, index: int) -> bytes:
        return self.sums[index * _SUM_BYTES : (index + 1) * _SUM_BYTES]

    @property
    def sized(self) -> tuple[Blob, ...]:
        """Return the blobs with their sizes."""
        return tuple(map(Blob, self.blobs, self.split.sizes()))

    @property
    def tokens(self) -> Tokens:
        """Return the tokens of the snapshot. Raises KvFileError if the head is not one."""
        return tokens_of(self._checked_head(), self.media)

    def snapshot(self, kv_dir: KvDir) -> Snapshot:
        """Return the snapshot, whose file or blobs are in `kv_dir`.

        Raises KvFileError if the head is not one.
        """
        head = self._checked_head()
        shape = StateShape(
            self.n_stream, self.checkpoints, self.extendable, media=bool(head.media_starts)
        )
        return Snapshot(
            self.id,
            self.namespace,
            kv_dir,
            TokenPieces(tokens_of(head, self.media)),
            self.split.size_bytes,
            shape,
            self.added_at,
            self.sized,
            whole=self.file is not None,
        )

    def check(self) -> None:
        """Raise KvFileError for a manifest that contradicts itself."""
        split = self.split
        if self.file is None:
            split.check()  # first: a number may be any
        elif split.areas or split.ends or split.size_bytes != self.file.size_bytes:
            raise KvFileError(f"the manifest of {self.id} has a file, and other bytes than that")
        if len(self.blobs) != split.n_blobs:
            raise KvFileError(f"the manifest of {self.id} has other blobs than its split")
        if len(self.sums) not in (0, _SUM_BYTES * len(self.blobs)):
            raise KvFileError(f"the manifest of {self.id} has other sums than blobs")
        if any(len(id) != 32 for id in self.blobs):
            raise KvFileError(f"the manifest of {self.id} has ids that are none")
        self._checked_head()

    def _checked_head(self) -> Head:
        head = read_head(io.BytesIO(self.head))
        if not head.end == len(self.head) == self.split.start:
            raise KvFileError(f"the manifest of {self.id} has another head than its split")
        return head


class _Version(msgspec.Struct):
    version: int


_version_of = msgpack_decoder(_Version)
_manifest_of = msgpack_decoder(Manifest)
_values_of = msgpack_decoder(dict[str, Any])


def manifest_of(
    snapshot: Snapshot,
    head: bytes,
    split: Split,
    blobs: Iterable[Blob],
    sums: bytes = b"",
    file: WholeFile | None = None,
) -> Manifest:
    """Return the manifest of a snapshot whose file has this head, and was split into `blobs`."""
    shape = snapshot.shape
    return Manifest(
        id=snapshot.id,
        namespace=snapshot.namespace,
        added_at=snapshot.saved_at,
        head=head,
        split=split,
        blobs=tuple(blob.id for blob in blobs),
        sums=sums,
        media=media_of(snapshot.tokens),
        n_stream=shape.n_stream,
        checkpoints=shape.checkpoints,
        extendable=shape.extendable,
        file=file,
    )


def of_file(snapshot: Snapshot, head: bytes, file: WholeFile) -> Manifest:
    """Return the manifest of a snapshot that is a whole file."""
    split = Split(len(head), file.size_bytes, (), ())
    return manifest_of(snapshot, head, split, (), file=file)


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as it is in its file, and between hosts."""
    packed = msgspec.msgpack.encode(manifest)
    return packed + xxhash.xxh3_128_digest(packed)


def decode(raw: bytes, name: str) -> Manifest:
    """Return the manifest in `raw`, checked; `name`: what errors call it.

    Raises KvFileError for a damaged one, KvError for one of a later version.
    """
    packed, checksum = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(packed) != checksum:
        raise KvFileError(f"{name}: its checksum is another one")
    try:
        version = _version_of(packed).version
        if version != FORMAT_VERSION:
            packed = _of_version_1(packed, version, name)
        manifest = _manifest_of(packed)
    except UndecodableError as error:
        raise KvFileError(f"{name}: {error}") from error
    manifest.check()
    return manifest


def _of_version_1(packed: bytes, version: int, name: str) -> bytes:
    """Return a manifest of version 1 as one of this: all of its rows were in one area."""
    if version != 1:
        raise KvError(f"{name}: unknown version {version}")
    values = _values_of(packed)
    try:
        start, size_bytes, strips, n_tokens, n_rows, ends = values["split"]
    except (KeyError, TypeError, ValueError) as error:
        raise KvFileError(f"{name}: its split is none") from error
    areas = [(strips, n_tokens, [(0, n_rows)])] if n_rows else []
    values |= {"version": FORMAT_VERSION, "split": (start, size_bytes, areas, ends)}
    return msgspec.msgpack.encode(values)


def write(directory: Directory, manifest: Manifest) -> int:
    """Write a manifest; return the bytes written. Raises KvError."""
    raw = encode(manifest)
    directory.put(files.manifest_name(manifest.id), raw)
    return len(raw)


def read(directory: Directory, name: str) -> Manifest:
    """Read a manifest. Raises KvFileError for a damaged one, KvError for one of a later version."""
    manifest = decode(directory.get(name), name)
    if name != files.manifest_name(manifest.id):
        raise KvFileError(f"{name}: its id is another one")
    return manifest
