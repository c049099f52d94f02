"""`router.store.blobs.blob_files`: written once and whole, and never read when damaged."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from router.base.errors import KvFileError
from router.base.types import Blob
from router.store import files
from router.store.blobs import blob_files
from router.store.blobs.blob_files import Buffer, DamagedBlobError, blob_of
from router.store.format.rewrite import Span

RAW = b"rows of keys and values"
BLOB = blob_of(memoryview(RAW))
HEADER = 64


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "blobs").mkdir()
    return tmp_path / "blobs"


def put(root: Path, raw: bytes = RAW) -> Blob:
    blob = blob_of(memoryview(raw))
    blob_files.write(root, blob, memoryview(raw), fsync=True)
    return blob


def source_of(root: Path, raw: bytes) -> Path:
    path = root.parent / "source"
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize("at", range(HEADER + len(RAW)))
def test_a_flipped_bit_is_noticed(root: Path, at: int) -> None:
    put(root)
    path = blob_files.path_of(root, BLOB.id)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(KvFileError, match="damaged"):
        blob_files.read(root, BLOB, Buffer())


@pytest.mark.parametrize("size", [0, 1, HEADER - 1, HEADER, HEADER + len(RAW) - 1])
def test_a_short_file_is_noticed(root: Path, size: int) -> None:
    put(root)
    os.truncate(blob_files.path_of(root, BLOB.id), size)
    assert not blob_files.is_there(root, BLOB)
    with pytest.raises(KvFileError, match="damaged"):
        blob_files.read(root, BLOB, Buffer())


def test_a_sector_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(KvFileError, match="cannot be read"):
        blob_files.read(root, BLOB, Buffer())
    assert blob_files.is_damaged(root, BLOB)


def test_a_blob_under_the_name_of_another(root: Path) -> None:
    other = put(root, RAW[::-1])
    put(root)
    os.replace(blob_files.path_of(root, other.id), blob_files.path_of(root, BLOB.id))
    with pytest.raises(KvFileError, match="damaged"):
        blob_files.read(root, BLOB, Buffer())


def test_damage_is_found_by_the_name(root: Path) -> None:
    """A header that agrees with other bytes passes a read: it only finds what a disk breaks."""
    lie = Blob(BLOB.id, len(RAW))
    blob_files.write(root, lie, memoryview(RAW[::-1]), fsync=False)
    blob_files.read(root, lie, Buffer())
    assert blob_files.is_damaged(root, lie)
    assert not blob_files.is_damaged(root, put(root, b"another"))


def test_a_full_disk_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real, calls = source_of(root, b"aabb"), os.pwrite, 0

    def full(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        blob_files.write_blobs(
            root, source, files.identity(source), [[Span(0, 2)], [Span(2, 2)]], fsync=False
        )
    assert blob_files.scan(root) == (set(), [])


def parts(root: Path) -> list[tuple[Blob, list[Span]]]:
    return [(put(root, b"bbdd"), [Span(3, 2), Span(7, 2)]), (put(root, b"cc"), [Span(5, 2)])]


def reader(root: Path) -> Callable[[Blob, Buffer], memoryview]:
    return partial(blob_files.read_checked, root)


def test_assembles(root: Path) -> None:
    target = root.parent / "target"
    found = blob_files.assemble(b"hea", parts(root), target, 9, 0o640, reader(root))
    assert target.read_bytes() == b"heabbccdd"
    assert found == files.identity(target)
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x" * 66)]
)
def test_a_damaged_blob_is_named_and_no_file_is_left(
    root: Path, harm: Callable[[Path], Any]
) -> None:
    made = parts(root)
    harm(blob_files.path_of(root, made[1][0].id))
    target = root.parent / "target"
    with pytest.raises(DamagedBlobError) as caught:
        blob_files.assemble(b"hea", made, target, 9, 0o600, reader(root))
    assert caught.value.blob == made[1][0]
    assert not target.exists()
