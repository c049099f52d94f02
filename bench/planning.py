"""`python -m bench.planning`: the time of a decision, by the number of snapshots.

In one process, without I/O: `router.core.planning.planner.plan` over two backends of four slots
each, and the catalog's cost in time and memory.
"""

import argparse
import gc
import random
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

from msgspec.structs import replace

from bench.report import Report, arguments_of, median, percentile, run_bench
from router.base.tokens import WIDTH, TokenPieces, Tokens, head
from router.base.types import (
    BackendId,
    BackendInfo,
    KvDir,
    MemoryKind,
    Namespace,
    Prompt,
    Request,
    RequestId,
    Snapshot,
    SnapshotId,
    Source,
)
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend
from router.core.model.policy import SnapshotLimits
from router.core.model.rates import Rates
from router.core.model.slots import Content, Resident
from router.core.planning.planner import plan

COLUMNS = ("snapshots", "what", "n", "p50 µs", "p99 µs", "x fewest", "index bytes each")
SPACE, PLACE = Namespace("n"), KvDir("/kv")
BYTES_PER_TOKEN = 50_000
_GROUP = 20  # snapshots that share a prefix; every second snapshot is in a group
_VOCABULARY = 150_000
_PAGE_BYTES = 4096
_SLOTS = 1_000  # in the measurement of memory
_ADD = "add to catalog"
_PLANS = (  # share of the prompt that a snapshot holds, and the source that the plan should choose
    ("plan, deep match", 0.9, Source.SNAPSHOT),
    ("plan, shallow match", 0.1, Source.SNAPSHOT),
    ("plan, no match", 0.0, Source.COLD),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.planning", description=__doc__)
    parser.add_argument("--counts", default="100,10000,100000", help="snapshots, comma-separated")
    parser.add_argument("--tokens", type=int, default=8_000, help="of each snapshot")
    parser.add_argument("--rounds", type=int, default=500, help="plans of each kind")
    return run_bench(parser, measure, argv)


def measure(options: argparse.Namespace) -> Report:
    """Measure all numbers of snapshots alternately; compare each with the smallest.

    No number has the processor's caches to itself: in production, too, other work comes between two
    plans.
    """
    report = Report("planning", "Decisions, by snapshots", list(COLUMNS), arguments_of(options))
    sizes = [_Size.of(int(text), options.tokens) for text in options.counts.split(",")]
    sizes.sort(key=lambda size: len(size.snapshots))
    random_ = random.Random(1)
    for what, share, source in _PLANS:
        for size in sizes * options.rounds:
            start = head(random_.choice(size.snapshots).tokens, int(share * options.tokens))
            rest = make_tokens(random_, options.tokens - len(start) // WIDTH)
            size.plan(what, Tokens(start + rest), source)
    for number, size in enumerate(sizes):
        size.evict(make_snapshots(options.rounds, options.tokens, seed=2 + number))
    for size in sizes:
        for what, times in size.times.items():
            ratio = median(times) / median(sizes[0].times[what])
            row = len(size.snapshots), what, len(times), median(times) * 1e6
            grown = size.bytes_each if what == _ADD else None
            report.add(*row, percentile(times, 99) * 1e6, ratio, grown)
    each = slot_bytes(options.tokens)
    report.add(None, "a slot that holds something", _SLOTS, *[None] * 3, each)
    report.notes.append(
        f"half of the snapshots share a prefix of a quarter to three quarters with {_GROUP - 1} "
        f"others"
    )
    report.notes.append(
        f"memory: the tokens of a snapshot are {options.tokens * WIDTH:,} bytes, which the index "
        "uses where it can; `index bytes each` is the growth of the process beyond them"
    )
    return report


@dataclass
class _Size:
    """An inventory with a number of snapshots, and the seconds of each measured action."""

    snapshots: list[Snapshot]
    inventory: Inventory
    times: dict[str, list[float]]
    bytes_each: float

    @classmethod
    def of(cls, count: int, tokens: int) -> "_Size":
        snapshots = list(make_snapshots(count, tokens))
        inventory = make_inventory(snapshots, tokens)
        gc.collect()
        before = rss_bytes()
        adding = [
            _timed(partial(inventory.catalog.add, s, MemoryKind.FULL, 1.0)) for s in snapshots
        ]
        gc.collect()
        return cls(snapshots, inventory, {_ADD: adding}, (rss_bytes() - before) / count)

    def plan(self, what: str, ids: Tokens, source: Source) -> None:
        """Plan one prompt. Raises RuntimeError if the plan's source is not `source`."""
        request = Request(RequestId(what), Prompt(ids))
        begin = perf_counter()
        decision = plan(request, self.inventory, 0.0)
        self.times.setdefault(what, []).append(perf_counter() - begin)
        if decision is None or decision.chosen.source is not source:
            raise RuntimeError(f"{what}: {decision}")

    def evict(self, newcomers: Iterable[Snapshot]) -> None:
        """Add snapshots to the full catalog: each makes it evict one."""
        times = self.times.setdefault("add and evict", [])
        for newcomer, _ in zip(newcomers, self.snapshots, strict=False):
            named = replace(newcomer, id=SnapshotId(f"new-{newcomer.id}"))
            times.append(_timed(partial(self.inventory.catalog.add, named, MemoryKind.FULL, 2.0)))
        if self.inventory.catalog.evicted != len(times):
            raise RuntimeError(f"{self.inventory.catalog.evicted} evicted, not {len(times)}")


def make_tokens(random_: random.Random, n: int) -> Tokens:
    """Return `n` random token ids."""
    return Tokens(array("i", random_.choices(range(_VOCABULARY), k=n)).tobytes())


def make_snapshots(n: int, tokens: int, seed: int = 0) -> Iterator[Snapshot]:
    """Yield `n` snapshots in the order of their ids; half are in groups that share a prefix."""
    random_ = random.Random(seed)
    shared = Tokens(b"")
    for number in range(n):
        if number % (2 * _GROUP) == 0:
            low, high = max(tokens // 4, 1), max(tokens * 3 // 4, 1)
            shared = make_tokens(random_, random_.randint(low, high))
        start = shared if number % 2 else Tokens(b"")
        ids = Tokens(start + make_tokens(random_, tokens - len(start) // WIDTH))
        yield Snapshot(
            SnapshotId(f"{number:08x}"), SPACE, PLACE, TokenPieces(ids), tokens * BYTES_PER_TOKEN
        )


def make_inventory(snapshots: Sequence[Snapshot], tokens: int) -> Inventory:
    """Return two backends of four idle slots, most of them with other tokens."""
    inventory = Inventory()
    random_ = random.Random(-1)
    for name in (BackendId("a"), BackendId("b")):
        info = BackendInfo(*(name, 4, 4 * tokens, SPACE), kv_dir=PLACE, memory_kind=MemoryKind.FULL)
        inventory.take(info, Rates())
        for slot in inventory.slots.of(name)[1:]:
            slot.hold(Content(Resident(make_tokens(random_, tokens))))
    inventory.catalog = Catalog(SnapshotLimits(max_bytes=len(snapshots) * tokens * BYTES_PER_TOKEN))
    return inventory


def snapshot_bytes(count: int, tokens: int) -> float:
    """Return the memory of one of `count` snapshots beyond its tokens."""
    return _Size.of(count, tokens).bytes_each


def slot_bytes(tokens: int) -> float:
    """Return the memory of a slot beyond its tokens."""
    random_ = random.Random(3)
    held = [make_tokens(random_, tokens) for _ in range(_SLOTS)]
    gc.collect()
    tracemalloc.start()
    backend = Backend(BackendInfo(BackendId("a"), _SLOTS, 1, SPACE))
    backend.attach(_SLOTS)
    for slot, ids in zip(backend.slots, held, strict=True):
        slot.hold(Content(Resident(ids)))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / _SLOTS


def _timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def rss_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main())
