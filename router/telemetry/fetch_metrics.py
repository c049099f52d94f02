"""Metrics of states that travel between hosts."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25)


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
            buckets=_SECONDS,
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
