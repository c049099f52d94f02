"""Collect gauges and counters from the engine at each scrape."""

from collections.abc import Callable, Iterable, Iterator
from math import isfinite

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.base.types import BackendInfo, BackendStats, ServerStats, Stall, Stats
from router.telemetry.usage import UsageBook


class UsageCollector(Collector):
    """What tenants used since the router started. Requests without a key are of no tenant."""

    def __init__(self, usage: UsageBook) -> None:
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        """Yield the sums by tenant: their names are from the configuration."""
        tokens = CounterMetricFamily(
            "kvferry_tenant_tokens", "Tokens of each tenant", labels=["tenant", "kind"]
        )
        requests = CounterMetricFamily(
            "kvferry_tenant_requests", "Requests of each tenant", labels=["tenant"]
        )
        for tenant, sums in self._usage.totals.items():
            if tenant:
                tokens.add_metric([tenant, "cached"], sums.cached_tokens)
                tokens.add_metric([tenant, "computed"], sums.computed_tokens)
                tokens.add_metric([tenant, "generated"], sums.generated_tokens)
                requests.add_metric([tenant], sums.requests)
        yield tokens
        yield requests


class EngineCollector(Collector):
    """A collector that reads the engine's state at each scrape."""

    def __init__(
        self, stats: Callable[[], Stats], infos: Callable[[], Iterable[BackendInfo]]
    ) -> None:
        self._stats = stats
        self._infos = infos

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine's present state."""
        stats = self._stats()
        yield from _what_backends_do(stats.backends)
        yield from _how_fast_backends_are(stats.backends)
        yield _what_backends_are(self._infos())
        yield from _what_servers_do(stats.servers)
        yield CounterMetricFamily(
            "kvferry_server_swaps", "Models stopped for another model", stats.server_swaps
        )
        yield GaugeMetricFamily(
            "kvferry_queue_depth", "Requests that wait for a slot", stats.queue_depth
        )
        yield GaugeMetricFamily("kvferry_snapshots", "Usable snapshots", stats.snapshots)
        yield GaugeMetricFamily(
            "kvferry_snapshot_bytes", "Bytes of usable snapshots", stats.snapshot_bytes
        )
        yield GaugeMetricFamily(
            "kvferry_snapshot_tokens", "Tokens of usable snapshots", stats.snapshot_tokens
        )
        for what, most in (
            ("bytes", stats.snapshot_bytes_limit),
            ("tokens", stats.snapshot_tokens_limit),
        ):
            limit = GaugeMetricFamily(
                f"kvferry_snapshot_{what}_limit", f"Limit on snapshot {what}: store.max_{what}"
            )
            if isfinite(most):  # collectors of metrics warn of an infinite gauge
                limit.add_metric([], most)
            yield limit
        yield GaugeMetricFamily(
            "kvferry_snapshot_protected_bytes",
            "Bytes of snapshots that are not evicted: their clients want them kept",
            stats.protected_bytes,
        )
        yield CounterMetricFamily(
            "kvferry_snapshots_evicted", "Snapshots evicted to make room", stats.evicted
        )


def _what_backends_do(backends: Iterable[BackendStats]) -> Iterator[Metric]:
    up = GaugeMetricFamily("kvferry_backend_up", "1 if the backend is in use", labels=["backend"])
    drained = GaugeMetricFamily(
        "kvferry_backend_drained", "1 if the backend is draining or drained", labels=["backend"]
    )
    slots = GaugeMetricFamily("kvferry_slots", "Slots by phase", labels=["backend", "phase"])
    resident = GaugeMetricFamily(
        "kvferry_resident_tokens", "Tokens believed to be resident in slots", labels=["backend"]
    )
    stall = CounterMetricFamily(
        "kvferry_stall_seconds",
        "Seconds that running streams stalled, summed over streams",
        labels=["backend", "action"],
    )
    for backend in backends:
        up.add_metric([backend.backend], float(backend.up))
        drained.add_metric([backend.backend], float(backend.drained))
        resident.add_metric([backend.backend], backend.resident_tokens)
        for phase, number in backend.slots.items():
            slots.add_metric([backend.backend, phase], number)
        for action in Stall:
            stall.add_metric([backend.backend, action], backend.stalled_s.get(action, 0.0))
    yield from (up, drained, slots, resident, stall)


def _what_servers_do(servers: Iterable[ServerStats]) -> Iterator[Metric]:
    phase = GaugeMetricFamily(
        "kvferry_server_phase", "1 for the phase of a server on demand", labels=["server", "phase"]
    )
    waiting = GaugeMetricFamily(
        "kvferry_server_waiting", "Requests that wait for a server's model", labels=["server"]
    )
    load = GaugeMetricFamily(
        "kvferry_server_load_seconds", "Learned time to load a model", labels=["server"]
    )
    for server in servers:
        phase.add_metric([server.server, server.phase], 1.0)
        waiting.add_metric([server.server], server.waiting)
        load.add_metric([server.server], server.load_s)
    yield from (phase, waiting, load)


def _how_fast_backends_are(backends: Iterable[BackendStats]) -> Iterator[Metric]:
    names = {
        "kvferry_prefill_tokens_per_second": "Learned speed of prefill",
        "kvferry_output_tokens_per_second": "Learned speed of generation of one stream",
        "kvferry_save_bytes_per_second": "Learned speed of slot saves",
        "kvferry_restore_bytes_per_second": "Learned speed of slot restores",
    }
    families = [GaugeMetricFamily(*name, labels=["backend"]) for name in names.items()]
    for backend in backends:
        if (speeds := backend.speeds) is not None:
            tokens = speeds.prefill_tokens, speeds.output_tokens
            for family, value in zip(
                families, (*tokens, speeds.save_bytes, speeds.restore_bytes), strict=True
            ):
                family.add_metric([backend.backend], value)
    yield from families


def _what_backends_are(infos: Iterable[BackendInfo]) -> Metric:
    """Return one sample of 1 for each backend in use; the facts are its labels."""
    labels = ["backend", "memory_kind", "n_stream", "window", "cuts", "snapshots"]
    family = GaugeMetricFamily(
        "kvferry_backend_info", "1; labels are the facts found by probing", labels=labels
    )
    for info in infos:
        shown = (info.n_stream, info.window, int(info.cuts), int(info.kv_dir is not None))
        family.add_metric([info.id, info.memory_kind, *map(str, shown)], 1.0)
    return family
