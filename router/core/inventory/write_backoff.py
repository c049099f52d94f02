"""Write backoff: write no state files for a backend for a while after failed writes.

A disk that is full or read-only stays so for minutes. Each attempt stops the server's streams for
nothing, and ends in a log line.
"""

from dataclasses import dataclass

from router.core.model.tuning import TUNING


@dataclass(slots=True)
class WriteBackoff:
    """The write backoff of one backend: failures in a row, and its end in clock seconds, if any."""

    failures: int = 0
    until: float | None = None
    reason: str = ""  # of the last failure

    def fail(self, now: float, reason: str) -> None:
        """Count a failed save or rewrite: the second in a row starts a backoff.

        Each further failure doubles the backoff.
        """
        self.failures += 1
        self.reason = reason
        doubled = self.failures - TUNING.write_failures_forgiven - 1
        if doubled >= 0:
            backoff_s = TUNING.write_backoff_first_s * 2.0**doubled
            self.until = now + min(backoff_s, TUNING.write_backoff_most_s)

    def succeed(self) -> None:
        """Forget all failures."""
        self.failures, self.until, self.reason = 0, None, ""

    def end(self) -> None:
        """Allow writes again; the failures still count."""
        self.until = None
