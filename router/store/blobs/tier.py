"""The tier of blobs: snapshots in a directory, split so that equal bytes are stored once.

Owns every file in its directory. `KvStore` decides which snapshots it gets, and when; see
docs/adr/0029. Call all from one event loop. Calls raise KvError or KvFileError.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.shared_bytes import SharedBytes
from router.base.types import Blob, KvDir, Snapshot, SnapshotId
from router.store import files, manifests
from router.store.blobs import blob_files
from router.store.blobs.write_budget import WriteBudget
from router.store.files import Identity
from router.store.format.head import read_head
from router.store.format.layout import OPAQUE, read_layout
from router.store.format.split import LEAST_BYTES, Split, split
from router.store.io_pool import Threads
from router.store.records import KvDirectory, StoredSnapshot

log = structlog.get_logger(__name__)

_READ_AT_ONCE = 100  # manifests in one call in a thread


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
    fsync: bool = True
    least_bytes: int = LEAST_BYTES
    shared: SharedBytes[SnapshotId] = field(default_factory=SharedBytes)
    counts: TierCounts = field(default_factory=TierCounts)
    # A blob that one task finds on disk must not be removed by another before it is in `shared`.
    _changing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def kv_dir(self) -> KvDir:
        """Return the directory, as snapshots name it that have no file elsewhere."""
        return self.directory.kv_dir

    @property
    def _root(self) -> Path:
        return self.directory.path

    def __contains__(self, snapshot: SnapshotId) -> bool:
        return snapshot in self.shared

    async def load(self) -> list[Snapshot]:
        """Read the directory; return the snapshots with all of their blobs. Removes all else."""
        paths = [self._root / name for name in self.directory.names]
        there = await self._threads.unhurried(partial(blob_files.scan, self._root))
        found, leftovers = list[Snapshot](), there.leftovers
        kept: dict[Blob, Blob] = {}  # one object for each, however many manifests name it
        for first in range(0, len(paths), _READ_AT_ONCE):
            some = paths[first : first + _READ_AT_ONCE]
            for snapshot in await self._threads.unhurried(partial(_read_all, some, self.kv_dir)):
                if there.blobs.issuperset(snapshot.blobs):
                    blobs = tuple(kept.setdefault(blob, blob) for blob in snapshot.blobs)
                    self.shared.put(snapshot.id, blobs)
                    found.append(replace(snapshot, blobs=blobs))
                    continue
                log.warning("snapshot_not_recovered", snapshot=snapshot.id, reason="blobs missing")
                leftovers.append(manifests.path_of(self._root, snapshot.id))
        unused = [blob for blob in there.blobs if not self.shared.has(blob)]
        leftovers += [blob_files.path_of(self._root, blob.id) for blob in unused]
        if leftovers:
            await self._threads.unhurried(partial(_remove, leftovers))
            log.info("leftovers_removed", kv_dir=self.kv_dir, files=len(leftovers))
        return found

    async def write(self, held: StoredSnapshot) -> Snapshot:
        """Write the blobs of a state file that are not there yet, and the manifest after them.

        Return the snapshot with its blobs. Raises KvFileError if the file has changed; KvError if
        this directory hangs, or another one took its place.
        """
        snapshot = held.snapshot
        await self._threads.quick(self._check)
        async with self._changing:
            work = partial(self._write, held.path, held.identity, snapshot)
            blobs = await self._threads.unhurried(work)
            self.shared.put(snapshot.id, blobs)
        self.counts.split_bytes += snapshot.size_bytes
        return replace(snapshot, blobs=blobs)

    def _check(self) -> None:
        try:
            self.directory.lock.check()
        except KvFileError as error:  # it is no fault of the state file
            raise KvError(str(error)) from error

    def _write(self, path: Path, identity: Identity, snapshot: Snapshot) -> tuple[Blob, ...]:
        head, plan = plan_of(path, identity, self.least_bytes)
        written = blob_files.write_blobs(
            self._root, path, identity, plan.spans(), fsync=self.fsync, wrote=self._wrote
        )
        manifest = manifests.manifest_of(snapshot, head, plan, written.blobs)
        try:
            size_bytes = manifests.write(self._root, manifest, fsync=self.fsync)
        except OSError:
            _remove(blob_files.path_of(self._root, blob.id) for blob in written.new)
            raise
        self._wrote(size_bytes)
        return written.blobs

    def _wrote(self, size_bytes: int) -> None:
        """Count what was written, also for a snapshot of which nothing stays. In a thread."""
        self.counts.written_bytes += size_bytes

    def assembly(self, snapshot: SnapshotId, target: Path, mode: int) -> Callable[[], Identity]:
        """Return a function for a thread that makes the state file `target`.

        It raises DamagedBlobError, KvFileError, KvError and OSError.
        """
        return partial(_assemble, self._root, snapshot, target, mode)

    async def forget(self, snapshot: SnapshotId) -> None:
        """Remove the manifest of a snapshot at once; its blobs stay until `remove`."""
        path = manifests.path_of(self._root, snapshot)
        await self._threads.unhurried(partial(_remove, [path]))

    async def remove(self, snapshot: SnapshotId) -> None:
        """Remove a snapshot, if it is there: its manifest, then the blobs that no other has."""
        async with self._changing:
            if snapshot not in self.shared:
                return
            unused = self.shared.remove(snapshot)
            paths = [manifests.path_of(self._root, snapshot)]
            paths += [blob_files.path_of(self._root, blob.id) for blob in unused]
            await self._threads.unhurried(partial(_remove, paths))

    async def damaged(self, blob: Blob) -> list[SnapshotId]:
        """Remove a blob if it is damaged; return the snapshots that need it."""
        async with self._changing:  # a split may have found it, or have written it anew
            check = partial(_removed_if_damaged, self._root, blob)
            if not await self._threads.unhurried(check):
                return []
            self.counts.damaged += 1
            log.warning("blob_damaged", blob=blob.id.hex())
            return self.shared.items_with(blob)

    async def note(self, budget: WriteBudget) -> None:
        """Write down for the next run what was written. Raises KvError."""
        await self._threads.quick(self._check)
        await self._threads.unhurried(partial(budget.write, self._root))

    @property
    def _threads(self) -> Threads:
        return self.directory.threads


def _assemble(root: Path, snapshot: SnapshotId, target: Path, mode: int) -> Identity:
    one = manifests.read(manifests.path_of(root, snapshot))
    read = partial(blob_files.read_checked, root)
    return blob_files.assemble(one.head, one.parts, target, one.split.size_bytes, mode, read)


def plan_of(path: Path, expected: Identity, least_bytes: int) -> tuple[bytes, Split]:
    """Return the head of a state file, and how to split the rest of it.

    A memory state that cannot be read is opaque, as it is to the probe of its backend.
    """
    with files.open_regular(path) as file:
        if files.identity_of(file) != expected:
            raise KvFileError(f"{path.name} changed after it was committed")
        head = read_head(file)
        try:
            layout = read_layout(file, head, expected.size_bytes)
        except KvFileError:
            layout = OPAQUE
        file.seek(0)
        return file.read(head.end), split(head.end, layout, expected.size_bytes, least_bytes)


def _read_all(paths: Iterable[Path], kv_dir: KvDir) -> list[Snapshot]:
    """Read manifests; remove those that are damaged. Raises KvError for a later version."""
    found: list[Snapshot] = []
    for path in paths:
        try:
            manifest = manifests.read(path)
            if manifest.file is not None:
                raise KvFileError("it is of a file, in a directory of blobs")
            found.append(manifest.snapshot(kv_dir))
        except KvFileError as error:
            log.warning("manifest_damaged", file=path.name, reason=str(error))
            _remove([path])
    return found


def _remove(paths: Iterable[Path]) -> None:
    """Remove files; one that cannot be removed must not keep the others."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _removed_if_damaged(root: Path, blob: Blob) -> bool:
    """Remove a blob if it is damaged or missing; return whether it is."""
    if not blob_files.is_damaged(root, blob):
        return False
    with suppress(OSError):
        blob_files.unlink(root, blob.id)
    return True
