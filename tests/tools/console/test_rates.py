"""Rates between two readings of the counters."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.base.types import (
    BackendId,
    Outcome,
    RequestId,
    RequestRecord,
    SlotId,
    Source,
)
from router.telemetry.metrics import PrometheusTelemetry
from router.tools.console.rates import NONE, began_anew, quantile, read_figures, recent

INF = float("inf")


class Router:
    """The real metrics of a router, without one."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._telemetry = PrometheusTelemetry(self._registry)

    def serves(self, ttft_s: float, source: Source, prompt: int, cached: int) -> None:
        record = RequestRecord(
            request=RequestId("r"),
            slot=SlotId(BackendId("a"), 0),
            source=source,
            reason="",
            outcome=Outcome.OK,
            planned_tokens=cached,
            prompt_tokens=prompt,
            cached_tokens=cached,
            computed_tokens=prompt - cached,
            generated_tokens=1,
            waited_s=0.0,
            prepared_s=0.0,
            ttft_s=ttft_s,
            total_s=ttft_s,
            predicted_s=ttft_s,
        )
        self._telemetry.request(record)

    def refuses(self, outcome: str) -> None:
        self._telemetry.rejected(RequestId("r"), outcome, "")

    @property
    def metrics(self) -> str:
        return generate_latest(self._registry).decode()


def test_only_what_happened_since_counts() -> None:
    router = Router()
    router.serves(9.0, Source.COLD, 1000, 0)
    before = read_figures(router.metrics)
    router.serves(0.03, Source.RESIDENT, 100, 90)
    router.serves(0.04, Source.SNAPSHOT, 200, 150)
    router.refuses("queue_full")
    after = read_figures(router.metrics)

    found = recent(before, after)
    assert (found.requests, found.failed) == (3, 1)
    assert (found.resident_tokens, found.snapshot_tokens, found.computed_tokens) == (90, 150, 60)
    assert found.prompt_tokens == 300
    assert found.ttft_median_s is not None
    assert 0.025 < found.ttft_median_s <= 0.05  # the bucket
    everything = recent(NONE, after)
    assert (everything.requests, everything.prompt_tokens) == (4, 1300)
    assert everything.ttft_p95_s is not None
    assert everything.ttft_p95_s > 5
    assert recent(after, after).ttft_median_s is None
    assert recent(NONE, NONE).requests == 0


def test_who_left_did_not_fail() -> None:
    router = Router()
    for outcome in ("client_gone", "deadline"):
        router.refuses(outcome)

    assert recent(NONE, read_figures(router.metrics)).failed == 1


def test_a_restart_is_noticed() -> None:
    router = Router()
    idle = read_figures(router.metrics)
    router.serves(1.0, Source.COLD, 10, 0)
    busy = read_figures(router.metrics)

    assert began_anew(busy, idle)
    assert not began_anew(idle, busy)
    assert not began_anew(busy, busy)
    assert not began_anew(NONE, busy)
    gauge = {("kvferry_slots", frozenset[tuple[str, str]]()): 3.0}
    assert not began_anew(gauge, NONE)


def test_what_others_count_is_not_looked_at() -> None:
    text = 'up 1\nllamacpp:x_total{a="b"} 5\nkvferry_requests_total{outcome="ok"} 2\n'

    assert [name for name, _ in read_figures(text)] == ["kvferry_requests_total"]


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.5, [], None),
        (0.5, [(1.0, 0.0), (INF, 0.0)], None),
        (0.5, [(1.0, 10.0), (INF, 10.0)], 0.5),
        (0.5, [(1.0, 0.0), (3.0, 10.0), (INF, 10.0)], 2.0),
        (0.9, [(1.0, 5.0), (2.0, 10.0), (INF, 10.0)], 1.8),
        (0.95, [(1.0, 5.0), (INF, 10.0)], 1.0),
        (1.0, [(1.0, 10.0), (2.0, 10.0), (INF, 10.0)], 1.0),
    ],
)
def test_quantile(share: float, buckets: list[tuple[float, float]], expected: float | None) -> None:
    found = quantile(share, buckets)

    assert found == (None if expected is None else pytest.approx(expected))
