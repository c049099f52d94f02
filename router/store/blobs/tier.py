"""The tier of blobs: snapshots in a directory, split so that equal bytes are stored once.

Owns every file in its directory. `KvStore` decides which snapshots it gets, and when; see
docs/adr/0029. Call all from one event loop. Calls raise KvError or KvFileError.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from msgspec.structs import replace
from pyfastcdc import FastCDC

from router.base.errors import KvError, KvFileError
from router.base.shared_bytes import SharedBytes
from router.base.types import Blob, KvDir, Snapshot, SnapshotId
from router.store import files, manifests
from router.store.blobs import blobs
from router.store.blobs.blobs import local_name
from router.store.blobs.buffer import Buffer
from router.store.blobs.write_budget import WriteBudget
from router.store.files import Identity
from router.store.format.head import read_head
from router.store.format.layout import read_layout
from router.store.format.split import LEAST_BYTES, Split, split
from router.store.manifests import Part
from router.store.records import KvDirectory, StoredSnapshot

log = structlog.get_logger(__name__)

_READ_AT_ONCE = 100  # manifests in one call in a thread
# Of a usual blob of a state that is not understood; a fourth to four times as many. Smaller ones
# share more, and take more memory: 200 MB are 400 blobs.
OPAQUE_BYTES = 512 << 10


@dataclass(slots=True)
class TierCounts:
    """What the tier has done since its start."""

    written_bytes: int = 0  # blobs and manifests
    split_bytes: int = 0  # state files, as they were before
    damaged: int = 0  # blobs


@dataclass(slots=True)
class BlobTier:
    """All manifests and blobs of one directory, which is locked while it is open."""

    directory: KvDirectory
    least_bytes: int = LEAST_BYTES
    shared: SharedBytes[SnapshotId] = field(default_factory=SharedBytes)
    counts: TierCounts = field(default_factory=TierCounts)
    # A blob that one task finds on disk must not be removed by another before it is in `shared`.
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def kv_dir(self) -> KvDir:
        """Return the directory, as snapshots name it that have no file elsewhere."""
        return self.directory.kv_dir

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self.shared

    async def load(self) -> list[Snapshot]:
        """Read the directory; return the snapshots with all of their blobs. Removes all else."""
        there = await self.directory.threads.unhurried(partial(blobs.scan, self.directory.place))
        found, leftovers, names = list[Snapshot](), there.leftovers, self.directory.names
        for first in range(0, len(names), _READ_AT_ONCE):
            some = names[first : first + _READ_AT_ONCE]
            for snapshot in await self.directory.threads.unhurried(partial(self._read_all, some)):
                if there.blobs.issuperset(snapshot.blobs):
                    held = self.shared.put(snapshot.id, snapshot.blobs)
                    found.append(replace(snapshot, blobs=held))
                    continue
                log.warning("snapshot_not_recovered", snapshot=snapshot.id, reason="blobs missing")
                leftovers.append(files.manifest_name(snapshot.id))
        leftovers += [local_name(blob) for blob in there.blobs if not self.shared.has(blob)]
        if leftovers:
            await self.directory.threads.unhurried(partial(self._delete, leftovers))
            log.info("leftovers_removed", kv_dir=self.kv_dir, files=len(leftovers))
        return found

    def _read_all(self, names: Iterable[str]) -> list[Snapshot]:
        """Read manifests; remove those that are damaged. Raises KvError for a later version."""
        found: list[Snapshot] = []
        for name in names:
            try:
                manifest = manifests.read(self.directory.place, name)
                if manifest.file is not None:
                    raise KvFileError("it is of a file, in a directory of blobs")
                found.append(manifest.snapshot(self.kv_dir))
            except KvFileError as error:
                log.warning("manifest_damaged", file=name, reason=str(error))
                self._delete([name])
        return found

    def _delete(self, names: Sequence[str]) -> None:
        """Delete files; what cannot be deleted is found at the next start."""
        with suppress(KvError):
            self.directory.place.delete(names)

    async def write(self, held: StoredSnapshot) -> Snapshot:
        """Write the blobs of a state file that are not there yet, and the manifest after them.

        Return the snapshot with its blobs. Raises KvFileError if the file has changed; KvError if
        this directory hangs, or another one took its place.
        """
        snapshot = held.snapshot
        await self.directory.threads.quick(self._check)
        async with self._changing:
            work = partial(self._write, held.path, held.identity, snapshot)
            written = await self.directory.threads.unhurried(work)
            written = self.shared.put(snapshot.id, written)
        self.counts.split_bytes += snapshot.size_bytes
        return replace(snapshot, blobs=written)

    def _check(self) -> None:
        try:
            self.directory.lock.check()
        except KvFileError as error:  # it is no fault of the state file
            raise KvError(str(error)) from error

    def _write(self, path: Path, identity: Identity, snapshot: Snapshot) -> tuple[Blob, ...]:
        head, plan = plan_of(path, identity, self.least_bytes)
        written = blobs.write_blobs(self.directory.place, path, identity, plan.spans(), self._wrote)
        manifest = manifests.manifest_of(snapshot, head, plan, written.blobs, written.sums)
        try:
            self._wrote(manifests.write(self.directory.place, manifest))
        except KvError:
            self._delete([local_name(blob) for blob in written.new])
            raise
        return written.blobs

    def _wrote(self, size_bytes: int) -> None:
        """Count what was written, also for a snapshot of which nothing stays. In a thread."""
        self.counts.written_bytes += size_bytes

    def assembly(self, snapshot: SnapshotId, target: Path, mode: int) -> Callable[[], Identity]:
        """Return a function for a thread that makes the state file `target`.

        It raises BlobError, KvFileError, KvError and OSError.
        """

        def work() -> Identity:
            manifest = manifests.read(self.directory.place, files.manifest_name(snapshot))
            return blobs.assemble(manifest, target, mode, self.read)

        return work

    def read(self, part: Part, buffer: Buffer) -> memoryview:
        """Return the bytes of a blob, checked; valid until the next use of `buffer`.

        In a thread. Raises KvError, BlobError.
        """
        name = local_name(part.blob)
        return blobs.read(self.directory.place, name, part.blob, buffer, known=part.known)

    async def forget(self, snapshot: SnapshotId) -> None:
        """Remove the manifest of a snapshot at once; its blobs stay until `remove`.

        Raises KvError: the next start would find the snapshot.
        """
        manifest = files.manifest_name(snapshot)
        await self.directory.threads.unhurried(partial(self.directory.place.delete, [manifest]))

    async def remove(self, snapshot: SnapshotId) -> None:
        """Remove a snapshot, if it is there: its manifest, then the blobs that no other has.

        Raises KvError.
        """
        async with self._changing:
            if snapshot not in self.shared:
                return
            unused = self.shared.remove(snapshot)
            names = [files.manifest_name(snapshot), *map(local_name, unused)]
            await self.directory.threads.unhurried(partial(self.directory.place.delete, names))

    async def damaged(self, blob: Blob) -> list[SnapshotId]:
        """Remove a blob if it is damaged; return the snapshots that need it."""
        async with self._changing:  # a split may have found it, or have written it anew
            if not await self.directory.threads.unhurried(partial(self._removed_if_damaged, blob)):
                return []
            self.counts.damaged += 1
            log.warning("blob_damaged", blob=blob.id.hex())
            return self.shared.items_with(blob)

    def _removed_if_damaged(self, blob: Blob) -> bool:
        try:
            blobs.read(self.directory.place, local_name(blob), blob, Buffer())
        except KvFileError:
            self._delete([local_name(blob)])
            return True
        return False

    async def note(self, budget: WriteBudget) -> None:
        """Write down for the next run what was written. Raises KvError."""
        await self.directory.threads.quick(self._check)
        await self.directory.threads.unhurried(partial(budget.write, self.directory.path))


def plan_of(path: Path, expected: Identity, least_bytes: int) -> tuple[bytes, Split]:
    """Return the head of a state file, and how to split the rest of it.

    A memory state that cannot be read is opaque, as it is to the probe of its backend. It is cut
    where its bytes say so: tokens that were there before have the same bytes, somewhere else.
    """
    with files.open_regular(path) as file:
        if files.identity_of(file) != expected:
            raise KvFileError(f"{path.name} changed after it was committed")
        head = read_head(file)
        start, size_bytes = head.end, expected.size_bytes
        try:
            plan = split(start, read_layout(file, head, size_bytes), size_bytes, least_bytes)
        except KvFileError:
            file.seek(start)
            cuts = FastCDC(OPAQUE_BYTES).cut_stream(file)
            plan = Split(start, size_bytes, (), tuple(cut.offset + cut.length for cut in cuts))
            plan.check()  # it may have grown
        file.seek(0)
        return file.read(start), plan
