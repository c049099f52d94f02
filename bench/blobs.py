"""`python -m bench.blobs`: what a restore from blobs costs.

A made-up state of an 8B model's shape (`--layers 32`) is saved to a KV directory in memory and
split to blobs on a disk; its file is assembled from them, and copied in the same turn: warm, and
after the page cache was dropped. The longest iteration of the event loop meanwhile. No llama-server
takes part: the store is told that one wrote the file.
"""

import argparse
import asyncio
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.report import Report, arguments_of, median, run_bench
from router.base.clock import wall_now
from router.base.types import KvDir, Namespace, Snapshot, SnapshotId
from router.store import files
from router.store.blobs.blobs import local_name
from router.store.blobs.split_snapshots import BlobSettings
from router.store.listener import StoreListener
from router.store.store import KvStore
from tests.support.files.state_files import head, i32, u32

COLUMNS = ("part", "n", "GiB", "p50 s", "x copy", "worst loop ms")
_ROW = 2048  # bytes of one layer in a cell: 8 KV heads of 128, f16
_NAMESPACE = Namespace("bench")
_GIB = 2**30
_LOOP_S = 0.002


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.blobs", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the state")
    parser.add_argument("--rounds", type=int, default=9, help="of each restore")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="for KV directories")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="for blobs")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure restores."""
    report = Report("blobs", "Blobs", list(COLUMNS), arguments_of(options))
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.memory) as memory,
        tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.disk) as disk,
    ):
        await _restore(report, options, Path(memory) / "kv", Path(disk) / "blobs")
    bytes_per_token = 2 * options.layers * _ROW
    report.notes.append(f"{options.layers} layers of K and V: {bytes_per_token >> 10} KiB a token")
    return report


@dataclass(slots=True)
class _Listening(StoreListener):
    """A listener that wants everything written, and notes what was."""

    now: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        raise RuntimeError(f"{snapshot.id}: {reason}")

    def stored(self, snapshot: Snapshot) -> None:
        self.now[snapshot.id] = snapshot
        self.told.set()


@dataclass(slots=True)
class _Place:
    """A store, and a maker of the state files that llama-server would write."""

    store: KvStore
    listening: _Listening
    kv: Path
    layers: int

    async def save(self, n_tokens: int) -> Snapshot:
        """Let a state be saved."""
        name = self.store.staging_name()
        await asyncio.to_thread(_write, self.kv / name, n_tokens, self.layers)
        size = (self.kv / name).stat().st_size
        staged = await self.store.verify(KvDir(str(self.kv)), name, size)
        return await self.store.commit(staged, _NAMESPACE)

    async def split(self, snapshot: Snapshot) -> Snapshot:
        """Return a snapshot when it is split and its whole file is dropped."""
        while (now := self.listening.now.get(snapshot.id, snapshot)).whole:
            self.listening.told.clear()
            await self.listening.told.wait()
        return now

    def path(self, snapshot: Snapshot) -> Path:
        return self.kv / files.final_name(snapshot.id)


async def _restore(report: Report, options: argparse.Namespace, kv: Path, blobs: Path) -> None:
    """Assemble one state, and copy its file in turn with that: from the disk into memory."""
    settings = BlobSettings(KvDir(str(blobs)), 0.0, 0)
    store = KvStore([KvDir(str(kv))], wall_now=wall_now, blobs=settings)
    store.listener = listening = _Listening()
    await store.load()
    place = _Place(store, listening, kv, options.layers)
    snapshot = await place.save(options.prompt)
    whole = blobs.parent / "whole"
    files.copy(place.path(snapshot), whole, files.identity(place.path(snapshot)))
    split = await place.split(snapshot)
    parts = [blobs / local_name(blob) for blob in split.blobs]
    for cold in (False, True):
        ours: list[float] = []
        theirs: list[float] = []
        loop = _Loop()
        for _ in range(options.rounds + 1):
            _drop(parts if cold else [])
            start = time.perf_counter()
            async with loop:
                name = await place.store.open(split, KvDir(str(kv)), 1)
            ours.append(time.perf_counter() - start)
            await place.store.close(split, KvDir(str(kv)), name)
            _drop([whole] if cold else [])
            target = kv / "copy"
            start = time.perf_counter()
            await asyncio.to_thread(files.copy, whole, target, files.identity(whole))
            theirs.append(time.perf_counter() - start)
            target.unlink()
        ratio = median([a / b for a, b in zip(ours[1:], theirs[1:], strict=True)])
        report.add(
            "restore cold" if cold else "restore warm",
            options.rounds,
            snapshot.size_bytes / _GIB,
            median(ours[1:]),
            ratio,
            loop.worst,
        )
    await place.store.aclose()


def _drop(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


class _Loop:
    """Measures the longest iteration of the event loop while it is entered, in milliseconds."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(_LOOP_S)
            self.worst = max(self.worst, (time.perf_counter() - start - _LOOP_S) * 1000)


def _write(path: Path, n_tokens: int, layers: int) -> None:
    """Write a state file with random rows."""
    cells = b"".join(i32(position, 1, 0) for position in range(n_tokens))
    noise = os.urandom(_ROW * n_tokens)
    with path.open("wb") as file:
        file.write(head(range(n_tokens)) + u32(1, n_tokens) + cells + u32(0, layers, 0, 0))
        for section in range(2 * layers):
            file.write(i32(1) + struct.pack("<Q", _ROW))
            file.write(struct.pack("<I", section) + noise[4:])


if __name__ == "__main__":
    sys.exit(main())
