"""`python -m bench.blobs`: what blobs spare the disk, and what they cost a restore.

Made-up states of an 8B model's shape (`--layers 32`), saved to a KV directory in memory and split
to blobs on a disk. No llama-server takes part: the store is told that one wrote each file.

1. shared: conversations on one system prompt. Bytes on disk against unique bytes.
2. day: agents, whose state grows turn by turn; several turns within `write_after`. Bytes written to
   the disk, as /proc counts them, against the bytes of all state files.
3. restore: a state file assembled from its blobs, against a copy of it in the same turn; warm, and
   after the page cache was dropped. The longest iteration of the event loop meanwhile.
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
from typing import BinaryIO

from bench.report import Report, arguments_of, median, run_bench
from router.base.clock import wall_now
from router.base.types import KvDir, Namespace, Snapshot, SnapshotId
from router.store import files
from router.store.blobs import blob_files
from router.store.blobs.split_snapshots import BlobSettings
from router.store.format.head import read_head
from router.store.format.layout import read_layout
from router.store.store import KvStore
from tests.support.files.state_files import head, i32, u32

COLUMNS = ("part", "n", "GiB of files", "GiB", "share", "p50 s", "x copy", "worst loop ms")
_ROW = 2048  # bytes of one layer in a cell: 8 KV heads of 128, f16
_NAMESPACE = Namespace("bench")
_GIB = 2**30
_LOOP_S = 0.002


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.blobs", description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the system prompt")
    parser.add_argument("--own", type=int, default=256, help="tokens of each conversation after it")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--turns", type=int, default=30, help="of each agent")
    parser.add_argument("--growth", type=int, default=512, help="new tokens of a turn")
    parser.add_argument("--at-once", type=int, default=6, help="turns within `write_after`")
    parser.add_argument("--rounds", type=int, default=9, help="of each restore")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="for KV directories")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="for blobs")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure the three parts, each with directories of its own."""
    report = Report("blobs", "Blobs", list(COLUMNS), arguments_of(options))
    for part in (_shared, _day, _restore):
        with (
            tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.memory) as memory,
            tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.disk) as disk,
        ):
            await part(report, options, Path(memory) / "kv", Path(disk) / "blobs")
    bytes_per_token = 2 * options.layers * _ROW
    report.notes.append(f"{options.layers} layers of K and V: {bytes_per_token >> 10} KiB a token")
    report.notes.append("worst loop of shared and day: beside the thread that makes the files")
    report.notes.append("share: of unique bytes on disk (shared), of the files' bytes (day)")
    return report


@dataclass(slots=True)
class _Listening:
    """A listener that wants everything written, and notes what was."""

    now: dict[SnapshotId, Snapshot] = field(default_factory=dict)
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        raise RuntimeError(f"{snapshot.id}: {reason}")

    def stored(self, snapshot: Snapshot) -> None:
        self.now[snapshot.id] = snapshot
        self.told.set()

    def is_worth_writing(self, _: SnapshotId) -> bool:
        return True

    async def found(self, snapshots: list[Snapshot]) -> None: ...


@dataclass(slots=True)
class _Place:
    """A store, and a maker of the state files that llama-server would write."""

    store: KvStore
    listening: _Listening
    kv: Path
    layers: int

    async def save(
        self, tokens: Sequence[int], keep: int = 0, source: Path | None = None
    ) -> Snapshot:
        """Let a state be saved; its first `keep` rows are those of `source`, if there is one."""
        name = self.store.staging_name()
        await asyncio.to_thread(_write, self.kv / name, tokens, self.layers, keep, source)
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


async def _place(
    kv: Path, blobs: Path, layers: int, write_after_s: float, whole_bytes: int
) -> _Place:
    settings = BlobSettings(KvDir(str(blobs)), write_after_s, whole_bytes)
    store = KvStore([KvDir(str(kv))], wall_now=wall_now, blobs=settings)
    store.listener = listening = _Listening()
    await store.load()
    return _Place(store, listening, kv, layers)


