"""`router.store.manifests`: whole manifests survive, and no wrong one is ever read."""

import errno
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.types import Namespace, SnapshotId
from router.store import manifests as module
from router.store.files import LOCK, DirectoryLock, manifest_name
from router.store.format.split import Area, Split, Strip
from router.store.manifests import Manifest, WholeFile
from router.store.places.directory import Directory
from tests.support.files.state_files import head


def manifest(number: int) -> Manifest:
    begin, size = head([number, number + 1]), number * 1000
    return Manifest(
        id=SnapshotId(f"{number:032x}"),
        namespace=Namespace("n"),
        added_at=1.5 + number,
        head=begin,
        split=Split(len(begin), size, (), ()),
        n_stream=number % 3,
        checkpoints=(number, number + 1),
        extendable=number % 2 == 0,
        file=WholeFile(size, 10**18 + number, number, f"{number:032x}"),
    )


def summed(packed: bytes) -> bytes:
    return packed + xxhash.xxh3_128_digest(packed)


def path_of(folder: Path, number: int) -> Path:
    return folder / manifest_name(manifest(number).id)


def write(folder: Path, made: Manifest, *, fsync: bool = True) -> None:
    module.write(Directory(folder, fsync=fsync), made)


def read(path: Path) -> Manifest:
    return module.read(Directory(path.parent), path.name)


def put(folder: Path, raw: bytes) -> Path:
    path = path_of(folder, 1)
    path.write_bytes(raw)
    return path


def test_round_trip(tmp_path: Path) -> None:
    for number in (3, 1):
        write(tmp_path, manifest(number))
    newer = replace(manifest(1), added_at=77.0)
    write(tmp_path, newer)
    assert read(path_of(tmp_path, 1)) == newer
    assert read(path_of(tmp_path, 3)) == manifest(3)


def test_cut_or_damaged_at_every_byte(tmp_path: Path) -> None:
    """A file system that loses the end of a file yields no manifest, and no wrong one."""
    whole = module.encode(manifest(1))
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x80
        for raw in (whole[:at], bytes(damaged)):
            with pytest.raises(KvFileError):
                read(put(tmp_path, raw))


WRONG: list[dict[str, Any]] = [
    {"id": 5},
    {"id": "../x"},
    {"id": manifest(9).id},
    {"head": None},
    {"head": b"x"},
    {"media": [1.5]},
    {"extendable": 1},
    {"namespace": None},
    {"blobs": [b"x" * 32]},
    {"file": [1, 2, 3]},
    {"file": [999, 2, 3, "x"]},
    {"split": [len(head([1, 2])), 1000, [[[[0, 1]], 1, [[0, 9], [0, -9]]]], []]},
    {"split": [len(head([1, 2])), 1000, [], [7]]},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_manifest_of_wrong_values_is_damaged(tmp_path: Path, wrong: dict[str, Any]) -> None:
    values = msgspec.to_builtins(manifest(1), builtin_types=(bytes,)) | wrong
    with pytest.raises(KvFileError):
        read(put(tmp_path, summed(msgspec.msgpack.encode(values))))


@pytest.mark.parametrize("later", [{"version": 3}, {"version": 4, "id": 5, "key": "x"}])
def test_a_later_version_is_refused_whatever_its_fields(
    tmp_path: Path, later: dict[str, object]
) -> None:
    """An older kvferry must not delete what a newer one has written."""
    with pytest.raises(KvError, match="unknown version") as caught:
        read(put(tmp_path, summed(msgspec.msgpack.encode(later))))
    assert not isinstance(caught.value, KvFileError)


@pytest.mark.parametrize("raw", [b"", b"\x91" * 100_000, b"\xc1"])
def test_bytes_that_are_none(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(KvFileError):
        read(put(tmp_path, summed(raw)))


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    real.write_bytes(module.encode(manifest(1)))
    path = path_of(tmp_path, 1)
    path.symlink_to(real)
    with pytest.raises(KvFileError):
        read(path)


@pytest.mark.parametrize("step", ["fsync", "rename"])
def test_a_manifest_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The older one stays, and no half file."""
    write(tmp_path, manifest(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        for one in (replace(manifest(1), added_at=5.0), manifest(2)):
            with pytest.raises(KvError, match="No space left"):
                write(tmp_path, one)

    (path,) = tmp_path.iterdir()
    assert read(path) == manifest(1)


def test_bytes_then_name_then_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    for name in ("fsync", "rename"):
        real = getattr(os, name)

        def wrapped(*args: Any, name: str = name, real: Any = real) -> None:
            told.append(name)
            real(*args)

        monkeypatch.setattr(os, name, wrapped)
    write(tmp_path, manifest(1))
    assert told == ["fsync", "rename", "fsync"]
    told.clear()
    write(tmp_path, manifest(2), fsync=False)
    assert told == ["rename"]


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
    with pytest.raises(KvError, match="cannot open the lock file"):
        DirectoryLock(tmp_path / "gone").acquire()


def test_version_1_is_read() -> None:
    new = manifest(1)
    start, size_bytes = new.split.start, new.split.size_bytes
    rows, ends = Area((Strip(start, 2),), 4, ((0, 2),)), (size_bytes - start - 16,)
    split = Split(start, size_bytes, (rows,), ends)
    new = replace(new, file=None, split=split, blobs=(b"x" * 32,) * 3)
    old = msgspec.to_builtins(new, builtin_types=(bytes,)) | {"version": 1}
    old["split"] = (start, size_bytes, rows.strips, 4, 2, ends)
    assert module.decode(summed(msgspec.msgpack.encode(old)), "old") == new


@pytest.mark.parametrize("split", [None, 5, [], [1, 2], ["a"] * 6])
def test_version_1_that_is_no_manifest(split: object) -> None:
    old = msgspec.to_builtins(manifest(1), builtin_types=(bytes,)) | {"version": 1, "split": split}
    with pytest.raises(KvFileError):
        module.decode(summed(msgspec.msgpack.encode(old)), "old")


def test_the_format_is_that_of_the_last_version() -> None:
    """A change of it needs another `FORMAT_VERSION`, or defaults for what is new."""
    assert module.FORMAT_VERSION == 2
    assert xxhash.xxh3_64_hexdigest(module.encode(manifest(1))) == "53ce14e84f270ba0"
