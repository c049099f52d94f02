"""`router.store.blobs.blobs`: written once and whole, and never read when damaged."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from router.base.errors import KvError
from router.base.types import Blob, Namespace, SnapshotId
from router.store import files
from router.store.blobs import blobs, tier
from router.store.blobs.blobs import BlobError, blob_of, local_name, sum_of
from router.store.blobs.buffer import Buffer
from router.store.blobs.tier import plan_of
from router.store.format.rewrite import Span
from router.store.format.split import Area, Split, Strip
from router.store.manifests import Manifest, Part
from router.store.places.directory import Directory
from tests.support.files.state_files import head

RAW = b"rows of keys and values"
BLOB = blob_of(memoryview(RAW))
KNOWN = sum_of(memoryview(RAW))


@pytest.fixture
def place(tmp_path: Path) -> Directory:
    (tmp_path / "blobs").mkdir()
    return Directory(tmp_path / "blobs", fsync=True)


def put(place: Directory, raw: bytes = RAW) -> Blob:
    blob = blob_of(memoryview(raw))
    place.put(local_name(blob), raw)
    return blob


def path_of(place: Directory, blob: Blob = BLOB) -> Path:
    return place.root / local_name(blob)


def read(place: Directory, blob: Blob = BLOB, known: bytes = KNOWN) -> bytes:
    return bytes(blobs.read(place, local_name(blob), blob, Buffer(), known=known))


@pytest.mark.parametrize("known", [KNOWN, b""])
@pytest.mark.parametrize("at", range(len(RAW)))
def test_a_flipped_bit_is_noticed(place: Directory, at: int, known: bytes) -> None:
    """By the sum that this host has, and by the name alone."""
    put(place)
    assert read(place, known=known) == RAW
    raw = bytearray(RAW)
    raw[at] ^= 1
    path_of(place).write_bytes(raw)
    with pytest.raises(BlobError, match="other content") as caught:
        read(place, known=known)
    assert not caught.value.is_missing


@pytest.mark.parametrize("size", [0, 1, len(RAW) - 1, len(RAW) + 1])
def test_a_file_of_another_size_is_noticed(place: Directory, size: int) -> None:
    put(place)
    os.truncate(path_of(place), size)
    with pytest.raises(BlobError, match="another size"):
        read(place)


def test_a_sector_that_cannot_be_read(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    put(place)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(BlobError, match="cannot be read"):
        read(place)


def test_what_cannot_be_read_on_a_mount_may_be_readable_soon(
    place: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of NFS that goes away gives EIO: the state there is not damaged."""
    put(place)

    def away(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", away)
    with pytest.raises(KvError, match="Input/output error") as caught:
        read(Directory(place.root, is_shared=True))
    assert not isinstance(caught.value, BlobError)


def test_other_folders_among_the_blobs_are_not_looked_into(
    place: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another user, or in use by another program: neither is ours to read."""
    put(place)
    for folder in ("lost+found", "photos", "ab"):
        (place.root / folder).mkdir()
        (place.root / folder / "x-0a1b2c3d.new").touch()
    entered, scandir = list[str](), os.scandir

    def noted(path: str) -> Any:
        entered.append(Path(path).name)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    found = blobs.scan(place)
    assert (found.blobs, found.leftovers) == ({BLOB}, ["ab/x-0a1b2c3d.new"])
    assert set(entered) == {"blobs", "ab", local_name(BLOB)[:2]}


def test_what_cannot_be_written_is_named(place: Directory) -> None:
    (place.root / "there").touch()
    with pytest.raises(KvError, match="cannot write there/is/no/way"):
        place.put("there/is/no/way", b"")
    place.root.chmod(0o755)
    with pytest.raises(KvError, match="is open to all users"):
        Directory(place.root, is_shared=True).put("x", b"")
    Directory(place.root, is_shared=True, is_encrypted=True).put("x", b"")
    with pytest.raises(KvError, match="is no directory: create it, or mount"):
        Directory(place.root / "y", is_shared=True, is_encrypted=True).put("x", b"")


def test_what_is_not_there(place: Directory) -> None:
    with pytest.raises(BlobError, match="missing") as caught:
        read(place)
    assert caught.value.is_missing


def source_of(place: Directory, raw: bytes) -> Path:
    path = place.root.parent / "source"
    path.write_bytes(raw)
    return path


def test_what_is_there_is_not_written_again(place: Directory) -> None:
    source = source_of(place, b"aabbaa")
    spans = [[Span(0, 2)], [Span(2, 2)], [Span(4, 2)]]
    put(place, b"bb")
    wrote: list[int] = []
    made = blobs.write_blobs(place, source, files.identity(source), spans, wrote.append)
    assert [blob.size_bytes for blob in made.new] == wrote == [2]
    assert made.blobs[0] == made.blobs[2] == made.new[0]
    assert made.sums == sum_of(memoryview(b"aa")) + sum_of(memoryview(b"bb")) + made.sums[:8]


def test_a_blob_that_became_shorter_is_written_again(place: Directory) -> None:
    source = source_of(place, RAW)
    put(place)
    os.truncate(path_of(place), 3)
    blobs.write_blobs(place, source, files.identity(source), [[Span(0, len(RAW))]])
    assert read(place) == RAW


def test_a_full_disk_leaves_nothing(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real, calls = source_of(place, b"aabb"), os.pwrite, 0

    def full(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(KvError, match="No space"):
        blobs.write_blobs(place, source, files.identity(source), [[Span(0, 2)], [Span(2, 2)]])
    assert blobs.scan(place) == (set(), [])


def manifest(place: Directory) -> Manifest:
    """Return the manifest of `heabbccdd`: rows of two sections, and what is between them."""
    made = (put(place, b"bbdd"), put(place, b"cc"))
    return Manifest(
        id=SnapshotId("0" * 32),
        namespace=Namespace("n"),
        added_at=0.0,
        head=b"hea",
        split=Split(3, 9, (Area((Strip(3, 2), Strip(7, 2)), 1, ((0, 1),)),), (2,)),
        blobs=tuple(blob.id for blob in made),
        sums=b"".join(sum_of(memoryview(raw)) for raw in (b"bbdd", b"cc")),
    )


def reader(place: Directory) -> Callable[[Part, Buffer], memoryview]:
    def read(part: Part, buffer: Buffer) -> memoryview:
        return blobs.read(place, local_name(part.blob), part.blob, buffer, known=part.known)

    return read


def test_assembles(place: Directory) -> None:
    target = place.root.parent / "target"
    found = blobs.assemble(manifest(place), target, 0o640, reader(place))
    assert target.read_bytes() == b"heabbccdd"
    assert found == files.identity(target)
    assert target.stat().st_mode & 0o777 == 0o640


def test_a_blob_of_several_places_is_read_once(place: Directory) -> None:
    made, target, told = put(place, b"aa"), place.root.parent / "target", []

    def read(part: Part, buffer: Buffer) -> memoryview:
        told.append(part.blob)
        return reader(place)(part, buffer)

    areas = (Area((Strip(1, 2),), 1, ((0, 1), (2, 1))),)
    rest = put(place, b"bb")
    split = Split(1, 7, areas, (2,))
    twice = replace(manifest(place), head=b"h", split=split, blobs=(made.id, made.id, rest.id))
    blobs.assemble(replace(twice, sums=b""), target, 0o600, read)
    assert target.read_bytes() == b"haabbaa"
    assert sorted(told) == sorted([made, rest])


@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"xx")])
def test_a_damaged_blob_is_named_and_no_file_is_left(
    place: Directory, harm: Callable[[Path], Any]
) -> None:
    made = manifest(place)
    harm(path_of(place, made.sized[1]))
    target = place.root.parent / "target"
    with pytest.raises(BlobError) as caught:
        blobs.assemble(made, target, 0o600, reader(place))
    assert caught.value.blob == made.sized[1]
    assert not target.exists()


def opaque(tokens: range, body: bytes) -> bytes:
    return head(tokens) + b"\x00\x02\x00\x00 not a layout " + body


def blobs_of(path: Path, raw: bytes) -> list[bytes]:
    path.write_bytes(raw)
    begin, plan = plan_of(path, files.identity(path), 1)
    assert (begin, plan.size_bytes, plan.areas) == (raw[: plan.start], len(raw), ())
    plan.check()
    return [raw[one.offset : one.offset + one.size] for spans in plan.spans() for one in spans]


def test_states_that_are_not_understood_share_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer has its rows together, so those of later layers are somewhere else."""
    monkeypatch.setattr(tier, "OPAQUE_BYTES", 1024)
    chance = random.Random(3)
    layers, more = [chance.randbytes(40_000) for _ in "abc"], [chance.randbytes(900) for _ in "abc"]
    short = blobs_of(tmp_path / "a", opaque(range(9), b"".join(layers)))
    long = b"".join(a + b for a, b in zip(layers, more, strict=True))
    known = set(short)
    new = [one for one in blobs_of(tmp_path / "b", opaque(range(12), long)) if one not in known]
    assert sum(map(len, new)) < 20_000


def test_a_state_of_nothing_but_a_head(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(head(range(9)))
    assert plan_of(path, files.identity(path), 1)[1].n_blobs == 0
