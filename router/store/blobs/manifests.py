"""Manifests: what a snapshot is, and the blobs that its state file was split into.

`manifests/kvf-ID.manifest` is MessagePack and a checksum. It is written by rename after all of its
blobs, so a snapshot whose manifest is there can be assembled. It begins with the head of the state
file, which has the tokens: a manifest is a transcript, as the file was.
"""

import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from router.base.decoding import UndecodableError, msgpack_decoder
from router.base.errors import KvError, KvFileError
from router.base.tokens import Tokens, media_of
from router.base.types import Blob, KvDir, Namespace, Snapshot, SnapshotId, StateShape
from router.store import files
from router.store.format.head import Head, read_head, tokens_of
from router.store.format.rewrite import Span
from router.store.format.split import Split
from router.store.sidecars import make_directory, put_durably

FOLDER = "manifests"
FORMAT_VERSION = 1

_NAME = re.compile(r"kvf-([0-9a-f]{32})\.manifest")
_TEMPORARY = re.compile(r"kvf-[0-9a-f]{32}\.manifest-[0-9a-f]+\.new")
_SUM_BYTES = 16


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One snapshot. `head`: the first bytes of its file; `blobs`: the ids of all others, in order.

    `added_at` is wall time in seconds. `media`, `n_stream`, `checkpoints` and `extendable` are as
    in a `SnapshotRecord`.
    """

    version: int = FORMAT_VERSION
    id: SnapshotId
    namespace: Namespace
    added_at: float
    head: bytes
    split: Split
    blobs: tuple[bytes, ...]
    media: tuple[int, ...] = ()
    n_stream: int = 1
    checkpoints: tuple[int, ...] = ()
    extendable: bool = True

    @property
    def parts(self) -> Iterator[tuple[Blob, list[Span]]]:
        """Return each blob with its ranges of the file."""
        return zip(self.sized, self.split.spans(), strict=True)

    @property
    def sized(self) -> tuple[Blob, ...]:
        """Return the blobs with their sizes."""
        return tuple(map(Blob, self.blobs, self.split.sizes()))

    @property
    def tokens(self) -> Tokens:
        """Return the tokens of the snapshot. Raises KvFileError if the head is not one."""
        return tokens_of(self._checked_head(), self.media)

    def snapshot(self, kv_dir: KvDir) -> Snapshot:
        """Return the snapshot, of which there is no file but its blobs in `kv_dir`.

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
            tokens_of(head, self.media),
            self.split.size_bytes,
            shape,
            self.added_at,
            self.sized,
            whole=False,
        )

    def check(self) -> None:
        """Raise KvFileError for a manifest that contradicts itself."""
        split = self.split
        if len(self.blobs) != split.n_rows + len(split.ends):  # first: a number may be any
            raise KvFileError(f"the manifest of {self.id} has other blobs than its split")
        split.check()
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


def manifest_of(snapshot: Snapshot, head: bytes, split: Split, blobs: Iterable[Blob]) -> Manifest:
    """Return the manifest of a snapshot whose file has this head, and was split into `blobs`."""
    shape = snapshot.shape
    return Manifest(
        id=snapshot.id,
        namespace=snapshot.namespace,
        added_at=snapshot.saved_at,
        head=head,
        split=split,
        blobs=tuple(blob.id for blob in blobs),
        media=media_of(snapshot.tokens),
        n_stream=shape.n_stream,
        checkpoints=shape.checkpoints,
        extendable=shape.extendable,
    )


def encode(manifest: Manifest) -> bytes:
    """Return a manifest as it is in its file, and between hosts."""
    packed = msgspec.msgpack.encode(manifest)
    return packed + xxhash.xxh3_128_digest(packed)


def decode(raw: bytes, name: str) -> Manifest:
    """Return the manifest in `raw`, checked; `name`: what errors call it.

    Raises KvFileError for a damaged one, KvError for one of a later version.
    """
    packed, checksum = raw[:-_SUM_BYTES], raw[-_SUM_BYTES:]
    if xxhash.xxh3_128_digest(packed) != checksum:
        raise KvFileError(f"{name}: its checksum is another one")
    try:
        version = _version_of(packed).version
        if version != FORMAT_VERSION:
            raise KvError(f"{name}: unknown version {version}")
        manifest = _manifest_of(packed)
    except UndecodableError as error:
        raise KvFileError(f"{name}: {error}") from error
    manifest.check()
    return manifest


def write(root: Path, manifest: Manifest, *, fsync: bool) -> int:
    """Write a manifest durably; return the bytes written. Raises OSError."""
    path = path_of(root, manifest.id)
    new = path.with_name(f"{path.name}-{os.urandom(4).hex()}.new")
    raw = encode(manifest)
    put_durably(path, new, raw, fsync=fsync)
    return len(raw)


def read(path: Path) -> Manifest:
    """Read a manifest. Raises KvFileError for a damaged one, KvError for one of a later version."""
    try:
        raw = files.read_small(path)
    except FileNotFoundError:
        raise KvFileError(f"{path.name} is missing") from None
    manifest = decode(raw, path.name)
    if path.name != path_of(path.parent.parent, manifest.id).name:
        raise KvFileError(f"{path.name}: its id is another one")
    return manifest


def path_of(root: Path, snapshot: SnapshotId) -> Path:
    """Return the path of the manifest of a snapshot."""
    return root / name_of(snapshot)


def name_of(snapshot: SnapshotId) -> str:
    """Return the path of the manifest of a snapshot, below the directory of the tier."""
    return f"{FOLDER}/kvf-{snapshot}.manifest"


def scan(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the paths of all manifests, and of what writes have left. Creates their directory."""
    folder = root / FOLDER
    make_directory(folder, fsync=True)
    paths = list(folder.iterdir())
    return (
        [path for path in paths if _NAME.fullmatch(path.name)],
        [path for path in paths if _TEMPORARY.fullmatch(path.name)],
    )
