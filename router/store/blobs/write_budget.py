"""Budget of bytes that may be written in any 24 hours, so that an SSD lives for years.

Counted by the hour, in a small file beside the blobs: a restart does not begin anew.
"""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import KvFileError
from router.store.files import read_small, replace_small

NAME = "written.json"
_HOUR_S = 3600
_HOURS = 24

_decode = json_decoder(list[tuple[int, int]])


@dataclass(slots=True)
class WriteBudget:
    """Bytes written in the last 24 hours. `wall_now`: seconds since the epoch."""

    max_bytes: float  # in 24 hours; inf: no limit
    wall_now: Callable[[], float]
    _hours: deque[tuple[int, int]] = field(default_factory=deque)  # hour since the epoch, bytes

    def spend(self, size_bytes: int) -> None:
        """Note that bytes were written."""
        hour = self._hour()
        if self._hours and self._hours[-1][0] == hour:
            size_bytes += self._hours.pop()[1]
        self._hours.append((hour, size_bytes))

    @property
    def left_bytes(self) -> float:
        """Return how many bytes may be written now; inf without a limit."""
        return max(self.max_bytes - self.spent_bytes, 0)

    @property
    def spent_bytes(self) -> int:
        """Return the bytes written in the last 24 hours. Hours of the future, as after a change of
        the clock, count too.
        """
        first = self._hour() - _HOURS
        return sum(n for hour, n in self._hours if hour > first)

    def _hour(self) -> int:
        return int(self.wall_now()) // _HOUR_S

    def read(self, root: Path) -> None:
        """Read what an earlier run has written. Blocks; never raises: a lost file begins anew."""
        with suppress(OSError, KvFileError, UndecodableError):
            self._hours = deque(sorted(_decode(read_small(root / NAME)))[-_HOURS:])

    def write(self, root: Path) -> None:
        """Write it for the next run. Blocks. Raises OSError."""
        while len(self._hours) > _HOURS:
            self._hours.popleft()
        replace_small(root / NAME, msgspec.json.encode(list(self._hours)))
