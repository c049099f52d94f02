"""Time, for those who are given it as an argument."""

import time


class MonotonicClock:
    """ports.Clock: the machine's monotonic clock."""

    def now(self) -> float:
        """Seconds that only go forward."""
        return time.monotonic()


def wall_ns() -> int:
    """Nanoseconds since the epoch; for traces, which other machines add to."""
    return time.time_ns()


def wall_now() -> float:
    """Seconds since the epoch; for records that outlive the process, never for durations."""
    return time.time()  # noqa: TID251 - the one place where wall time is read
