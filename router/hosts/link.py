"""The link to another host: how fast states come over it, learned from those that did."""

from router.hosts.breaker import Breaker

# Bytes per second, until one was fetched. Chosen: what 1 Gbit/s carries.
_GUESS_PER_S = 110e6
_LEAST_BYTES = 1 << 20  # less says more of the time that asking takes
_WEIGHT = 0.5  # of one observation: the last fetch says most of the next
_ASKING_S = 0.005  # for the manifest, and the first part
_LATE = 3.0  # a fetch may take so many times what it was to take,
_LEAST_LIMIT_S = 2.0  # and this long


class Link:
    """Fetches from one host. `breaker`: of fetches that failed."""

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self.bytes_per_s = _GUESS_PER_S

    def seconds(self, size_bytes: int) -> float:
        """Return what a fetch of so many bytes is expected to take."""
        return _ASKING_S + size_bytes / self.bytes_per_s

    def limit_s(self, expected_s: float) -> float:
        """Return the time after which a fetch is given up."""
        return max(_LATE * expected_s, _LEAST_LIMIT_S)

    def fetched(self, size_bytes: int, seconds: float) -> None:
        """Learn from a fetch."""
        self.breaker.success()
        if size_bytes >= _LEAST_BYTES:
            per_s = size_bytes / max(seconds - _ASKING_S, 1e-3)
            self.bytes_per_s += _WEIGHT * (per_s - self.bytes_per_s)

    def gave_up(self, seconds: float, size_bytes: int) -> None:
        """Learn from a fetch that failed after `size_bytes`: too slow, or broken."""
        self.breaker.failure()
        if seconds > _LEAST_LIMIT_S:
            self.bytes_per_s = min(self.bytes_per_s, max(size_bytes / seconds, 1.0))
