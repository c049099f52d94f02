"""Every metric is described in docs/metrics.md, and counts what is described."""

import asyncio
import re
from collections.abc import Iterable
from functools import partial
from math import inf
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from router.base import tasks
from router.base.clock import MonotonicClock
from router.base.errors import RouterError
from router.base.tokens import EMPTY, TokenPieces
from router.base.types import (
    BackendId,
    ColdStatus,
    KvDir,
    MemoryKind,
    Namespace,
    Outcome,
    RequestId,
    RequestRecord,
    SlotId,
    Snapshot,
    SnapshotId,
    Source,
    Stall,
    Standing,
    TierStatus,
    Transfer,
)
from router.core.execution.state import State
from router.core.model.effects import SaveReason
from router.core.model.policy import SnapshotLimits
from router.core.model.rates import LinearFit
from router.core.model.servers import ServerSpec, Unread
from router.core.model.slots import Phase
from router.core.model.tuning import TUNING
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.telemetry.backend_metrics import BackendMetrics
from router.telemetry.collected import Collected
from router.telemetry.engine_collector import EngineCollector, tenant_metrics
from router.telemetry.hosts_metrics import FetchMetrics, HostsMetrics, peer_metrics
from router.telemetry.metrics import PrometheusTelemetry
from router.telemetry.process_metrics import Vitals
from router.telemetry.tier_metrics import BLOBS, COLD, tier_metrics
from router.telemetry.usage import UsageBook, UsageSums
from tests.support.paths import DOCS
from tests.support.scheduler.build import backend, run_of, scheduler, snapshot

PAGE = DOCS / "metrics.md"
SLOT = SlotId(BackendId("a"), 0)
# | `name` | type | labels | meaning | what to do |
ROW = re.compile(r"^\| `(kvferry_\w+)` \| (\w+) \| ([^|]*) \| ([^|]+) \| ([^|]+) \|$", re.M)


A, B, C, D = map(BackendId, "abcd")


def known() -> State:
    """Return a state with backends A and B, four snapshots, a queue of three and a server D."""
    up = backend("a", 3, memory_kind=MemoryKind.SLIDING_WINDOW, n_stream=2, window=64)
    bare = backend("b", kv_dir=None, memory_kind=MemoryKind.UNKNOWN, cuts=True)
    s = scheduler(up, bare, limits=SnapshotLimits(max_bytes=20), holding={SLOT: run_of(8)})
    inventory = s.state.inventory
    for n in range(5):
        inventory.catalog.add(snapshot(f"s{n}", [n, 9, 9], 5), MemoryKind.FULL, 1.0)
    inventory.catalog.shrink()
    inventory.backends[A].stalled_s[Stall.SAVE] = 13.0
    inventory.backends[A].rates.save = LinearFit(0.002, 0.0)  # restores take half of it
    servers, rid = inventory.servers, RequestId("u")
    servers.configure([ServerSpec(D, ("m",))], [], 1.0)
    servers.swaps, servers.unread[rid] = 17, Unread(rid, "m", 1.0)
    return s.state


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    stands = {A: Standing.UP, B: Standing.DRAINING, C: Standing.DOWN}
    made.register(EngineCollector(known(), [A, B, C], stands.__getitem__, lambda: 3))
    usage = UsageBook(lambda: 0.0)
    usage.totals["alice"] = UsageSums(requests=1)
    made.register(Collected(lambda: tenant_metrics(usage)))
    return made


@pytest.fixture
def telemetry(registry: CollectorRegistry) -> PrometheusTelemetry:
    return PrometheusTelemetry(registry)


def record(**changes: object) -> RequestRecord:
    fields: dict[str, object] = {
        "request": RequestId("r"),
        "slot": SLOT,
        "source": Source.SNAPSHOT,
        "reason": "because",
        "outcome": Outcome.OK,
        "planned_tokens": 90,
        "prompt_tokens": 100,
        "cached_tokens": 90,
        "computed_tokens": 10,
        "generated_tokens": 5,
        "waited_s": 0.1,
        "prepared_s": 0.2,
        "ttft_s": 0.5,
        "total_s": 1.0,
        "predicted_s": 0.4,
    }
    return RequestRecord(**(fields | changes))  # type: ignore[arg-type]


def declared(metrics: Iterable[Metric]) -> dict[str, tuple[str, set[str]]]:
    """Return (type, labels) by name as scraped, without Python's own metrics of a process."""
    found = {}
    for metric in metrics:
        if not metric.name.startswith("kvferry_"):
            continue
        name = metric.name + ("_total" if metric.type == "counter" else "")
        labels = {label for sample in metric.samples for label in sample.labels} - {"le"}
        found[name] = (metric.type, labels)
    return found


