"""Stores with a tier of blobs, what they tell, and state files of each memory kind."""

import asyncio
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.base.types import KvDir, MemoryKind, Namespace, Snapshot, SnapshotId
from router.store.blobs.split_snapshots import BlobSettings
from router.store.listener import StoreListener
from router.store.store import KvStore
from tests.support.files.state_files import full

NAMESPACE = Namespace("n")


def state(n: int, salt: int = 0) -> bytes:
    """Return a state of `n` tokens; with another `salt` the tokens after the 512th are others."""
    ids = [*range(min(n, 512)), *(1000 + salt + i for i in range(n - 512))]
    rows = dict(enumerate(ids))
    return full(ids, row=8, cell=lambda s, p: struct.pack("<HHI", s, p, rows[p]))


@dataclass
class Told(StoreListener):
    """A listener that notes what a store tells; `worth` is what it answers."""

    now: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    worthless: set[SnapshotId] | None = None  # None: all or none, as `worth` says
    gone: list[SnapshotId] = field(default_factory=list)
    told: asyncio.Event = field(default_factory=asyncio.Event)
    worth: bool = True

    def stored(self, snapshot: Snapshot) -> None:
        self.now[snapshot.id] = snapshot
        self.told.set()

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        self.gone.append(snapshot.id)
        self.told.set()

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        return self.worth if self.worthless is None else snapshot not in self.worthless


@dataclass
class Place:
    """A KV directory in memory and one of blobs on a disk, and the stores over them."""

    kv: Path
    blobs: Path
    open: list[KvStore] = field(default_factory=list)

    @property
    def kv_dir(self) -> KvDir:
        return KvDir(str(self.kv))

    async def store(self, **settings: Any) -> tuple[KvStore, Told, list[Snapshot]]:
        """Open a store; by default it splits at once, and keeps no whole file."""
        given = {"write_after_s": 0.0, "whole_bytes": 0, "least_bytes": 1} | settings
        store = KvStore(
            [KvDir(str(self.kv))],
            wall_now=lambda: 1.5,
            blobs=BlobSettings(KvDir(str(self.blobs)), **given),
        )
        noting = Told()
        store.listener = noting
        self.open.append(store)
        found = await store.load()
        store._directories[KvDir(str(self.kv))].on_disk = False
        return store, noting, found

    async def put(self, store: KvStore, raw: bytes, kind: MemoryKind | None = None) -> Snapshot:
        name = store.staging_name()
        (self.kv / name).write_bytes(raw)
        staged = await store.verify(KvDir(str(self.kv)), name, len(raw), kind)
        return await store.commit(staged, NAMESPACE)

    async def read(self, store: KvStore, snapshot: Snapshot, n_stream: int = 1) -> bytes:
        """Return what a backend would read."""
        kv_dir = KvDir(str(self.kv))
        name = await store.open(snapshot, kv_dir, n_stream)
        try:
            return (self.kv / name).read_bytes()
        finally:
            await store.close(snapshot, kv_dir, name)

    def whole(self) -> list[str]:
        return [path.name for path in self.kv.iterdir() if path.suffix == ".kv"]

    def disk(self) -> set[str]:
        """Return the names of all files of the tier."""
        files = (path.name for path in self.blobs.rglob("*") if path.is_file())
        return {name for name in files if name not in ("kvferry.lock", "written.json")}


async def write_out(store: KvStore) -> None:
    """Split all files now that memory may lose."""
    for split in store._splits.values():
        await split.finish()


def written_bytes(store: KvStore) -> int:
    status = store.tier_status()
    assert status is not None
    return status.written_bytes


async def until(noting: Told, snapshot: Snapshot, *, whole: bool = False) -> Snapshot:
    """Wait until a snapshot is split, and has its whole file or has it no more."""
    async with asyncio.timeout(30):
        while True:
            noting.told.clear()
            now = noting.now.get(snapshot.id)
            if now is not None and now.blobs and now.whole is whole:
                return now
            await noting.told.wait()
