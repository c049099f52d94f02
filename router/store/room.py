"""Room on the disk of the snapshots: how much of it they may still take.

Others write to the disk too. Below the floor the least valuable snapshots have to go, or the disk
is full for all programs, and only the oldest snapshots are ever kept.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from router.base.types import KvDir

_EVERY_S = 10.0
_WAITS = 6  # a minute, for files to be deleted
_MOST_SHARE = 0.1  # of a file system: the floor is less on a small one


async def watch(
    places: Callable[[], Sequence[KvDir]], min_free_bytes: int, tell: Callable[[int | None], None]
) -> None:
    """Tell the spare bytes every ten seconds, forever. `places`: directories with snapshots."""
    missing = Missing()
    while True:
        spare_bytes = await asyncio.to_thread(spare, places(), min_free_bytes)
        if not missing.is_known(spare_bytes):
            tell(spare_bytes)
        await asyncio.sleep(_EVERY_S)


@dataclass(slots=True)
class Missing:
    """Missing bytes that were told: files are deleted later than their snapshots are evicted."""

    told_bytes: int = 0
    n_waits: int = 0

    def is_known(self, spare_bytes: int | None) -> bool:
        """Return whether no more bytes are missing than were told before; not for ever."""
        missing_bytes = max(-(spare_bytes or 0), 0)
        if 0 < missing_bytes <= self.told_bytes and self.n_waits < _WAITS:
            self.n_waits += 1
            return True
        self.told_bytes, self.n_waits = missing_bytes, 0
        return False


def spare(places: Sequence[KvDir], min_free_bytes: int) -> int | None:
    """Return the free bytes above the floor; less than 0: so many are missing.

    None: nothing can be said. Directories on several file systems have several rooms, and what is
    evicted from one of them makes no room in another.
    """
    found: set[tuple[int, int]] = set()
    for place in places:
        with suppress(OSError):
            disk, device = os.statvfs(place), Path(place).stat().st_dev
            floor = min(min_free_bytes, int(_MOST_SHARE * disk.f_blocks * disk.f_frsize))
            found.add((device, disk.f_bavail * disk.f_frsize - floor))
    devices = {device for device, _ in found}
    return min(left for _, left in found) if len(devices) == 1 else None
