"""`python -m bench.planning`: the price of a decision, by how many snapshots there are.

In one process, without I/O: `router.core.planner.plan` over two backends of four slots each, and
what the catalog costs in time and memory.
"""

import argparse
import gc
import random
import sys
import tracemalloc
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

from bench.report import Report, arguments_of, median, percentile, run_bench
from router.core.catalog import Catalog, Limits
from router.core.cost import Rates
from router.core.fleet import Fleet
from router.core.planner import plan
from router.core.slots import Resident
from router.tokens import Tokens, head
from router.types import (
    BackendId,
    BackendInfo,
    MemoryKind,
    Namespace,
    Place,
    Prompt,
    Request,
    RequestId,
    Snapshot,
    SnapshotId,
    Source,
)

COLUMNS = ("snapshots", "what", "n", "p50 µs", "p99 µs", "x fewest", "index bytes each")
SPACE, PLACE = Namespace("n"), Place("/kv")
BYTES_PER_TOKEN = 50_000
_GROUP = 20  # snapshots that share a prefix; every second snapshot is in a group
_VOCABULARY = 150_000
_PAGE_BYTES = 4096
_SLOTS = 1_000  # whose memory is measured


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.planning", description=__doc__)
    parser.add_argument("--counts", default="100,10000,100000", help="snapshots, comma-separated")
    parser.add_argument("--tokens", type=int, default=8_000, help="of each snapshot")
    parser.add_argument("--rounds", type=int, default=500, help="plans of each kind")
    return run_bench(parser, measure, argv)


def measure(options: argparse.Namespace) -> Report:
    """All numbers of snapshots, the fewest first: it is what the others are compared with."""
    report = Report("planning", "A decision, by snapshots", list(COLUMNS), arguments_of(options))
    least: dict[str, float] = {}
    for count in sorted(int(text) for text in options.counts.split(",")):
        _measure_count(count, options, report, least)
    report.add(
        None, "a slot that holds something", _SLOTS, *[None] * 3, _slot_bytes(options.tokens)
    )
    report.notes.append(
        f"half of the snapshots share a prefix of a quarter to three quarters with {_GROUP - 1} "
        f"others"
    )
    report.notes.append(
        f"memory: the tokens of a snapshot are {options.tokens * 4:,} bytes, which the index uses "
        "where it can; `index bytes each` is what the process grows by beyond them"
    )
    return report


def make_tokens(random_: random.Random, n: int) -> Tokens:
    """`n` random ids."""
    return Tokens(array("i", random_.choices(range(_VOCABULARY), k=n)).tobytes())


def make_snapshots(n: int, tokens: int, seed: int = 0) -> Iterator[Snapshot]:
    """Half of them in groups that share a prefix, in the order of their ids."""
    random_ = random.Random(seed)
    shared = Tokens(b"")
    for number in range(n):
        if number % (2 * _GROUP) == 0:
            low, high = max(tokens // 4, 1), max(tokens * 3 // 4, 1)
            shared = make_tokens(random_, random_.randint(low, high))
        start = shared if number % 2 else Tokens(b"")
        ids = Tokens(start + make_tokens(random_, tokens - len(start) // 4))
        yield Snapshot(SnapshotId(f"{number:08x}"), SPACE, PLACE, ids, tokens * BYTES_PER_TOKEN)


def make_fleet(snapshots: Sequence[Snapshot], tokens: int) -> Fleet:
    """Two backends of four idle slots, most of them holding something else."""
    fleet = Fleet()
    random_ = random.Random(-1)
    for name in (BackendId("a"), BackendId("b")):
        fleet.infos[name] = BackendInfo(
            *(name, 4, 4 * tokens, SPACE), place=PLACE, memory_kind=MemoryKind.FULL
        )
        fleet.rates[name] = Rates()
        fleet.slots.add(name, 4)
        for slot in fleet.slots.of(name)[1:]:
            slot.resident = Resident(make_tokens(random_, tokens))
    fleet.catalog = Catalog(Limits(max_bytes=len(snapshots) * tokens * BYTES_PER_TOKEN))
    return fleet


def _measure_count(
    count: int, options: argparse.Namespace, report: Report, least: dict[str, float]
) -> None:
    tokens = options.tokens
    snapshots = list(make_snapshots(count, tokens))
    fleet = make_fleet(snapshots, tokens)
    gc.collect()
    before = rss_bytes()
    adding = [_timed(partial(fleet.catalog.add, s, MemoryKind.FULL, 1.0)) for s in snapshots]
    gc.collect()
    grown = (rss_bytes() - before) / count

    def add(what: str, times: list[float], size_bytes: float | None = None) -> None:
        p50 = median(times) * 1e6
        ratio = p50 / least.setdefault(what, p50)
        report.add(*(count, what, len(times), p50, percentile(times, 99) * 1e6, ratio, size_bytes))

    random_ = random.Random(1)
    for what, share, source in (
        ("plan, deep match", 0.9, Source.SNAPSHOT),
        ("plan, shallow match", 0.1, Source.SNAPSHOT),
        ("plan, no match", 0.0, Source.COLD),
    ):
        times = []
        for number in range(options.rounds):
            start = head(random_.choice(snapshots).tokens, int(share * tokens))
            ids = Tokens(start + make_tokens(random_, tokens - len(start) // 4))
            request = Request(RequestId(str(number)), Prompt(ids))
            begin = perf_counter()
            decision = plan(request, fleet, 0.0)
            times.append(perf_counter() - begin)
            if decision is None or decision.chosen.source is not source:
                raise RuntimeError(f"{what}: {decision}")
        add(what, times)
    add("add to catalog", adding, grown)
    # The limit is what there is: each newcomer makes the catalog give one up.
    newcomers = make_snapshots(min(options.rounds, count), tokens, seed=2)
    evicting = []
    for newcomer in newcomers:
        renamed = Snapshot(
            *(SnapshotId(f"new-{newcomer.id}"), SPACE, PLACE, newcomer.tokens, newcomer.size_bytes)
        )
        evicting.append(_timed(partial(fleet.catalog.add, renamed, MemoryKind.FULL, 2.0)))
    add("add and evict", evicting)
    if fleet.catalog.evicted != len(evicting):
        raise RuntimeError(f"{fleet.catalog.evicted} evicted, not {len(evicting)}")


def _slot_bytes(tokens: int) -> float:
    """What a slot takes in memory beyond the tokens that it holds."""
    random_ = random.Random(3)
    held = [make_tokens(random_, tokens) for _ in range(_SLOTS)]
    gc.collect()
    tracemalloc.start()
    fleet = Fleet()
    fleet.slots.add(BackendId("a"), _SLOTS)
    for slot, ids in zip(fleet.slots.of(BackendId("a")), held, strict=True):
        slot.resident = Resident(ids)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / _SLOTS


def _timed(action: Callable[[], object]) -> float:
    start = perf_counter()
    action()
    return perf_counter() - start


def rss_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    sys.exit(main())
