"""A machine that loses power: what was written and not synchronized may be zeros afterwards.

File systems may keep size, times and name of such a file: the worst case for a store that knows a
file by them.
"""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.base.errors import KvError
from router.base.types import KvDir
from tests.support.files.state_files import full
from tests.support.files.stores import Stores, put


class Disk:
    """Knows which files are synchronized. `lose_power` zeroes all others."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._directory = directory
        self._synced: dict[int, tuple[int, int]] = {}
        real = os.fsync

        def fsync(fd: int) -> None:
            real(fd)
            status = os.fstat(fd)
            self._synced[status.st_ino] = status.st_size, status.st_mtime_ns

        monkeypatch.setattr(os, "fsync", fsync)

    def lose_power(self) -> list[str]:
        """Zero what is not synchronized; return the names."""
        lost = []
        for file in self._directory.iterdir():
            status = file.stat()
            if self._synced.get(status.st_ino) == (status.st_size, status.st_mtime_ns):
                continue
            with file.open("r+b") as writer:
                writer.write(bytes(status.st_size))
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
            lost.append(file.name)
        return lost


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Stores]:
    made = Stores((KvDir(str(tmp_path)),))
    yield made
    await made.aclose()


@pytest.mark.parametrize("fsync", [True, False])
async def test_no_snapshot_comes_back_wrong(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsync: bool
) -> None:
    """With `fsync` all that were durable come back."""
    disk, store = Disk(tmp_path, monkeypatch), stores.make(fsync=fsync)
    await store.load()
    written = {(await put(store, raw)).id: raw for raw in (full(range(n)) for n in (5, 50, 500))}
    await store.flush()
    lost = disk.lose_power()
    again, found = await stores.restart(store)
    right = 0
    for snapshot in found:
        try:
            name = await again.open(snapshot, snapshot.kv_dir, 0)
        except KvError:
            continue
        assert (tmp_path / name).read_bytes() == written[snapshot.id]
        right += 1
    assert right == (len(written) if fsync else 0), lost
