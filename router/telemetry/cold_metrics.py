"""Metrics of the cold tier: what is there, what was copied, and what could not be read."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.base.types import ColdStatus


class ColdCollector(Collector):
    """A collector that reads the tier at each scrape. Registers itself."""

    def __init__(self, registry: CollectorRegistry, status: Callable[[], ColdStatus]) -> None:
        self._status = status
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the tier."""
        cold = self._status()
        for name, what, number in (
            ("kvferry_cold_up", "1 while the cold tier answers", not cold.problem),
            ("kvferry_cold_states", "States in the cold tier, of all hosts", cold.states),
            ("kvferry_cold_state_bytes", "Bytes of their state files", cold.state_bytes),
            ("kvferry_cold_waiting", "Snapshots that are due and not copied yet", cold.waiting),
        ):
            yield GaugeMetricFamily(name, what, number)
        for name, what, number in (
            ("kvferry_cold_copied", "Snapshots copied to the cold tier", cold.copied),
            ("kvferry_cold_written_bytes", "Bytes written to the cold tier", cold.written_bytes),
            (
                "kvferry_cold_skipped_bytes",
                "Bytes of blobs that were in the cold tier already",
                cold.skipped_bytes,
            ),
            ("kvferry_cold_fetched_bytes", "Bytes of blobs read there", cold.fetched_bytes),
            ("kvferry_cold_damaged", "Objects with other bytes than written", cold.damaged),
            ("kvferry_cold_missing", "Objects that were gone", cold.missing),
        ):
            yield CounterMetricFamily(name, what, number)
