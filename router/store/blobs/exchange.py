"""State files between hosts: hand out the parts of a snapshot, and make a file of parts.

A snapshot is told by its manifest, also where it has no blobs on disk: the parts of its whole file
are hashed when a host asks. What was received is an ordinary snapshot. Parts that this host has are
not fetched, and each part is checked against the name that the manifest gives it.
"""

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.tasks import Tasks, spawn
from router.base.tokens import Tokens
from router.base.types import Blob, MemoryKind, Namespace, Snapshot, SnapshotId
from router.store import copies, files, manifests, shapes
from router.store.blobs import blobs
from router.store.blobs.blobs import BlobReader
from router.store.blobs.buffer import Buffer
from router.store.blobs.split_snapshots import BlobSettings
from router.store.blobs.tier import plan_of
from router.store.format.head import tokens_of
from router.store.format.split import LEAST_BYTES
from router.store.io_pool import Threads
from router.store.manifests import Manifest, Part
from router.store.records import StoredSnapshot
from router.store.shapes import Inspected

if TYPE_CHECKING:
    from router.store.store import KvStore

log = structlog.get_logger(__name__)

_AT_ONCE = 4  # files that are made
_MANIFESTS = 16  # kept, each with the tokens of a snapshot


class Exchange:
    """Parts of the snapshots that a store holds. Calls raise KvError or KvFileError."""

    def __init__(
        self,
        owner: "KvStore",
        held: Mapping[SnapshotId, StoredSnapshot],
        settings: BlobSettings | None,
        mode: int,
    ) -> None:
        """`settings`: of the tier, if there is one. `mode`: of a file that is made."""
        self._owner = owner
        self._held = held
        self._least_bytes = LEAST_BYTES if settings is None else settings.least_bytes
        self._mode = mode
        # Apart from the threads that read: hosts that wait for each other would wait for ever.
        self.threads = Threads("kv exchange", lambda: None, Tasks().spawn, _AT_ONCE)
        self._manifests: OrderedDict[SnapshotId, Manifest] = OrderedDict()
        self._hashing: dict[SnapshotId, asyncio.Task[None]] = {}

    async def manifest(self, snapshot: SnapshotId, *, hurried: bool = True) -> Manifest:
        """Return the manifest of a snapshot. Not `hurried`: no request waits for it.

        The parts of a whole file are hashed, once for all that ask, also if these give up.
        """
        held = self._held.get(snapshot)
        if held is None:
            self._manifests.pop(snapshot, None)
            raise KvFileError(f"snapshot {snapshot} does not exist")
        if snapshot not in self._manifests:
            if snapshot not in self._hashing:
                work = self._look_up(held, hurried=hurried)
                self._hashing[snapshot] = spawn(work, name=f"kv_manifest {snapshot}")
            await asyncio.wait([self._hashing[snapshot]])
        if snapshot not in self._manifests:
            raise KvFileError(f"snapshot {snapshot} cannot be read")
        self._manifests.move_to_end(snapshot)
        return self._manifests[snapshot]

    async def _look_up(self, held: StoredSnapshot, *, hurried: bool) -> None:
        snapshot, split = held.snapshot.id, held.directory.split
        try:
            if held.snapshot.blobs and split is not None:
                there = split.tier.directory
                name = files.manifest_name(snapshot)
                found = await there.threads.bulk(partial(manifests.read, there.place, name))
            else:
                work = partial(_hashed, held, self._least_bytes)
                threads = held.directory.threads
                found = await (threads.bulk(work) if hurried else threads.unhurried(work))
        except KvError as error:
            log.warning("manifest_not_made", snapshot=snapshot, reason=str(error))
            return
        finally:
            del self._hashing[snapshot]
        self._manifests[snapshot] = found
        while len(self._manifests) > _MANIFESTS:
            self._manifests.popitem(last=False)

    async def part(self, snapshot: SnapshotId, index: int, *, hurried: bool = True) -> memoryview:
        """Return the bytes of one part of a snapshot. Not `hurried`: no request waits for it."""
        manifest = await self.manifest(snapshot)
        if not 0 <= index < len(manifest.blobs):
            raise KvFileError(f"snapshot {snapshot} has {len(manifest.blobs)} parts")
        held = self._held.get(snapshot)
        if held is None:
            raise KvFileError(f"snapshot {snapshot} does not exist")
        work = partial(self._read, snapshot, manifest.part(index), Buffer())
        threads = held.directory.threads
        return await (threads.bulk(work) if hurried else threads.unhurried(work))

    async def receive(
        self,
        manifest: Manifest,
        namespace: Namespace,
        kind: MemoryKind,
        alike: Sequence[SnapshotId],
        reading: BlobReader,
    ) -> Snapshot:
        """Make a snapshot of a manifest and its blobs. Cancelled, no file is left.

        `alike`: snapshots here that begin like it; `reading`: the blobs that are not here.
        """
        local = await self._local(manifest, alike)
        directory = self._owner.kv_directory()
        self._owner.check_budget(directory.kv_dir)
        if directory.threads.hangs:
            raise KvError(f"{directory.kv_dir} does not answer")
        target = directory.path / files.staging_name()
        work = partial(self._assemble, manifest, kind, local, reading, target)
        threads = reading.threads or self.threads
        try:
            found, tokens = await threads.unhurried(work, lambda _: target.unlink(missing_ok=True))
        except asyncio.CancelledError:  # its thread goes on a little
            reading.stop()
            raise
        staged = self._owner.stage(directory.kv_dir, target.name, found)
        try:
            return await self._owner.commit(replace(staged, tokens=tokens), namespace)
        except KvError:
            with suppress(KvError):
                await self._owner.discard(directory.kv_dir, target.name)
            raise

    async def _local(
        self, manifest: Manifest, alike: Sequence[SnapshotId]
    ) -> dict[Blob, tuple[Manifest, int]]:
        """Return where this host has blobs of a manifest: manifests, and which of their parts."""
        wanted = set(manifest.sized)
        found: dict[Blob, tuple[Manifest, int]] = {}
        for name in alike:
            with suppress(KvError):
                own = await self.manifest(name)
                for index, blob in enumerate(own.sized):
                    if blob in wanted:
                        found.setdefault(blob, (own, index))
        return found

    def _read(self, snapshot: SnapshotId, part: Part, buffer: Buffer) -> memoryview:
        """Read one part from the whole file, unchecked, or from the tier. In a thread."""
        held = self._held.get(snapshot)
        if held is None or (held.directory.split is None and not held.snapshot.whole):
            raise KvFileError(f"snapshot {snapshot} does not exist any more")
        if held.snapshot.whole or held.directory.split is None:
            raw = buffer.of(part.blob.size_bytes)
            with files.open_regular(held.path) as file:
                copies.gather(file.fileno(), part.spans, raw)
            return raw
        return held.directory.split.tier.read(part, buffer)

    def _assemble(
        self,
        manifest: Manifest,
        kind: MemoryKind,
        local: Mapping[Blob, tuple[Manifest, int]],
        reading: BlobReader,
        target: Path,
    ) -> tuple[Inspected, Tokens]:
        """Make the file and check it; its host has padded it already. In a thread."""

        def read(part: Part, buffer: Buffer) -> memoryview:
            if part.blob in local:
                own, index = local[part.blob]
                with suppress(KvError, OSError):  # deleted meanwhile, or damaged
                    raw = self._read(own.id, own.part(index), buffer)
                    if blobs.blob_of(raw) == part.blob:
                        return raw
            return reading.read(part.blob, buffer)

        try:
            blobs.assemble(manifest, target, self._mode, read)
            found = shapes.inspect(target, manifest.split.size_bytes, kind)
            tokens = tokens_of(found.head, manifest.media)
            return dataclasses.replace(found, padded=manifest.extendable), tokens
        except BaseException:
            reading.stop()
            target.unlink(missing_ok=True)
            raise


def _hashed(held: StoredSnapshot, least_bytes: int) -> Manifest:
    """Return the manifest of a whole file. Raises KvFileError if it is not as committed."""
    head, plan = plan_of(held.path, held.identity, least_bytes)
    ids, sums = list[Blob](), bytearray()
    for blob, raw in blobs.blobs_in(held.path, held.identity, plan.spans()):
        ids.append(blob)
        sums += blobs.sum_of(raw)
    return manifests.manifest_of(held.snapshot, head, plan, ids, bytes(sums))
