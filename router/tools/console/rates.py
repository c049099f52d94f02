"""Compute recent figures from the counters of two scrapes of `/metrics`."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Figures = Mapping[tuple[str, Labels], float]
"""Sample name and labels, mapped to the value."""

NONE: Figures = {}


def read_figures(text: str) -> Figures:
    """Return the router's own samples. Raises ValueError if `text` is no Prometheus text."""
    own = "\n".join(line for line in text.splitlines() if "kvferry_" in line)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(own + "\n")
        for sample in family.samples
    }


@dataclass(frozen=True, slots=True)
class Recent:
    """The figures between two scrapes. Seconds are None where nothing was measured."""

    requests: int
    failed: int  # all requests that are neither ok nor abandoned
    resident_tokens: int
    snapshot_tokens: int
    computed_tokens: int
    ttft_median_s: float | None
    ttft_p95_s: float | None

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return self.resident_tokens + self.snapshot_tokens + self.computed_tokens


def began_anew(before: Figures, after: Figures) -> bool:
    """Return True if a counter went back: the router was restarted in between."""
    return any(
        after.get(key, 0.0) < value
        for key, value in before.items()
        if key[0].endswith(("_total", "_count"))
    )


def recent(before: Figures, after: Figures) -> Recent:
    """Return the figures from `before` to `after`; from NONE, all since the router's start."""

    def more(name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(
            value - before.get(key, 0.0)
            for key, value in after.items()
            if key[0] == name and wanted <= key[1]
        )

    requests = more("kvferry_requests_total")
    fine = sum(more("kvferry_requests_total", outcome=name) for name in ("ok", "client_gone"))
    tokens = {
        source: round(more("kvferry_prompt_tokens_total", source=source))
        for source in ("resident", "snapshot", "computed")
    }
    limits = {dict(labels)["le"] for name, labels in after if name == "kvferry_ttft_seconds_bucket"}
    buckets = sorted(
        (float(limit), more("kvferry_ttft_seconds_bucket", le=limit)) for limit in limits
    )
    return Recent(
        requests=round(requests),
        failed=round(requests - fine),
        resident_tokens=tokens["resident"],
        snapshot_tokens=tokens["snapshot"],
        computed_tokens=tokens["computed"],
        ttft_median_s=quantile(0.5, buckets),
        ttft_p95_s=quantile(0.95, buckets),
    )


def quantile(share: float, buckets: list[tuple[float, float]]) -> float | None:
    """Return a quantile as Prometheus does, linear within a bucket; None without samples.

    `buckets`: pairs of upper limit and cumulative count; the last limit is infinite.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted = share * buckets[-1][1]
    for (below_s, below), (limit_s, number) in pairwise([(0.0, 0.0), *buckets]):
        if number >= wanted and number > below:
            if limit_s == float("inf"):
                return below_s
            return below_s + (limit_s - below_s) * (wanted - below) / (number - below)
    return None
