"""`python -m bench.stalls serve ...`: kvferry that also measures its longest event-loop iteration.

The measure by the clock includes what the machine did to the process. The measure by the CPU time
of the loop's thread is the loop's own work.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from router.assembly import router as router_main
from router.base.ports import Clock
from router.telemetry.process_metrics import Vitals
from router.tools.cli import main as cli

EVERY_S = 0.005
NAME = "bench_longest_turn_seconds"
BY = ("clock", "cpu")


class Watched(Vitals):
    """Process metrics with a gauge of the longest iteration since the last scrape."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        kv_dirs: Callable[[], Iterable[str]],
        version: str,
        *more: Any,
    ) -> None:
        super().__init__(registry, clock, kv_dirs, version, *more)
        self._longest = dict.fromkeys(BY, 0.0)
        gauge = Gauge(NAME, "Longest since the last scrape", ["by"], registry=registry)
        for by in BY:
            gauge.labels(by).set_function(partial(self._taken, by))

    def _taken(self, by: str) -> float:
        value, self._longest[by] = self._longest[by], 0.0
        return value

    async def watch_loop(self) -> None:
        """Note how late the loop is, without end."""
        while True:
            clock, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(EVERY_S)
            late = time.perf_counter() - clock - EVERY_S
            for by, seconds in zip(BY, (late, time.thread_time() - cpu), strict=True):
                self._longest[by] = max(self._longest[by], seconds)


def main() -> int:
    """Run the command `kvferry` with `Watched`; return the exit code."""
    vars(router_main)["Vitals"] = Watched
    return cli()


if __name__ == "__main__":
    sys.exit(main())
