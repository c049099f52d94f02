"""Clocks, to be passed as arguments."""

import time


class MonotonicClock:
    """The machine's monotonic clock (`ports.Clock`)."""

    now = staticmethod(time.monotonic)  # seconds that only go forward


def wall_ns() -> int:
    """Return nanoseconds since the epoch; for traces, which other machines add to."""
    return time.time_ns()


def wall_now() -> float:
    """Return seconds since the epoch.

    For records that outlive the process, never for durations.
    """
    return time.time()  # noqa: TID251 - the one place where wall time is read