def exercise(telemetry: PrometheusTelemetry) -> None:
    """Report everything once, so that every label shows."""
    telemetry.request(record(misread=True))
    telemetry.rejected(RequestId("r"), "deadline", "late")
    telemetry.saved(SLOT, SaveReason.IDLE, Transfer(1, 2, 0.1), "")
    telemetry.restored(SLOT, Transfer(1, 2, 0.1), "")


def exercise_hosts(registry: CollectorRegistry) -> None:
    """Report everything of other hosts once."""
    fetches = FetchMetrics(registry)
    fetches.fetched("b", 100, "ok", 0.1)
    fetches.handed_out(100)
    hosts = HostsMetrics(registry)
    hosts.quoted("b", 0.001, offered=True)
    hosts.forwarded("b", Outcome.OK)
    hosts.received("b")
    peers = [("b", True, 0.5, 0.1)]
    registry.register(Collected(lambda: peer_metrics(peers, True)))


async def test_every_metric_is_described(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry, tmp_path: Path
) -> None:
    """docs/metrics.md has a row for each: name, type, labels, meaning, what to do when it moves."""
    exercise(telemetry)
    exercise_hosts(registry)
    cold = ColdStatus("/c", "", 1, 2, 3, 4, 5, 6, 7, 8, 9)
    blobs = TierStatus(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, inf, 13, 14)
    for one, status in ((COLD, cold), (BLOBS, blobs)):
        registry.register(Collected(partial(tier_metrics, one, status)))
    await Vitals(
        registry, MonotonicClock(), lambda: [str(tmp_path)], "1", lambda: {"fleet": 1.0}
    ).measure_disks()
    async with Connections() as connections:
        nobody = LlamaClient(BackendId("a"), "http://127.0.0.1:9", connections, Timeouts())
        text = await BackendMetrics({nobody.id: nobody}, registry).text()
    running = tasks.spawn(asyncio.sleep(60), name="watch a")
    scraped = [*registry.collect(), *text_string_to_metric_families(text.decode())]
    running.cancel()
    rows = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels, _, _ in ROW.findall(PAGE.read_text())
    }

    assert rows == declared(scraped)


def own_outcomes(base: type[RouterError] = RouterError) -> set[str]:
    return {base.outcome}.union(*(own_outcomes(child) for child in base.__subclasses__()))


@pytest.mark.usefixtures("telemetry")
def test_every_outcome_starts_at_zero(registry: CollectorRegistry) -> None:
    """Series that began with 1 raised no alert for the first error inside the router."""
    for outcome in {*Outcome, *own_outcomes()}:
        assert value(registry, "kvferry_requests_total", outcome=outcome) == 0


def test_every_value_of_an_outcome_is_described() -> None:
    text = PAGE.read_text()
    named = [*Outcome, *own_outcomes(), *Phase, *SaveReason, *Source]
    assert [name for name in named if f"`{name}`" not in text] == []


def test_labels_come_from_enums_and_configuration(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry
) -> None:
    """Labels never come from a request: a thousand requests make no new series."""
    exercise(telemetry)
    before = len(list(_series(registry)))
    for i in range(1000):
        telemetry.request(record(request=RequestId(str(i)), reason=str(i)))
        telemetry.rejected(RequestId(str(i)), "deadline", str(i))
    assert len(list(_series(registry))) == before


def _series(registry: CollectorRegistry) -> list[str]:
    return [f"{s.name}{s.labels}" for metric in registry.collect() for s in metric.samples]


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@pytest.mark.parametrize(
    ("source", "by"),
    [
        (Source.RESIDENT, "resident"),
        (Source.SNAPSHOT, "snapshot"),
        (Source.COPY, "copy"),
        (Source.COLD, "resident"),  # more was resident than the router knew
        (Source.NONE, "resident"),
    ],
)
def test_what_reuse_avoided_is_counted_by_its_source(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry, source: Source, by: str
) -> None:
    name = "kvferry_prefill_avoided_seconds_total"
    telemetry.request(record(source=source, avoided_s=2.5))
    telemetry.request(record(source=source, computed_tokens=100))

    assert value(registry, name, backend="a", source=by) == 2.5
    others = {"resident", "snapshot", "copy"} - {by}
    assert [value(registry, name, backend="a", source=other) for other in others] == [None, None]


def test_predictions_are_summed_beside_what_was_measured(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry
) -> None:
    telemetry.request(record(predicted_s=0.4, ttft_s=0.5))
    telemetry.request(record(predicted_s=7.0, ttft_s=None))

    assert value(registry, "kvferry_ttft_predicted_seconds_total", source="snapshot") == 0.4
    assert value(registry, "kvferry_ttft_seconds_sum", source="snapshot") == 0.5


