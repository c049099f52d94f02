"""The link to another host: how fast states come over it, guessed at first, then learned."""

from collections.abc import Callable
from math import inf

from router.hosts.breaker import Breaker
from router.hosts.choice import Trust

# Until a state was fetched. Chosen: the questions, and what 10 Gbit/s carries. A guess that is too
# slow would let no fetch pay, and never be corrected; one that is too fast costs one late fetch.
_ASKING_S, _S_PER_BYTE = 0.005, 1 / 1.1e9
_LEAST_BYTES = 1 << 20  # fewer say nothing of the rate
_WEIGHT = 0.4  # of one fetch
_GOOD_S = 600.0  # a rate is guessed anew where nothing was fetched for so long
_LATE = 3.0  # a fetch may take so many times what it was to take,
_LEAST_LIMIT_S = 2.0  # and this long


class Link:
    """Fetches from one host. `breaker`: of fetches that failed.

    The rate is learned from the time in which bytes came, and all else as a fixed time. A failure
    says nothing of the rate unless bytes came: it makes the link dearer for a minute or two.
    """

    def __init__(
        self,
        breaker: Breaker,
        now: Callable[[], float],
        asking_s: float = _ASKING_S,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """`asking_s`: what a fetch takes besides its bytes, until that is learned.

        `on_failure`: called when a fetch has failed.
        """
        self.breaker = breaker
        self._on_failure = on_failure
        self._asking_s = asking_s
        self._s_per_byte = _S_PER_BYTE
        self._trust = Trust(now)
        self._now = now
        self._learned_at = -inf  # when the rate was learned

    def seconds(self, size_bytes: int) -> float:
        """Return what a fetch of so many bytes is expected to take."""
        if self._now() - self._learned_at > _GOOD_S:
            self._s_per_byte = _S_PER_BYTE
        return self._trust.price_s(self._asking_s + size_bytes * self._s_per_byte)

    def limit_s(self, expected_s: float) -> float:
        """Return the time after which a fetch is given up."""
        return max(_LATE * expected_s, _LEAST_LIMIT_S)

    def fetched(self, size_bytes: int, reading_s: float, else_s: float) -> None:
        """Learn from a fetch: the seconds in which its bytes came, and all others."""
        self.breaker.success()
        self._asking_s += _WEIGHT * (max(else_s, 0.0) - self._asking_s)
        self._learn(size_bytes, reading_s)

    def gave_up(self, size_bytes: int, reading_s: float, took_s: float) -> None:
        """Learn from a fetch that broke after `size_bytes`."""
        self.breaker.failure()
        self._learn(size_bytes, reading_s)
        self._trust.note(0.0, took_s)
        self._on_failure()

    def _learn(self, size_bytes: int, reading_s: float) -> None:
        if size_bytes >= _LEAST_BYTES:
            self._learned_at = self._now()
            self._s_per_byte += _WEIGHT * (reading_s / size_bytes - self._s_per_byte)
