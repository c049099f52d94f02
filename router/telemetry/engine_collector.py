"""Collect gauges and counters from the engine's state at each scrape."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.base.types import BackendId, Stall, Standing
from router.core.execution.state import State
from router.core.model.policy import UNLIMITED
from router.telemetry.usage import UsageBook

_RATES = {
    "prefill_tokens_per_second": "Learned speed of prefill",
    "output_tokens_per_second": "Learned speed of generation of one stream",
    "save_bytes_per_second": "Learned speed of slot saves",
    "restore_bytes_per_second": "Learned speed of slot restores",
}
_FACTS = ("backend", "memory_kind", "n_stream", "window", "cuts", "snapshots")


def tenant_metrics(usage: UsageBook) -> Iterator[Metric]:
    """Yield what tenants used since the router started. Requests without a key are of no tenant."""
    tokens = CounterMetricFamily(
        "kvferry_tenant_tokens", "Tokens of each tenant", labels=["tenant", "kind"]
    )
    requests = CounterMetricFamily(
        "kvferry_tenant_requests", "Requests of each tenant", labels=["tenant"]
    )
    for tenant, sums in usage.totals.items():
        if tenant:
            tokens.add_metric([tenant, "cached"], sums.cached_tokens)
            tokens.add_metric([tenant, "computed"], sums.computed_tokens)
            tokens.add_metric([tenant, "generated"], sums.generated_tokens)
            requests.add_metric([tenant], sums.requests)
    yield tokens
    yield requests


@dataclass(frozen=True, slots=True, eq=False)
class EngineCollector(Collector):
    """A collector that reads the engine's state at each scrape.

    `backends`: the present ones, whether up or not. `n_unread`: requests that wait for a backend
    that reads them.
    """

    _state: State
    _backends: Collection[BackendId]
    _standing: Callable[[BackendId], Standing]
    _n_unread: Callable[[], int]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine's present state."""
        state, catalog = self._state, self._state.inventory.catalog
        yield from self._of_backends()
        yield from self._of_servers()
        waiting = len(state.queue) + self._n_unread()
        yield GaugeMetricFamily("kvferry_queue_depth", "Requests that wait for a slot", waiting)
        snapshots = {
            "kvferry_snapshots": ("Usable snapshots", len(catalog)),
            "kvferry_snapshot_bytes": ("Bytes of usable snapshots", catalog.total_bytes),
            "kvferry_snapshot_tokens": ("Tokens of usable snapshots", catalog.total_tokens),
            "kvferry_snapshot_protected_bytes": (
                "Bytes of snapshots that are not evicted: their clients want them kept",
                catalog.protection.total_bytes,
            ),
        }
        for name, (meaning, value) in snapshots.items():
            yield GaugeMetricFamily(name, meaning, value)
        for what, most in (
            ("bytes", catalog.limits.max_bytes),
            ("tokens", catalog.limits.max_tokens),
        ):
            limit = [] if most == UNLIMITED else [((), most)]
            yield _gauge(
                f"snapshot_{what}_limit", f"Limit on snapshot {what}: store.max_{what}", (), limit
            )
        yield CounterMetricFamily(
            "kvferry_snapshots_evicted", "Snapshots evicted to make room", catalog.evicted
        )

    def _of_backends(self) -> Iterator[Metric]:
        known, names, of = self._state.inventory, self._backends, ("backend",)
        there = [known.backends[name] for name in names if name in known.backends]
        up = (((name,), float(name in known.up)) for name in names)
        yield _gauge("backend_up", "1 if the backend is in use", of, up)
        ends = Standing.DRAINING, Standing.DRAINED
        drained = (((name,), float(self._standing(name) in ends)) for name in names)
        yield _gauge("backend_drained", "1 if the backend is draining or drained", of, drained)
        phases = (((one.id, phase), n) for one in there for phase, n in one.phases.items())
        yield _gauge("slots", "Slots by phase", (*of, "phase"), phases)
        held = (((one.id,), sum(len(slot.content.resident) for slot in one.slots)) for one in there)
        yield _gauge("resident_tokens", "Tokens believed to be resident in slots", of, held)
        stall = CounterMetricFamily(
            "kvferry_stall_seconds",
            "Seconds that running streams stalled, summed over streams",
            labels=["backend", "action"],
        )
        for one in there:
            for action in Stall:
                stall.add_metric([one.id, action], one.stalled_s.get(action, 0.0))
        yield stall
        rates = [(one.id, one.rates.speeds) for one in there]
        for at, (name, meaning) in enumerate(_RATES.items()):
            yield _gauge(name, meaning, of, (((backend,), each[at]) for backend, each in rates))
        facts = (
            (one.id, one.memory_kind, one.n_stream, one.window, one.cuts, one.kv_dir is not None)
            for one in (backend.info for backend in known.up.values())
        )
        shown = (([str(int(x) if isinstance(x, bool) else x) for x in each], 1.0) for each in facts)
        yield _gauge("backend_info", "1; labels are the facts found by probing", _FACTS, shown)

    def _of_servers(self) -> Iterator[Metric]:
        servers, of = self._state.inventory.servers, ("server",)
        phases = (((one.name, one.phase), 1.0) for one in servers)
        yield _gauge(
            "server_phase", "1 for the phase of a server on demand", (*of, "phase"), phases
        )
        waiting = (((one.name,), self._state.waiting_for(one)) for one in servers)
        yield _gauge("server_waiting", "Requests that wait for a server's model", of, waiting)
        load = (((one.name,), one.load_s.value) for one in servers)
        yield _gauge("server_load_seconds", "Learned time to load a model", of, load)
        yield CounterMetricFamily(
            "kvferry_server_swaps", "Models stopped for another model", servers.swaps
        )


def _gauge(
    name: str, meaning: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    family = GaugeMetricFamily(f"kvferry_{name}", meaning, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
