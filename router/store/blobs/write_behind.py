"""Write snapshots from their KV directories to the tier of blobs, and drop whole files.

Off the path of every request: one file at a time, when it is due (`whole_files.py`).
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import structlog

from router.base.errors import KvError
from router.base.types import KvDir, SnapshotId
from router.store.blobs.tier import BlobTier
from router.store.blobs.whole_files import WholeFiles
from router.store.blobs.write_budget import WriteBudget
from router.store.records import StoredSnapshot

log = structlog.get_logger(__name__)

# Seconds until a file is tried again that could not be written: a full disk, or no budget left.
_AGAIN_S = 60.0


class Owner(Protocol):
    """The store: the owner of all snapshots."""

    def hangs(self, kv_dir: KvDir) -> bool:
        """Return whether a KV directory, or that of the blobs, does not answer."""

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        """Return whether the snapshot would be kept: not the next one to be evicted."""

    async def write_blobs(self, snapshot: SnapshotId) -> None:
        """Write the blobs of a whole file. Raises KvError."""

    async def drop_whole(self, snapshot: SnapshotId) -> None:
        """Delete a whole file whose blobs are written. Raises KvError."""

    async def give_up(self, snapshot: SnapshotId, reason: str) -> None:
        """Delete a snapshot for which there is no room. Raises KvError."""


@dataclass(slots=True)
class WriteBehind:
    """The whole files of all KV directories; `run` writes their blobs and drops them."""

    tier: BlobTier
    budget: WriteBudget
    after_s: float
    owner: Owner
    in_use: Collection[SnapshotId]  # whole files that are being read
    directories: dict[KvDir, WholeFiles] = field(default_factory=dict)
    put_off: int = 0  # writes: no budget or no room, or the snapshot would soon be evicted
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, held: StoredSnapshot) -> None:
        """Note a whole file: a new one, one found at the start, or one whose blobs are damaged."""
        snapshot = held.snapshot
        due = None if snapshot.blobs else _now() + self.after_s
        self._files(held).add(snapshot.id, snapshot.size_bytes, due)
        self._wake.set()

    def used(self, held: StoredSnapshot) -> None:
        """Note that a whole file was read."""
        self._files(held).use(held.snapshot.id)

    def gone(self, held: StoredSnapshot) -> None:
        """Note that a whole file is deleted."""
        self._files(held).drop(held.snapshot.id)

    def _files(self, held: StoredSnapshot) -> WholeFiles:
        # A directory may be open under two names: that of the snapshot may be the other one.
        return self.directories[held.directory.kv_dir]

    def stop(self) -> None:
        """Let `run` end after what it is doing: a thread that writes cannot be cancelled."""
        self._over.set()
        self._wake.set()

    async def run(self) -> None:
        """Write and drop files until `stop`."""
        while not self._over.is_set():
            self._wake.clear()
            for kv_dir, files in tuple(self.directories.items()):
                while self._goes_on(kv_dir) and await self._step(files):
                    pass
            due = min((files.wakeup() for files in self.directories.values()), default=inf)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due == inf else max(due - _now(), 0)):
                    await self._wake.wait()

    def _goes_on(self, kv_dir: KvDir) -> bool:
        return not (self._over.is_set() or self.owner.hangs(kv_dir))

    async def finish(self) -> None:
        """Write all files that are not written: the router ends, and memory may be lost."""
        for files in self.directories.values():
            for snapshot in files.unwritten():
                if files.is_unwritten(snapshot):  # `run` may have written it meanwhile
                    await self._write(files, snapshot)

    async def _step(self, files: WholeFiles) -> bool:
        """Drop or write one file; return whether there may be more to do."""
        if snapshot := files.to_drop(self.in_use):
            files.drop(snapshot)
            with suppress(KvError):
                await self.owner.drop_whole(snapshot)
            return True
        snapshot = files.to_write(_now())
        if snapshot is None:
            return False
        if await self._write(files, snapshot):
            return True
        if not self.owner.is_worth_writing(snapshot) and snapshot not in self.in_use:
            return files.is_full and await self._give_up(files, snapshot)
        return await self._give_up(files, files.to_give_up(self.in_use))

    async def _write(self, files: WholeFiles, snapshot: SnapshotId) -> bool:
        """Write one file; return False if that has to wait."""
        problem = ""
        if not self.budget.left_bytes:
            problem = "as much was written as is allowed in a day"
        elif self.owner.is_worth_writing(snapshot):
            before = self.tier.counts.written_bytes
            try:
                await self.owner.write_blobs(snapshot)
                files.written(snapshot)
                return True
            except KvError as error:
                problem = str(error)
            finally:
                self.budget.spend(self.tier.counts.written_bytes - before)
                with suppress(KvError):  # a restart then allows these bytes once more
                    await self.tier.note(self.budget)
        if problem:
            log.warning("write_put_off", snapshot=snapshot, reason=problem)
        self.put_off += 1
        files.put_off(snapshot, _now() + _AGAIN_S)
        return False

    async def _give_up(self, files: WholeFiles, snapshot: SnapshotId | None) -> bool:
        """Delete a file to make room; return whether there was one."""
        if snapshot is None:
            return False
        files.drop(snapshot)
        with suppress(KvError):
            await self.owner.give_up(snapshot, "no room for it, and it could not be written")
        return True


def _now() -> float:
    return asyncio.get_running_loop().time()
