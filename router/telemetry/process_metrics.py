"""How the router's own process and the disks under it are: metrics that no request makes.

Asks what could block in a thread. Knows nothing of requests, slots or snapshots.
"""

import asyncio
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from router.base.ports import Clock

# Often enough to meet a stall of a second for sure; a look takes about 10 µs.
_LAG_EVERY_S = 0.25
_DISKS_EVERY_S = 10.0
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Vitals(Collector):
    """Registers itself and Python's own process metrics; spawn `watch_loop` and
    `watch_disks`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Clock,
        kv_dirs: Callable[[], Iterable[str]],
        version: str,
    ) -> None:
        """`kv_dirs` says which there are, each time."""
        self._clock = clock
        self._kv_dirs = kv_dirs
        self._disks: Mapping[str, tuple[int, int]] = {}
        self._lag = Histogram(
            "kvferry_event_loop_lag_seconds",
            "How late the event loop was, looked at four times a second",
            buckets=_LAG_S,
            registry=registry,
        )
        build = Gauge(
            "kvferry_build_info", "1; what runs here", ["version", "python"], registry=registry
        )
        build.labels(version, platform.python_version()).set(1)
        ProcessCollector(registry=registry)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The disks, as they were at most ten seconds ago."""
        size = GaugeMetricFamily(
            "kvferry_kv_dir_size_bytes", "Size of the file system of a kv_dir", labels=["kv_dir"]
        )
        free = GaugeMetricFamily(
            "kvferry_kv_dir_free_bytes",
            "Bytes left for kvferry and llama-server",
            labels=["kv_dir"],
        )
        for kv_dir, (size_bytes, free_bytes) in self._disks.items():
            size.add_metric([kv_dir], size_bytes)
            free.add_metric([kv_dir], free_bytes)
        yield from (size, free)

    async def watch_loop(self) -> None:
        """Note how late the loop is, for ever."""
        while True:
            due = self._clock.now() + _LAG_EVERY_S
            await asyncio.sleep(_LAG_EVERY_S)
            self._lag.observe(max(self._clock.now() - due, 0.0))

    async def watch_disks(self) -> None:
        """Note how full the disks are, for ever."""
        while True:
            await self.look_at_disks()
            await asyncio.sleep(_DISKS_EVERY_S)

    async def look_at_disks(self) -> None:
        """Note how full the disks are now. While one hangs, the last numbers stay."""
        self._disks = await asyncio.to_thread(_room, sorted(set(self._kv_dirs())))


def _room(kv_dirs: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Size and free bytes of each file system that can be asked."""
    found = {}
    for kv_dir in kv_dirs:
        with suppress(OSError):
            usage = shutil.disk_usage(Path(kv_dir))
            found[kv_dir] = usage.total, usage.free
    return found
