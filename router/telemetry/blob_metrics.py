"""Metrics of the tier of blobs: what it holds, what it spared the disk, and what went wrong."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.base.types import TierStatus


class BlobCollector(Collector):
    """A collector that reads the tier at each scrape. Registers itself."""

    def __init__(
        self, registry: CollectorRegistry, status: Callable[[], TierStatus | None]
    ) -> None:
        self._status = status
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the tier; nothing without one."""
        tier = self._status()
        if tier is None:
            return
        for name, what, number in (
            ("kvferry_blobs", "Blobs on disk", tier.blobs),
            ("kvferry_blob_bytes", "Bytes of blobs on disk, each once", tier.blob_bytes),
            (
                "kvferry_blob_sum_bytes",
                "Bytes of all split snapshots, as if each was a file of its own",
                tier.sum_bytes,
            ),
            (
                "kvferry_whole_file_bytes",
                "Bytes of state files in the KV directories",
                tier.whole_bytes,
            ),
            ("kvferry_unwritten_files", "State files that are not split yet", tier.unwritten),
            (
                "kvferry_blob_write_budget_bytes",
                "Bytes that may still be written in these 24 hours",
                tier.budget_left_bytes,
            ),
        ):
            yield GaugeMetricFamily(name, what, number)
        for name, what, number in (
            (
                "kvferry_blob_written_bytes",
                "Bytes written for blobs and manifests",
                tier.written_bytes,
            ),
            ("kvferry_blob_split_bytes", "Bytes of state files that were split", tier.split_bytes),
            ("kvferry_blob_writes_put_off", "Writes of blobs that were put off", tier.put_off),
            (
                "kvferry_blobs_damaged",
                "Blobs that could not be read, or had other bytes",
                tier.damaged,
            ),
        ):
            yield CounterMetricFamily(name, what, number)
