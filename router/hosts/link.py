"""The link to another host: how fast states come over it, learned from those that did."""

from router.core.model.rates import LinearFit
from router.hosts.breaker import Breaker

# Until a state was fetched. Chosen: the questions, and what 1 Gbit/s carries.
_ASKING_S, _S_PER_BYTE = 0.005, 1 / 110e6
_LATE = 3.0  # a fetch may take so many times what it was to take,
_LEAST_LIMIT_S = 2.0  # and this long


class Link:
    """Fetches from one host. `breaker`: of fetches that failed."""

    def __init__(self, breaker: Breaker) -> None:
        self.breaker = breaker
        self._fit = LinearFit(_ASKING_S, _S_PER_BYTE)

    def seconds(self, size_bytes: int) -> float:
        """Return what a fetch of so many bytes is expected to take."""
        return self._fit.predict(1.0, size_bytes)

    def limit_s(self, expected_s: float) -> float:
        """Return the time after which a fetch is given up."""
        return max(_LATE * expected_s, _LEAST_LIMIT_S)

    def fetched(self, size_bytes: int, seconds: float) -> None:
        """Learn from a fetch, less the time until its state could be read."""
        self.breaker.success()
        self._fit.observe(1.0, size_bytes, max(seconds, 0.0))

    def gave_up(self, size_bytes: int, seconds: float) -> None:
        """Learn from a fetch that broke after `size_bytes`; one that was too slow was that slow."""
        self.breaker.failure()
        if seconds > self.seconds(size_bytes):
            self._fit.observe(1.0, size_bytes, seconds)
