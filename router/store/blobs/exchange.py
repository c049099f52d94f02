"""State files between hosts: hand out the parts of a snapshot, and make a file of parts.

A snapshot is told by its manifest, also where it has no blobs on disk: the parts of its whole file
are hashed when a host asks. What was received is an ordinary snapshot. Parts that this host has are
not fetched, and each part is checked against the name that the manifest gives it.
"""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.types import (
    Blob,
    KvDir,
    MemoryKind,
    Namespace,
    Snapshot,
    SnapshotId,
    StagedFile,
)
from router.store import copies, files, shapes
from router.store.blobs import blob_files, manifests
from router.store.blobs.blob_files import Buffer
from router.store.blobs.manifests import Manifest
from router.store.blobs.split_snapshots import BlobSettings
from router.store.blobs.tier import plan_of
from router.store.format.rewrite import Span
from router.store.format.split import LEAST_BYTES
from router.store.records import KvDirectory, StoredSnapshot
from router.store.shapes import Inspected
from router.store.sidecars import os_errors

T = TypeVar("T")

_THREADS = 4
_MANIFESTS = 32  # kept, each with the tokens of a snapshot
_ALIKE = 2  # snapshots here that may have parts of one that is fetched


class Remote(Protocol):
    """The parts of a snapshot on another host. Both calls are made in threads."""

    def read(self, index: int, into: memoryview) -> None:
        """Read one part, of just this size. Blocks. Raises OSError or KvError."""

    def stop(self) -> None:
        """Let all reads fail soon."""


class Receiver(Protocol):
    """The store, which takes a file that was made of parts as it takes one of a backend."""

    def tier_directory(self) -> KvDirectory | None:
        """Return the directory of the tier of blobs; None: there is none."""

    def kv_directory(self) -> KvDirectory:
        """Return a KV directory for the file. Raises KvError."""

    def stage(self, kv_dir: KvDir, name: str, found: Inspected) -> StagedFile:
        """Return the file, to commit it."""

    async def commit(self, staged: StagedFile, namespace: Namespace) -> Snapshot:
        """Make it a snapshot. Raises KvError."""


class _Known(NamedTuple):
    manifest: Manifest
    parts: list[tuple[Blob, list[Span]]]


