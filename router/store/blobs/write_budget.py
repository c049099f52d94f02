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
from router.store.files import put_whole, read_small

NAME = "written.json"
_HOUR_S = 3600
_HOURS = 24

_decode = json_decoder(list[tuple[int, int, int]])


@dataclass(slots=True)
class WriteBudget:
    """Bytes of the last 24 hours: written to a disk, and of new tokens that were saved.

    `wall_now`: seconds since the epoch.
    """

    max_bytes: float  # in 24 hours; inf: no limit
    wall_now: Callable[[], float]
    # Hour since the epoch, bytes written, bytes of new tokens.
    _hours: deque[tuple[int, int, int]] = field(default_factory=deque)

    def spend(self, written_bytes: int, new_bytes: int = 0) -> None:
        """Note that bytes were written, and how many bytes of new tokens were saved."""
        hour = self._hour()
        if self._hours and self._hours[-1][0] == hour:
            _, written, new = self._hours.pop()
            written_bytes, new_bytes = written_bytes + written, new_bytes + new
        self._hours.append((hour, written_bytes, new_bytes))

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
        return sum(written for hour, written, _ in self._hours if hour > first)

    @property
    def new_bytes(self) -> int:
        """Return the bytes of new tokens that were saved in the last 24 hours."""
        first = self._hour() - _HOURS
        return sum(new for hour, _, new in self._hours if hour > first)

    def _hour(self) -> int:
        return int(self.wall_now()) // _HOUR_S

    def read(self, root: Path) -> None:
        """Read what an earlier run has written. Blocks; never raises: a lost file begins anew.

        Of several directories on one disk, each has what was known when it was written last.
        """
        with suppress(OSError, KvFileError, UndecodableError):
            known = {hour: (written, new) for hour, written, new in self._hours}
            for hour, written, new in _decode(read_small(root / NAME)):
                before = known.get(hour, (0, 0))
                known[hour] = max(written, before[0]), max(new, before[1])
            self._hours = deque((hour, *known[hour]) for hour in sorted(known)[-_HOURS:])

    def write(self, root: Path) -> None:
        """Write it for the next run. Blocks. Raises OSError."""
        while len(self._hours) > _HOURS:
            self._hours.popleft()
        put_whole(root / NAME, msgspec.json.encode(list(self._hours)))
