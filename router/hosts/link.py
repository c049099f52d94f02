"""The link to another host: how fast states come over it, guessed at first, then learned.

What failed some times in a row is left alone for a time that doubles (`Breaker`).
"""

from collections.abc import Callable
from math import inf

from router.hosts.choice import Trust

_BREAKS_AFTER = 3
_FIRST_BREAK_S = 1.0


class Breaker:
    """Counts failures in a row, and is open while the next attempt should wait."""

    def __init__(
        self, longest_s: float, now: Callable[[], float], after: int = _BREAKS_AFTER
    ) -> None:
        """Set up closed. `longest_s`: the longest break; `now`: clock seconds.

        `after`: so many failures in a row begin a break.
        """
        self._after = after
        self._longest_s = longest_s
        self._now = now
        self._failures = 0
        self.open_until = 0.0  # clock seconds: when the last break ends or ended

    @property
    def is_open(self) -> bool:
        """Return whether a break is under way."""
        return self._now() < self.open_until

    def success(self) -> None:
        """Note an attempt that succeeded: the count starts anew."""
        self._failures = 0

    def failure(self) -> None:
        """Note a failed attempt: at `after` in a row, each one begins a break."""
        self._failures += 1
        if self._failures >= self._after:
            doubled = _FIRST_BREAK_S * 2 ** min(self._failures - self._after, 16)
            self.open_until = self._now() + min(doubled, self._longest_s)


# Until a state was fetched. Chosen: the questions, and what 10 Gbit/s carries. A guess that is too
# slow would let no fetch pay, and never be corrected; one that is too fast costs one late fetch.
_ASKING_S, _S_PER_BYTE = 0.005, 1 / 1.1e9
_LEAST_BYTES = 1 << 20  # fewer say nothing of the rate
_WEIGHT = 0.4  # of one fetch's questions
_HALF_BYTES = 16 << 20  # a fetch of so many bytes counts as much as all before
_GOOD_S = 600.0  # a rate may have doubled where nothing was fetched for so long
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
        good_s: float = _GOOD_S,
    ) -> None:
        """`asking_s`: what a fetch takes besides its bytes, until that is learned.

        `on_failure`: called when a fetch has failed. `good_s`: how long a rate is good.
        """
        self._good_s = good_s
        self.breaker = breaker
        self._on_failure = on_failure
        self._asking_s = asking_s
        self._learned: float | None = None  # seconds for a byte
        self._trust = Trust(now)
        self._now = now
        self._learned_at = -inf  # when the rate was learned

    def seconds(self, size_bytes: int) -> float:
        """Return the expected seconds of a fetch of so many bytes."""
        return self._trust.price_s(self._asking_s + size_bytes * self._s_per_byte())

    def limit_s(self, expected_s: float) -> float:
        """Return the time after which a fetch is given up; its bytes tell the rate all the same."""
        return max(_LATE * expected_s, _LEAST_LIMIT_S)

    def _s_per_byte(self) -> float:
        """Return the seconds for a byte: as learned, and half of that for each `good_s` since.

        Else one slow hour of a network would keep every later fetch from being tried.
        """
        if self._learned is None:
            return _S_PER_BYTE
        halvings = min((self._now() - self._learned_at) // self._good_s, 30)
        return max(self._learned / 2**halvings, min(self._learned, _S_PER_BYTE))

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
        """Take in a rate, by the bytes that it is of: the first of them come late."""
        if size_bytes >= _LEAST_BYTES:
            before, weight = self._s_per_byte(), size_bytes / (size_bytes + _HALF_BYTES)
            self._learned = before + weight * (reading_s / size_bytes - before)
            self._learned_at = self._now()
