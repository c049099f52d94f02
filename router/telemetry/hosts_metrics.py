"""Metrics of other hosts: which are up, what they are asked, what goes to them and comes back."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from router.base.types import Outcome

_QUOTE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)
_FETCH_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25)


class HostsMetrics:
    """Counters of what is asked of peers and forwarded to them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._quotes = Counter(
            "kvferry_peer_quotes",
            "Quotes asked of peers, by result: offer, or none in time",
            ["peer", "result"],
            registry=registry,
        )
        self._quote_s = Histogram(
            "kvferry_peer_quote_seconds",
            "Time until a peer's quote, or until it was given up",
            buckets=_QUOTE_S,
            registry=registry,
        )
        self._forwarded = Counter(
            "kvferry_forwarded_requests",
            "Requests sent to a peer, by outcome",
            ["peer", "outcome"],
            registry=registry,
        )
        self._received = Counter(
            "kvferry_received_requests", "Requests that peers sent", ["peer"], registry=registry
        )

    def quoted(self, peer: str, seconds: float, *, offered: bool) -> None:
        """Count one question to a peer."""
        self._quotes.labels(peer, "offer" if offered else "none").inc()
        self._quote_s.observe(seconds)

    def forwarded(self, peer: str, outcome: Outcome) -> None:
        """Count one request that was sent to a peer."""
        self._forwarded.labels(peer, outcome).inc()

    def received(self, peer: str) -> None:
        """Count one request that a peer sent."""
        self._received.labels(peer).inc()


def peer_metrics(
    peers: Iterable[tuple[str, bool, float, float]], directory_up: bool | None
) -> Iterable[Metric]:
    """Yield gauges of peers and of the directory; None: there is none.

    `peers`: names, whether they can be used, how busy they are, how much later than quoted.
    """
    up = GaugeMetricFamily("kvferry_peer_up", "1 if requests may go there", labels=["peer"])
    busy = GaugeMetricFamily(
        "kvferry_peer_busy_ratio", "Requests for each slot of a peer", labels=["peer"]
    )
    late = GaugeMetricFamily(
        "kvferry_peer_late_seconds", "How much later than quoted a peer is", labels=["peer"]
    )
    for name, *values in peers:
        for family, value in zip((up, busy, late), values, strict=True):
            family.add_metric([name], float(value))
    yield from (up, busy, late)
    if directory_up is not None:
        yield GaugeMetricFamily(
            "kvferry_directory_up", "1 if the directory answers", value=float(directory_up)
        )


class FetchMetrics:
    """Counters of what is fetched from peers and handed out to them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fetches = Counter(
            "kvferry_fetches",
            "States fetched from a peer, by result: ok, failed, cancelled",
            ["peer", "result"],
            registry=registry,
        )
        self._bytes = Counter(
            "kvferry_fetched_bytes",
            "Bytes of states that came from a peer",
            ["peer"],
            registry=registry,
        )
        self._seconds = Histogram(
            "kvferry_fetch_seconds",
            "Time to fetch a state, from the question to the snapshot",
            buckets=_FETCH_S,
            registry=registry,
        )
        self._handed_out = Counter(
            "kvferry_handed_out_bytes", "Bytes of states that peers fetched here", registry=registry
        )

    def fetched(self, peer: str, n_bytes: int, result: str, seconds: float | None = None) -> None:
        """Count one fetch; `seconds` if it succeeded."""
        self._fetches.labels(peer, result).inc()
        self._bytes.labels(peer).inc(n_bytes)
        if seconds is not None:
            self._seconds.observe(seconds)

    def handed_out(self, n_bytes: int) -> None:
        """Count the bytes of one part that a peer got."""
        self._handed_out.inc(n_bytes)
