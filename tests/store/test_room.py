"""`router.store.room`: what a disk has to spare, and for whom that can be said."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from router.base.types import KvDir
from router.store import room

MIB = 1024**2


def disk(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    found = SimpleNamespace(f_blocks=total // 4096, f_frsize=4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda _: found)


@pytest.mark.parametrize(
    ("total", "free", "floor", "spare"),
    [
        (1000, 500, 40, 460),
        (1000, 30, 40, -10),
        (100, 50, 40, 40),  # a tenth of a small disk
        (1000, 5, 0, 5),
    ],
)
def test_spare_bytes(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    total: int,
    free: int,
    floor: int,
    spare: int,
) -> None:
    disk(monkeypatch, total * MIB, free * MIB)
    places = [KvDir(str(tmp_path)), KvDir(str(tmp_path / "missing"))]
    assert room.spare(places, floor * MIB) == spare * MIB


def test_missing_bytes_are_told_once_until_files_had_time_to_go() -> None:
    missing = room.Missing()
    assert not missing.is_known(-100)
    assert missing.is_known(-100), "being deleted"
    assert missing.is_known(-40)
    assert not missing.is_known(-130), "somebody has written more"
    assert [missing.is_known(-130) for _ in range(8)] == [True] * 6 + [False, True]
    assert not missing.is_known(50)
    assert not missing.is_known(None)
    assert not missing.is_known(-1)


def test_of_several_disks_nothing_can_be_said(tmp_path: Path) -> None:
    other = "/proc" if tmp_path.stat().st_dev != Path("/proc").stat().st_dev else "/sys"
    assert room.spare([KvDir(str(tmp_path)), KvDir(other)], 0) is None
    assert room.spare([KvDir(str(tmp_path)), KvDir(str(tmp_path.parent))], 0) is not None
    assert room.spare([KvDir(str(tmp_path / "missing"))], 0) is None
    assert room.spare([], 0) is None
