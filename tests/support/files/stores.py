"""Stores and the files that a backend would write, for the tests of `router.store.store`."""

import asyncio
import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.base.types import KvDir, Namespace, Snapshot
from router.store.listener import StoreListener
from router.store.store import KvStore
from tests.support.files.state_files import full

TOKENS = [5, 6, 7, 8]
NAMESPACE = Namespace("n")


@dataclass
class Noting(StoreListener):
    """A listener that notes what a store tells."""

    gone: list[tuple[Snapshot, str]] = field(default_factory=list)
    back: list[list[Snapshot]] = field(default_factory=list)

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        self.gone.append((snapshot, reason))

    async def found(self, snapshots: list[Snapshot]) -> None:
        self.back.append(snapshots)


@dataclass
class Stores:
    """A maker of stores over the same directories, as if the router was started again."""

    kv_dirs: tuple[KvDir, ...]
    lost: list[tuple[Snapshot, str]] = field(default_factory=list)
    _open: list[KvStore] = field(default_factory=list)

    def make(self, *kv_dirs: KvDir, fsync: bool = True) -> KvStore:
        store = KvStore(kv_dirs or self.kv_dirs[:1], wall_now=lambda: 1.5, fsync=fsync)
        store.listener = Noting(self.lost)
        self._open.append(store)
        return store

    async def restart(self, store: KvStore) -> tuple[KvStore, list[Snapshot]]:
        await store.aclose()
        again = self.make(*store._kv_dirs)
        return again, await again.load()

    async def aclose(self) -> None:
        for store in self._open:
            await store.aclose()


def write(store: KvStore, raw: bytes = full(TOKENS), kv_dir: KvDir | None = None) -> str:
    """Play the backend: write a state file under a staging name."""
    name = store.staging_name()
    Path(kv_dir or store._kv_dirs[0], name).write_bytes(raw)
    return name


async def put(store: KvStore, raw: bytes = full(TOKENS)) -> Snapshot:
    kv_dir = store._kv_dirs[0]
    staged = await store.verify(kv_dir, write(store, raw), len(raw))
    return await store.commit(staged, NAMESPACE)


def names(store: KvStore) -> set[str]:
    """Return the files in the first KV directory, without the lock and the records."""
    found = os.listdir(store._kv_dirs[0])
    return {n for n in found if not (n.startswith("kvferry.") or ".json" in n or ".manifest" in n)}


def path(snapshot: Snapshot) -> Path:
    return Path(snapshot.kv_dir, f"kvf-{snapshot.id}.kv")


def touch(file: Path) -> None:
    """Give the same bytes another modification time."""
    os.utime(file, ns=(1, 1))


def enospc(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def at(kv_dir: KvDir, name: str = "") -> Path:
    """Return a path in a KV directory."""
    return Path(kv_dir, name)


async def cancel_inside(monkeypatch: pytest.MonkeyPatch, function: str, coro: Any) -> None:
    """Cancel `coro` while a thread of the store is inside `os.function`."""
    loop, inside, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    real = getattr(os, function)

    async def wait() -> None:
        await go.wait()

    def held(*args: Any, **named: Any) -> Any:
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(wait(), loop).result(10)
        return real(*args, **named)

    monkeypatch.setattr(os, function, held)
    task = asyncio.get_running_loop().create_task(coro)
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