def test_what_is_counted_by_backend_starts_at_zero() -> None:
    """Rates would not show the first count of a series that begins with 1."""
    registry = CollectorRegistry()
    telemetry = PrometheusTelemetry(registry, [BackendId("a")])
    telemetry.request(record(outcome=Outcome.BACKEND_ERROR))

    name = "kvferry_backend_requests_total"
    assert value(registry, name, backend="a", outcome="ok") == 0
    assert value(registry, name, backend="a", outcome="backend_error") == 1
    assert value(registry, "kvferry_prefill_avoided_seconds_total", backend="a", source="copy") == 0


@pytest.mark.parametrize(("planned", "over", "under"), [(90, 0, 0), (95, 5, 0), (60, 0, 30)])
def test_plans_are_compared_with_what_happened(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry, planned: int, over: int, under: int
) -> None:
    telemetry.request(record(planned_tokens=planned))

    assert value(registry, "kvferry_reuse_overestimated_tokens_total") == over
    assert value(registry, "kvferry_reuse_underestimated_tokens_total") == under


def test_a_request_without_numbers_counts_as_a_request(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry
) -> None:
    """Abandoned requests have no numbers, and none are made up."""
    nothing = dict.fromkeys(
        ("prompt_tokens", "cached_tokens", "computed_tokens", "generated_tokens", "ttft_s")
    )
    telemetry.request(record(outcome=Outcome.CLIENT_GONE, **nothing))

    assert value(registry, "kvferry_requests_total", outcome="client_gone") == 1
    assert value(registry, "kvferry_prompt_tokens_total", source="computed") == 0
    assert value(registry, "kvferry_ttft_seconds_count", source="snapshot") == 0


def test_failures_are_counted_apart(
    registry: CollectorRegistry, telemetry: PrometheusTelemetry
) -> None:
    snapshot = Snapshot(SnapshotId("s"), Namespace("n"), KvDir("/p"), TokenPieces(EMPTY), 1)
    telemetry.saved(SLOT, SaveReason.IDLE, None, "disk full")
    telemetry.restored(SLOT, None, "bad file")
    telemetry.deleted(snapshot, "")
    telemetry.deleted(snapshot, "denied")

    for action in ("save", "restore", "delete"):
        assert value(registry, "kvferry_kv_failures_total", action=action) == 1
    assert value(registry, "kvferry_moved_bytes_total", action="save") == 0
    assert value(registry, "kvferry_restore_seconds_count") == 0


def test_gauges_are_asked_for(registry: CollectorRegistry) -> None:
    """C was never up, and so has no slots and no speed."""
    for name, values in {"up": [1, 1, 0], "drained": [0, 1, 0]}.items():
        assert [value(registry, f"kvferry_backend_{name}", backend=b) for b in "abc"] == values
    assert value(registry, "kvferry_slots", backend="a", phase="idle") == 3
    assert value(registry, "kvferry_slots", backend="a", phase="running") == 0
    assert value(registry, "kvferry_slots", backend="c", phase="idle") is None
    assert value(registry, "kvferry_queue_depth") == 3
    assert value(registry, "kvferry_snapshots") == 4
    assert value(registry, "kvferry_snapshot_bytes") == 20
    assert value(registry, "kvferry_snapshot_tokens") == 12
    assert value(registry, "kvferry_snapshots_evicted_total") == 1
    assert value(registry, "kvferry_resident_tokens", backend="a") == 8
    assert value(registry, "kvferry_server_phase", server="d", phase="stopped") == 1
    assert value(registry, "kvferry_server_waiting", server="d") == 1
    assert value(registry, "kvferry_server_load_seconds", server="d") == TUNING.server_load_s
    assert value(registry, "kvferry_server_swaps_total") == 17
    learned = [
        value(registry, f"kvferry_{name}_per_second", backend="a")
        for name in ("prefill_tokens", "output_tokens", "save_bytes", "restore_bytes")
    ]
    assert learned == [100.0, 50.0, 5e8, 1e9]
    assert value(registry, "kvferry_prefill_tokens_per_second", backend="c") is None
    assert value(registry, "kvferry_stall_seconds_total", backend="a", action="save") == 13
    assert value(registry, "kvferry_stall_seconds_total", backend="a", action="restore") == 0
    assert value(registry, "kvferry_snapshot_bytes_limit") == 20
    assert value(registry, "kvferry_snapshot_tokens_limit") is None  # there is none


def test_what_backends_are(registry: CollectorRegistry) -> None:
    """Facts are labels, as the admin endpoint has them."""
    for labels in (
        {"backend": "a", "memory_kind": "sliding_window", "n_stream": "2", "window": "64"}
        | {"cuts": "0", "snapshots": "1"},
        {"backend": "b", "memory_kind": "unknown", "n_stream": "1", "window": "0"}
        | {"cuts": "1", "snapshots": "0"},
    ):
        assert value(registry, "kvferry_backend_info", **labels) == 1
