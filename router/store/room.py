"""Room on the disk of the snapshots: how much of it they may still take.

Others write to the disk too. Below the floor the least valuable snapshots have to go, or the disk
is full for all programs, and only the oldest snapshots are ever kept.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from router.base.types import KvDir

_EVERY_S = 10.0
_MOST_SHARE = 0.1  # of a file system: the floor is less on a small one


async def watch(
    places: Callable[[], Sequence[KvDir]], min_free_bytes: int, tell: Callable[[int], None]
) -> None:
    """Tell the spare bytes every ten seconds, forever. `places`: directories with snapshots."""
    while True:
        spare_bytes = await asyncio.to_thread(spare, places(), min_free_bytes)
        if spare_bytes is not None:
            tell(spare_bytes)
        await asyncio.sleep(_EVERY_S)


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