class Exchange:
    """Parts of the snapshots that a store holds. Calls raise KvError or KvFileError."""

    def __init__(
        self,
        owner: Receiver,
        held: Mapping[SnapshotId, StoredSnapshot],
        blobs: BlobSettings | None,
        mode: int,
    ) -> None:
        """`blobs`: settings of the tier, if there is one. `mode`: of a file that is made."""
        self._owner = owner
        self._held = held
        self._least_bytes = LEAST_BYTES if blobs is None else blobs.least_bytes
        self._mode = mode
        self._pool = ThreadPoolExecutor(_THREADS, "kv-exchange")
        self._known: OrderedDict[SnapshotId, _Known] = OrderedDict()

    def close(self, *, wait: bool = False) -> None:
        """Take no more work; `wait` until what has begun is over."""
        self._pool.shutdown(wait=wait, cancel_futures=True)

    async def manifest(self, snapshot: SnapshotId) -> Manifest:
        """Return what a snapshot consists of; the parts of a whole file are hashed now."""
        return (await self._look_up(snapshot)).manifest

    async def part(self, snapshot: SnapshotId, index: int) -> memoryview:
        """Return the bytes of one part of a snapshot."""
        known = await self._look_up(snapshot)
        if not 0 <= index < len(known.parts):
            raise KvFileError(f"snapshot {snapshot} has {len(known.parts)} parts")
        return await self._run(partial(self._read, snapshot, known, index, Buffer()))

    async def receive(
        self,
        manifest: Manifest,
        namespace: Namespace,
        kind: MemoryKind,
        alike: Sequence[SnapshotId],
        remote: Remote,
    ) -> Snapshot:
        """Make a snapshot of a manifest and its parts. Cancelled, no file is left.

        `alike`: snapshots here that begin like it.
        """
        local = await self._local(manifest, alike)
        directory = self._owner.kv_directory()
        target = directory.path / files.staging_name()
        work = partial(self._assemble, manifest, kind, local, remote, target)
        found = await self._make(work, target, remote)
        staged = self._owner.stage(directory.kv_dir, target.name, found)
        tokens = manifest.snapshot(directory.kv_dir).tokens
        return await self._owner.commit(replace(staged, tokens=tokens), namespace)

    async def _local(
        self, manifest: Manifest, alike: Sequence[SnapshotId]
    ) -> dict[Blob, tuple[SnapshotId, _Known, int]]:
        """Return where this host has parts of a manifest."""
        wanted = set(manifest.sized)
        found: dict[Blob, tuple[SnapshotId, _Known, int]] = {}
        for name in alike[:_ALIKE]:
            with suppress(KvError):
                known = await self._look_up(name)
                for index, blob in enumerate(known.manifest.sized):
                    if blob in wanted:
                        found.setdefault(blob, (name, known, index))
        return found

    async def _look_up(self, snapshot: SnapshotId) -> _Known:
        held = self._held.get(snapshot)
        if held is None:
            self._known.pop(snapshot, None)
            raise KvFileError(f"snapshot {snapshot} does not exist")
        if snapshot in self._known:
            self._known.move_to_end(snapshot)
            return self._known[snapshot]
        blobs = self._owner.tier_directory()
        if held.snapshot.blobs and blobs is not None:
            work = partial(manifests.read, manifests.path_of(blobs.path, snapshot))
        else:
            work = partial(_hashed, held, self._least_bytes)
        manifest = await self._run(work)
        known = self._known[snapshot] = _Known(manifest, list(manifest.parts))
        while len(self._known) > _MANIFESTS:
            self._known.popitem(last=False)
        return known

    def _read(self, snapshot: SnapshotId, known: _Known, index: int, buffer: Buffer) -> memoryview:
        """Read one part from the whole file, or from the tier. In a thread."""
        held, (blob, spans) = self._held.get(snapshot), known.parts[index]
        if held is None:
            raise KvFileError(f"snapshot {snapshot} does not exist any more")
        if held.snapshot.whole:
            raw = buffer.of(blob.size_bytes)
            with files.open_regular(held.path) as file:
                copies.gather(file.fileno(), spans, raw)
            return raw
        blobs = self._owner.tier_directory()
        if blobs is None:
            raise KvFileError(f"snapshot {snapshot} has no file any more")
        return blob_files.read(blobs.path, blob, buffer)

    def _assemble(
        self,
        manifest: Manifest,
        kind: MemoryKind,
        local: Mapping[Blob, tuple[SnapshotId, _Known, int]],
        remote: Remote,
        target: Path,
    ) -> Inspected:
        """Make the file and check it; its host has padded it already. In a thread."""
        places = {blob: index for index, blob in enumerate(manifest.sized)}

        def read(blob: Blob, buffer: Buffer) -> memoryview:
            if (own := local.get(blob)) is not None:
                with suppress(KvError, OSError):  # deleted meanwhile, or damaged
                    raw = self._read(*own, buffer)
                    if blob_files.blob_of(raw) == blob:
                        return raw
            raw = buffer.of(blob.size_bytes)
            remote.read(places[blob], raw)
            if blob_files.blob_of(raw) != blob:
                raise KvFileError("a part has other content than its name says")
            return raw

        try:
            blob_files.assemble(
                manifest.head,
                manifest.parts,
                target,
                manifest.split.size_bytes,
                self._mode,
                read,
            )
            found = shapes.inspect(target, manifest.split.size_bytes, kind)
            return dataclasses.replace(found, padded=manifest.extendable)
        except BaseException:
            remote.stop()
            target.unlink(missing_ok=True)
            raise

    async def _make(self, work: Callable[[], T], target: Path, remote: Remote) -> T:
        """Do work that makes a file; its thread goes on a little if this is cancelled."""
        making = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            with os_errors("kv exchange"):
                return await asyncio.shield(making)
        except asyncio.CancelledError:
            remote.stop()
            making.add_done_callback(lambda done: self._undo(done, target))
            raise

    def _undo(self, done: "asyncio.Future[T]", target: Path) -> None:
        if not done.cancelled() and done.exception() is None:
            with suppress(RuntimeError):  # closed: the next start removes it
                self._pool.submit(partial(target.unlink, missing_ok=True))

    async def _run(self, work: Callable[[], T]) -> T:
        with os_errors("kv exchange"):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)


def _hashed(held: StoredSnapshot, least_bytes: int) -> Manifest:
    """Return the manifest of a whole file. Raises KvFileError if it is not as committed."""
    head, plan = plan_of(held.path, held.identity, least_bytes)
    found, buffer = list[Blob](), Buffer()
    with files.open_regular(held.path) as file:
        for spans in plan.spans():
            raw = buffer.of(sum(span.size for span in spans))
            copies.gather(file.fileno(), spans, raw)
            found.append(blob_files.blob_of(raw))
        if files.identity_of(file) != held.identity:
            raise KvFileError(f"{held.path.name} changed after it was committed")
    return manifests.manifest_of(held.snapshot, head, plan, found)
