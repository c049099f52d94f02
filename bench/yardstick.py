"""`python -m bench.yardstick`: what a change of the core does to reuse, times and decisions.

Three workloads run through the production engine against simulated servers, on a virtual clock, so
that two runs of the same code are equal. `--record` writes what each request got to
`bench/yardstick.json`; without it, the run is compared with that: reuse and the percentiles of TTFT
may be 1 % worse, and each request with another decision is counted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.report import Report, arguments_of, percentile, run_bench
from router.base.types import RequestRecord
from router.core.model.plan import Plan
from router.core.model.policy import Policy
from router.tools.simulate.machines.hardware import PRESETS, OnDemand
from router.tools.simulate.requests import RequestSource
from router.tools.simulate.setup import Setup
from router.tools.simulate.simulator import Simulator
from router.tools.simulate.workload import WORKLOADS, Workload

RECORDED = Path(__file__).with_suffix(".json")
COLUMNS = (
    *("workload", "requests", "reused %", "reused before"),
    *("p50 s", "p50 before", "p90 s", "p90 before", "p99 s", "p99 before", "other decisions"),
)
_WORSE = 1.01
_GIB = 1 << 30

# The id of a request: its slot, the source of its state, tokens reused, and its TTFT in ms.
Rows = dict[str, tuple[str, str, int, int]]


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, and the servers that it is for."""

    setup: Setup
    source: Callable[[Setup], RequestSource]


def _workload(
    name: str, requests: int, conversations: int, share: float = 0.0
) -> Callable[[Setup], RequestSource]:
    def source(setup: Setup) -> RequestSource:
        habits = WORKLOADS[name]
        n_ctx, models = setup.n_ctx, setup.models
        return Workload(habits, requests, conversations, n_ctx, 7, models, background_share=share)

    return source


_GPU = PRESETS["gpu-8b"]
CASES = {
    "agents": Case(
        Setup(_GPU, servers=2, slots=4, policy=Policy(), budget_bytes=24 * _GIB),
        _workload("agent", 600, 8),
    ),
    "chats": Case(
        Setup(_GPU, servers=2, slots=3, policy=Policy(), budget_bytes=6 * _GIB),
        _workload("chat", 900, 16),
    ),
    "mixed": Case(
        Setup(
            _GPU,
            servers=3,
            slots=2,
            policy=Policy(),
            budget_bytes=32 * _GIB,
            on_demand=OnDemand(loaded=2, load_s=8.0, stop_s=1.0, max_wait_s=60.0),
        ),
        _workload("chat", 500, 10, 0.25),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code: 1 if something became worse."""
    parser = argparse.ArgumentParser(prog="bench.yardstick", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write bench/yardstick.json")
    return run_bench(parser, measure, argv)


def measure(options: argparse.Namespace) -> Report:
    """Run all workloads, and compare or record them."""
    report = Report(
        "yardstick", "Decisions on a virtual clock", list(COLUMNS), arguments_of(options)
    )
    now = {name: play(case) for name, case in CASES.items()}
    before = now if options.record else recorded()
    for name, (rows, reused) in now.items():
        old_rows, old_reused = before[name]
        times, old_times = _times(rows), _times(old_rows)
        pairs = [(percentile(times, p), percentile(old_times, p)) for p in (50, 90, 99)]
        others = sum(rows.get(key, ())[:3] != row[:3] for key, row in old_rows.items())
        both = [number for pair in pairs for number in pair]
        report.add(name, len(rows), 100 * reused, 100 * old_reused, *both, others)
        worse = reused * _WORSE < old_reused or any(new > _WORSE * old for new, old in pairs)
        if worse:
            report.notes.append(f"{name}: worse than recorded by more than 1 %")
    if options.record:
        RECORDED.write_text(json.dumps(now, indent=0) + "\n")
    return report


def recorded() -> dict[str, tuple[Rows, float]]:
    """Return what was recorded."""
    told = json.loads(RECORDED.read_text())
    return {
        name: ({key: tuple(row) for key, row in rows.items()}, reused)
        for name, (rows, reused) in told.items()
    }


def play(case: Case) -> tuple[Rows, float]:
    """Run a workload; return what each answered request got, and the share of reused tokens."""
    rows: Rows = {}

    def told(record: RequestRecord, plan: Plan, _: float) -> None:
        chosen = plan.chosen
        ttft_ms = round(1000 * (record.ttft_s or 0.0))
        rows[record.request] = str(record.slot), chosen.source, chosen.reused_tokens, ttft_ms

    setup = case.setup
    simulator = Simulator(
        setup.scheduler_of(),
        setup.servers_of(),
        case.source(setup),
        on_demand=setup.on_demand,
        told=told,
    )
    meter = simulator.run()
    return rows, 1 - meter.computed_tokens / meter.prompt_tokens


def _times(rows: Rows) -> list[float]:
    return [row[3] / 1000 for row in rows.values()]


if __name__ == "__main__":
    sys.exit(main())
