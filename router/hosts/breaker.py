"""A breaker: leave alone what failed some times in a row, for a time that doubles."""

from collections.abc import Callable

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
        self._open_until = 0.0

    @property
    def open_until(self) -> float:
        """Return the clock seconds at which the last break ends or ended."""
        return self._open_until

    @property
    def is_open(self) -> bool:
        """Return whether a break is under way."""
        return self._now() < self._open_until

    def success(self) -> None:
        """Note an attempt that succeeded: the count starts anew."""
        self._failures = 0

    def failure(self) -> None:
        """Note a failed attempt: at `after` in a row, each one begins a break."""
        self._failures += 1
        if self._failures >= self._after:
            doubled = _FIRST_BREAK_S * 2 ** min(self._failures - self._after, 16)
            self._open_until = self._now() + min(doubled, self._longest_s)
