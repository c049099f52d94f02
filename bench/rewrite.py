"""`python -m bench.rewrite`: rewriting a state file, against `cp` of as many bytes.

The files are of a made-up model, on disk and in the page cache. Each change alternates with `cp` of
the bytes that it has to write. The start of the `cp` process is measured too, and subtracted.
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.report import Report, arguments_of, median, run_bench
from router.store import files
from router.store.format.head import read_head
from router.store.format.layout import read_layout
from router.store.format.rewrite import Rewrite, cut, pad, restream

COLUMNS = ("V", "change", "MiB", "pieces", "n", "p50 ms", "cp p50 ms", "x cp")
_LAYERS = 32
_ROW = 2048  # bytes of one layer in a cell: 8 KV heads of 128, f16
_CHUNK = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.rewrite", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="of each change")
    parser.add_argument("--tokens", type=int, default=8_000, help="of the state")
    return run_bench(parser, measure, argv)


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    source: Path
    rewrite: Rewrite
    in_place: bool = False

    @property
    def written(self) -> int:
        """Return the bytes that have to be written."""
        return self.rewrite.size_bytes - (self.rewrite.start if self.in_place else 0)


def measure(options: argparse.Namespace) -> Report:
    """Measure all changes on both kinds of file."""
    report = Report("rewrite", "Rewriting against cp", list(COLUMNS), arguments_of(options))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=Path.cwd()) as name:
        home = Path(name)
        for v_trans in (False, True):
            full, window = home / "full", home / "window"
            _write(full, options.tokens, _LAYERS, (), v_trans=v_trans)
            # A window far larger than any model's, for a measurable time.
            _write(window, options.tokens, 1, (_LAYERS, options.tokens // 2), v_trans=v_trans)
            for change in _changes(full, window):
                ours, theirs = _turns(change, home, options.rounds)
                copied = median(theirs)
                report.add(
                    "transposed" if v_trans else "plain",
                    change.name,
                    round(change.written / 2**20),
                    len(change.rewrite.pieces),
                    options.rounds,
                    median(ours) * 1000,
                    copied * 1000,
                    median(ours) / copied,
                )
    report.notes.append("p50: reading the cells, planning, writing; cp: without its start")
    report.notes.append(
        f"{_LAYERS} layers of 2 x {_ROW} bytes a cell; the window is half of the tokens"
    )
    return report


def _changes(full: Path, window: Path) -> Iterator[_Change]:
    yield _Change("restream", full, plan(full, "restream"))
    yield _Change("cut to half", full, plan(full, "cut to half"))
    yield _Change("pad in place", window, plan(window, "pad in place"), in_place=True)


def plan(path: Path, name: str) -> Rewrite:
    """Plan a rewrite as a router does before it writes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = read_head(file)
        layout = read_layout(file, head, size)
        if name == "restream":
            return restream(layout, 2, size)
        if name == "cut to half":
            return cut(head, layout, head.n_tokens // 2, file)
        padded = pad(layout, file, size)
    assert padded is not None
    return padded


def _turns(change: _Change, home: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each round for the rewrite and for `cp`; the first alternates."""
    target, reference, empty = home / "target", home / "reference", home / "empty"
    empty.touch()
    with reference.open("wb") as file:
        _fill(file.write, change.written)
    os.sync()  # later writes are removed before they get to the disk

    def ours() -> float:
        if change.in_place:
            _copy(change.source, target)
        expected = files.identity(change.source)
        start = perf_counter()
        rewrite = plan(target if change.in_place else change.source, change.name)
        if change.in_place:
            done = files.rewrite_tail(target, rewrite)
        else:
            done = files.write_rewritten(change.source, target, expected, rewrite)
        seconds = perf_counter() - start
        assert done.size_bytes == change.rewrite.size_bytes
        return seconds

    def theirs() -> float:
        start_up = _timed(lambda: _copy(empty, home / "copy"))
        (home / "copy").unlink()
        return _timed(lambda: _copy(reference, home / "copy")) - start_up

    results: dict[Callable[[], float], list[float]] = {ours: [], theirs: []}
    for index in range(rounds + 1):
        for contender in (ours, theirs) if index % 2 else (theirs, ours):
            seconds = contender()
            for path in (target, home / "copy"):
                path.unlink(missing_ok=True)
            if index:  # the first is a warm-up
                results[contender].append(seconds)
    reference.unlink()
    return results[ours], results[theirs]


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "--reflink=never", source, target], check=True)


def _timed(call: Callable[[], None]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _write(
    path: Path, n: int, layers: int, window: tuple[int, int] | tuple[()], *, v_trans: bool
) -> None:
    """Write a state of `n` tokens; `window` is (layers, cells) of a second block."""
    with path.open("wb") as file:
        file.write(struct.pack("<IIIiII", 0x67677371, 4, n + 4, -1, 1, n) + bytes(4 * n + 4))
        _block(file.write, range(n), layers, v_trans)
        if window:
            _block(file.write, range(n - window[1], n), window[0], v_trans)


def _block(write: Callable[[bytes], int], positions: range, layers: int, v_trans: bool) -> None:
    n = len(positions)
    write(struct.pack("<II", 1, n) + b"".join(struct.pack("<iIi", p, 1, 0) for p in positions))
    write(struct.pack("<IIII", v_trans, layers, 0, 0))
    for section in range(2 * layers):
        transposed = v_trans and section >= layers
        header = struct.pack("<iII", 1, 2, _ROW // 2) if transposed else None
        write(header or struct.pack("<iQ", 1, _ROW))
        _fill(write, n * _ROW)


def _fill(write: Callable[[bytes], int], size: int) -> None:
    chunk = os.urandom(_CHUNK)
    for at in range(0, size, _CHUNK):
        write(chunk[: size - at])


if __name__ == "__main__":
    sys.exit(main())
