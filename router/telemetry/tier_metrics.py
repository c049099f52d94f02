"""Metrics of the tier of blobs and of the cold tier, read at each scrape."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.base.types import ColdStatus, TierStatus

# By name: a description, and the field of the status that has the number.
_Families = Mapping[str, tuple[str, str]]


class TierMetrics(NamedTuple):
    """The metrics of a tier."""

    gauges: _Families
    counters: _Families


BLOBS = TierMetrics(
    {
        "kvferry_blobs": ("Blobs on disk", "blobs"),
        "kvferry_blob_bytes": ("Bytes of blobs on disk, each once", "blob_bytes"),
        "kvferry_blob_sum_bytes": ("Bytes of all split snapshots, each whole", "sum_bytes"),
        "kvferry_whole_file_bytes": ("Bytes of state files in KV directories", "whole_bytes"),
        "kvferry_unwritten_files": ("State files that are not split yet", "unwritten"),
        "kvferry_blob_write_budget_bytes": ("Bytes still allowed today", "budget_left_bytes"),
        "kvferry_written_day_bytes": ("Bytes written to disks in 24 hours", "today_bytes"),
        "kvferry_new_day_bytes": ("Bytes of tokens that were new in them", "new_today_bytes"),
    },
    {
        "kvferry_blob_written_bytes": ("Bytes of written blobs and manifests", "written_bytes"),
        "kvferry_blob_split_bytes": ("Bytes of state files that were split", "split_bytes"),
        "kvferry_blob_writes_put_off": ("Writes of blobs that were put off", "put_off"),
        "kvferry_blobs_damaged": ("Blobs unreadable, or with other bytes", "damaged"),
    },
)
COLD = TierMetrics(
    {
        "kvferry_cold_up": ("1 while the cold tier answers", "problem"),
        "kvferry_cold_states": ("States in the cold tier, of all hosts", "states"),
        "kvferry_cold_state_bytes": ("Bytes of their state files", "state_bytes"),
        "kvferry_cold_waiting": ("Snapshots that are due and not copied yet", "waiting"),
    },
    {
        "kvferry_cold_copied": ("Snapshots copied to the cold tier", "copied"),
        "kvferry_cold_written_bytes": ("Bytes written to the cold tier", "written_bytes"),
        "kvferry_cold_skipped_bytes": ("Bytes of blobs that were there already", "skipped_bytes"),
        "kvferry_cold_fetched_bytes": ("Bytes of blobs read there", "fetched_bytes"),
        "kvferry_cold_damaged": ("Objects with other bytes than written", "damaged"),
        "kvferry_cold_missing": ("Objects that were gone", "missing"),
    },
)


def tier_metrics(metrics: TierMetrics, tier: TierStatus | ColdStatus | None) -> Iterator[Metric]:
    """Yield the metrics of a tier; none where there is none."""
    if tier is None:
        return
    for name, (what, field) in metrics.gauges.items():
        value = getattr(tier, field)  # a problem is a text, empty while all is well
        yield GaugeMetricFamily(name, what, not value if isinstance(value, str) else value)
    for name, (what, field) in metrics.counters.items():
        yield CounterMetricFamily(name, what, getattr(tier, field))
