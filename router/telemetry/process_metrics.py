"""Metrics of the router's own process and of the disks that it uses.

Calls that could block run in a thread. Knows nothing of requests, slots or snapshots.
"""

import asyncio
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from router.base import tasks
from router.base.ports import Clock

# Often enough to catch every stall of 1 s; one measurement takes about 10 µs.
_LAG_EVERY_S = 0.25
_DISKS_EVERY_S = 10.0
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Vitals(Collector):
    """Process and disk metrics. Registers itself and Python's own process metrics.

    Supervise `watch_loop` and `watch_disks`.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        kv_dirs: Callable[[], Iterable[str]],
        version: str,
        certificates: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Register the metrics. Each call of `kv_dirs` returns the present KV directories.

        `certificates` returns when each certificate ends, in seconds since the epoch.
        """
        self._certificates = certificates
        self._clock = clock
        self._kv_dirs = kv_dirs
        self._disks: Mapping[str, tuple[int, int]] = {}
        self._lag = Histogram(
            "kvferry_event_loop_lag_seconds",
            "Lag of the event loop, measured four times a second",
            buckets=_LAG_S,
            registry=registry,
        )
        build = Gauge(
            "kvferry_build_info", "1; labels are versions", ["version", "python"], registry=registry
        )
        build.labels(version, platform.python_version()).set(1)
        ProcessCollector(registry=registry)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the disk metrics, at most ten seconds old."""
        size = GaugeMetricFamily(
            "kvferry_kv_dir_size_bytes", "Size of the file system of a kv_dir", labels=["kv_dir"]
        )
        free = GaugeMetricFamily(
            "kvferry_kv_dir_free_bytes",
            "Free bytes for kvferry and llama-server on that file system",
            labels=["kv_dir"],
        )
        for kv_dir, (size_bytes, free_bytes) in self._disks.items():
            size.add_metric([kv_dir], size_bytes)
            free.add_metric([kv_dir], free_bytes)
        failures = CounterMetricFamily(
            "kvferry_task_failures",
            "Tasks, loops and requests that ended by a bug; loops run again",
            labels=["task"],
        )
        for kind, n in ({"request": 0} | tasks.failures).items():
            failures.add_metric([kind], n)
        ends = GaugeMetricFamily(
            "kvferry_certificate_end_timestamp_seconds",
            "When a certificate ends: of TLS for clients, or of the fleet",
            labels=["certificate"],
        )
        for name, end in self._certificates().items():
            ends.add_metric([name], end)
        running = GaugeMetricFamily(
            "kvferry_tasks", "Running background tasks, by kind", labels=["task"]
        )
        for kind, n in tasks.running().items():
            running.add_metric([kind], n)
        yield from (size, free, failures, ends, running)

    async def watch_loop(self) -> None:
        """Measure the lag of the event loop, forever."""
        while True:
            due = self._clock.now() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(self._clock.now() - due, 0.0))

    async def watch_disks(self) -> None:
        """Measure the disks every ten seconds, forever."""
        while True:
            await self.measure_disks()
            await asyncio.sleep(_DISKS_EVERY_S)

    async def measure_disks(self) -> None:
        """Measure the disks once. While a disk hangs, the last numbers stay."""
        self._disks = await asyncio.to_thread(_room, sorted(set(self._kv_dirs())))


def _room(kv_dirs: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return size and free bytes of each file system that can be read."""
    found = {}
    for kv_dir in kv_dirs:
        with suppress(OSError):
            usage = shutil.disk_usage(Path(kv_dir))
            found[kv_dir] = usage.total, usage.free
    return found
