"""`router.store.sidecars`: whole records survive, and no wrong record is ever read."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import asdict, replace

from router.base.errors import KvError, KvFileError
from router.base.types import Namespace, SnapshotId
from router.store import sidecars as module
from router.store.files import new_sidecar_name, sidecar_name
from router.store.sidecars import LOCK, DirectoryLock, Sidecars, SnapshotRecord


def record(number: int) -> SnapshotRecord:
    return SnapshotRecord(
        id=SnapshotId(f"{number:032x}"),
        namespace=Namespace("n"),
        n_tokens=number,
        size_bytes=number * 1000,
        mtime_ns=10**18 + number,
        inode=number,
        checksum=f"{number:032x}",
        added_at=1.5 + number,
        media=(-number,),
        n_stream=number % 3,
        checkpoints=(number, number + 1),
        extendable=number % 2 == 0,
    )


def opened(directory: Path, *, fsync: bool = False) -> Sidecars:
    sidecars = Sidecars(directory, fsync=fsync)
    sidecars.open()
    sidecars.read(sidecars.names)
    return sidecars


def file_of(directory: Path, number: int) -> Path:
    return directory / sidecar_name(record(number).id)


def test_round_trip(tmp_path: Path) -> None:
    sidecars = opened(tmp_path, fsync=True)
    for number in (3, 0, 2, 1):
        sidecars.add(record(number))
    sidecars.drop(record(1).id)
    sidecars.close()

    again = opened(tmp_path)
    assert again.records == {record(n).id: record(n) for n in (0, 2, 3)}
    assert (again.get(record(1).id), again.get(record(2).id)) == (None, record(2))
    assert not file_of(tmp_path, 1).exists()


def test_a_second_record_replaces_the_first(tmp_path: Path) -> None:
    sidecars = opened(tmp_path)
    newer = replace(record(1), inode=77)
    sidecars.add(record(1))
    sidecars.add(newer)
    assert list(opened(tmp_path).records.values()) == [newer]


def test_a_record_that_is_not_there_is_dropped(tmp_path: Path) -> None:
    opened(tmp_path).drop(record(5).id)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """A file system that loses the end of a file yields no record, and no wrong one."""
    sidecars = opened(tmp_path)
    sidecars.add(record(1))
    sidecars.add(record(2))
    whole = file_of(tmp_path, 1).read_bytes()
    for cut in range(len(whole)):
        file_of(tmp_path, 1).write_bytes(whole[:cut])
        assert list(opened(tmp_path).records.values()) == [record(2)]


WRONG: list[dict[str, Any]] = [
    {"id": 5},
    {"id": "../x"},
    {"id": record(9).id},
    {"n_tokens": "1"},
    {"n_tokens": None},
    {"media": [1.5]},
    {"extendable": 1},
    {"namespace": None},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_record_of_wrong_values_is_left_out(tmp_path: Path, wrong: dict[str, Any]) -> None:
    file_of(tmp_path, 1).write_bytes(msgspec.json.encode(asdict(record(1)) | wrong))
    assert opened(tmp_path).records == {}


@pytest.mark.parametrize("name", ["id", "namespace", "n_tokens", "checksum", "added_at"])
def test_a_record_without_a_value_is_left_out(tmp_path: Path, name: str) -> None:
    found = asdict(record(1))
    del found[name]
    file_of(tmp_path, 1).write_bytes(msgspec.json.encode(found))
    assert opened(tmp_path).records == {}


def test_a_record_of_a_later_version_is_refused(tmp_path: Path) -> None:
    """An older kvferry must not delete what a newer one has written."""
    file_of(tmp_path, 1).write_bytes(msgspec.json.encode(replace(record(1), version=2)))
    with pytest.raises(KvError, match="unknown version 2"):
        opened(tmp_path)
    assert file_of(tmp_path, 1).exists()


@pytest.mark.parametrize("later", [b'{"version":2}', b'{"version":3,"id":5,"key":"x"}'])
def test_a_later_version_may_have_any_fields(tmp_path: Path, later: bytes) -> None:
    """Regression: without the fields of this version it was damaged, and swept with its file."""
    file_of(tmp_path, 1).write_bytes(later)
    with pytest.raises(KvError, match="unknown version"):
        opened(tmp_path)
    assert file_of(tmp_path, 1).exists()


@pytest.mark.parametrize("raw", [b'{"version":1,"id":"\xff"}', b"[" * 100_000])
def test_text_that_is_none_is_left_out(tmp_path: Path, raw: bytes) -> None:
    """Regression: neither error of the decoder is a DecodeError, and each ended the start."""
    file_of(tmp_path, 1).write_bytes(raw)
    assert opened(tmp_path).records == {}


def test_each_byte_may_be_damaged(tmp_path: Path) -> None:
    """A damaged record is left out, refused as one of another version, or a record all the same."""
    whole = msgspec.json.encode(record(1))
    for at in range(len(whole)):
        for damage in (0x01, 0x80):
            raw = bytearray(whole)
            raw[at] ^= damage
            file_of(tmp_path, 1).write_bytes(raw)
            with suppress(KvError):  # of another version
                assert opened(tmp_path).records.keys() <= {record(1).id}


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.write_bytes(msgspec.json.encode(record(1)))
    file_of(tmp_path, 1).symlink_to(real)
    assert opened(tmp_path).records == {}


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_record_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The older record stays, and no half file."""
    sidecars = opened(tmp_path, fsync=True)
    sidecars.add(record(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(KvError, match="No space left"):
            sidecars.add(replace(record(1), inode=5))
        with pytest.raises(KvError, match="No space left"):
            sidecars.add(record(2))

    assert list(sidecars.records.values()) == [record(1)]
    assert list(opened(tmp_path).records.values()) == [record(1)]
    assert not (tmp_path / new_sidecar_name(record(1).id)).exists()


def test_sidecar_bytes_then_name_then_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def wrapped(*args: Any, name: str = name, real: Any = real) -> None:
            told.append(name)
            real(*args)

        monkeypatch.setattr(os, name, wrapped)
    sidecars = opened(tmp_path, fsync=True)
    sidecars.add(record(1))
    assert told == ["fsync", "rename", "fsync"]

    told.clear()
    quick = opened(tmp_path)
    quick.add(record(2))
    assert told == ["rename"]


def test_only_its_owner_may_read_a_record(tmp_path: Path) -> None:
    before = os.umask(0)
    opened(tmp_path).add(record(1))
    os.umask(before)
    assert file_of(tmp_path, 1).stat().st_mode & 0o777 == 0o600


def test_another_directory_in_its_place(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.check()
    (tmp_path / LOCK).unlink()
    with pytest.raises(KvFileError, match="not the directory that was opened"):
        lock.check()
    (tmp_path / LOCK).write_bytes(b"")
    with pytest.raises(KvFileError, match="not the directory that was opened"):
        lock.check()
    lock.release()


def test_a_directory_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(KvError, match="cannot read the records"):
        Sidecars(tmp_path / "gone").open()
    with pytest.raises(KvError, match="cannot open the lock file"):
        DirectoryLock(tmp_path / "gone").acquire()


def test_the_format_is_that_of_the_last_version() -> None:
    """A change of the record needs another `FORMAT_VERSION`, or defaults for what is new."""
    assert module.FORMAT_VERSION == 1
    assert msgspec.json.encode(record(1)) == (
        b'{"version":1,"id":"00000000000000000000000000000001","namespace":"n","n_tokens":1,'
        b'"size_bytes":1000,"mtime_ns":1000000000000000001,"inode":1,'
        b'"checksum":"00000000000000000000000000000001","added_at":2.5,"media":[-1],"n_stream":1,'
        b'"checkpoints":[1,2],"extendable":false}'
    )