async def _shared(report: Report, options: argparse.Namespace, kv: Path, blobs: Path) -> None:
    """Save one conversation after the other, all on one system prompt; each is split at once."""
    place = await _place(kv, blobs, options.layers, 0.0, 0)
    prompt = list(range(options.prompt))
    base = kv.parent / "base"
    _write(base, prompt, options.layers, 0, None)
    loop = _Loop()
    summed = heads = 0
    async with loop:
        for number in range(options.conversations):
            own = [1_000_000 + number * options.own + at for at in range(options.own)]
            snapshot = await place.save(prompt + own, len(prompt), base)
            summed += snapshot.size_bytes
            heads += 4 * len(snapshot)
            await place.split(snapshot)
    await place.store.aclose()
    row = 2 * options.layers * _ROW
    unique = row * (options.prompt + options.own * options.conversations) + heads
    on_disk = _disk_bytes(blobs)
    share = on_disk / unique
    report.add(
        "shared",
        options.conversations,
        summed / _GIB,
        on_disk / _GIB,
        share,
        None,
        None,
        loop.worst,
    )


def _disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


async def _day(report: Report, options: argparse.Namespace, kv: Path, blobs: Path) -> None:
    """Let agents take turns; the state before is deleted when the next one is there.

    The wait is shortened as the turns are: `at_once` of an agent's turns come within it.
    """
    place = await _place(kv, blobs, options.layers, 1e9, 12 * _GIB)
    before, summed, loop = _written_bytes(), 0, _Loop()
    held: dict[int, Snapshot] = {}
    async with loop:
        for turn in range(options.turns):
            for agent in range(options.agents):
                n = options.prompt + turn * options.growth
                tokens = [*range(options.prompt), *range((agent + 1) << 20, (agent + 1 << 20) + n)]
                tokens = tokens[:n]
                last = held.get(agent)
                source = None if last is None else kv.parent / f"agent{agent}"
                snapshot = await place.save(tokens, 0 if last is None else len(last), source)
                summed += snapshot.size_bytes
                keep = kv.parent / f"agent{agent}"
                await asyncio.to_thread(_keep, place.path(snapshot), keep)
                if last is not None:
                    await place.store.delete(last)
                held[agent] = snapshot
            if turn % options.at_once == options.at_once - 1:
                await place.store.write_out()
    await place.store.aclose()
    os.sync()
    written = _written_bytes() - before
    n = options.agents * options.turns
    report.add("day", n, summed / _GIB, written / _GIB, written / summed, None, None, loop.worst)


def _keep(path: Path, name: Path) -> None:
    """Keep a file under another name: the store deletes it. Frees gigabytes of the one before."""
    name.unlink(missing_ok=True)
    os.link(path, name)


def _written_bytes() -> int:
    """Return the bytes that this process has sent to a block device, so far."""
    text = Path("/proc/self/io").read_text()
    return int(dict(line.split(": ") for line in text.splitlines())["write_bytes"])


async def _restore(report: Report, options: argparse.Namespace, kv: Path, blobs: Path) -> None:
    """Assemble one state, and copy its file in turn with that: from the disk into memory."""
    place = await _place(kv, blobs, options.layers, 0.0, 0)
    snapshot = await place.save(range(options.prompt))
    whole = blobs.parent / "whole"
    files.copy(place.path(snapshot), whole, files.identity(place.path(snapshot)))
    split = await place.split(snapshot)
    parts = [blob_files.path_of(blobs, blob.id) for blob in split.blobs]
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
            None,
            None,
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


def _write(path: Path, tokens: Sequence[int], layers: int, keep: int, source: Path | None) -> None:
    """Write a state file. Rows are random; the first `keep` of each section are those of `source`.

    Equal bytes have to come from an equal file, as they come from a restored state.
    """
    n = len(tokens)
    cells = b"".join(i32(position, 1, 0) for position in range(n))
    noise = os.urandom(_ROW * (n - keep))
    with path.open("wb") as file, (source or Path(os.devnull)).open("rb") as old:
        offsets = _sections(old) if source is not None else []
        file.write(head(tokens) + u32(1, n) + cells + u32(0, layers, 0, 0))
        for section in range(2 * layers):
            file.write(i32(1) + struct.pack("<Q", _ROW))
            if offsets:
                old.seek(offsets[section])
                file.write(old.read(keep * _ROW))
            file.write(struct.pack("<I", section) + noise[4:])


def _sections(file: BinaryIO) -> list[int]:
    """Return where the rows of each section begin, K of all layers first."""
    size = file.seek(0, os.SEEK_END)
    stream = read_layout(file, read_head(file), size).attention[0].streams[0]
    return [section.offset for section in (*stream.k, *stream.v)]


if __name__ == "__main__":
    sys.exit(main())
