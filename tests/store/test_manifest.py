"""`router.store.manifest`: whole records survive, and no wrong record is ever read."""

import dataclasses
import errno
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.errors import KvError
from router.base.types import Namespace, SnapshotId
from router.store import manifest as module
from router.store.manifest import (
    LOCK,
    MANIFEST,
    NEW_MANIFEST,
    DirectoryLock,
    Manifest,
    ManifestEntry,
)


def entry(number: int) -> ManifestEntry:
    return ManifestEntry(
        id=SnapshotId(f"{number:032x}"),
        namespace=Namespace("n"),
        file=f"kvf-{number:032x}.kv",
        n_tokens=number,
        size_bytes=number * 1000,
        mtime_ns=10**18 + number,
        inode=number,
        checksum=f"{number:032x}",
        added_at=1.5,
        media=(-number,),
        n_stream=number % 3,
        checkpoints=(number, number + 1),
        extendable=number % 2 == 0,
    )


def opened(directory: Path) -> Manifest:
    manifest = Manifest(directory, fsync=False)
    manifest.open()
    return manifest


def replay(directory: Path, content: bytes) -> Manifest:
    (directory / MANIFEST).write_bytes(content)
    manifest = opened(directory)
    manifest.close()
    return manifest


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a manifest with a header, adds of 0 to 5 and drops of 1 and 3."""
    directory = tmp_path_factory.mktemp("written")
    manifest = opened(directory)
    for number in range(6):
        manifest.add(entry(number))
    for number in (1, 3):
        manifest.drop(entry(number).id)
    manifest.close()
    return (directory / MANIFEST).read_bytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


def expected(lines: list[bytes]) -> dict[SnapshotId, ManifestEntry]:
    """Return the records in the whole lines of `written`, by the fixture's order of writes."""
    out = {}
    for index, _ in enumerate(lines):
        if 1 <= index <= 6:
            out[entry(index - 1).id] = entry(index - 1)
        elif index > 6:
            del out[entry((1, 3)[index - 7]).id]
    return out


def test_round_trip(scratch: Path, written: bytes) -> None:
    manifest = replay(scratch, written)

    assert [entry(n) for n in (0, 2, 4, 5)] == list(manifest.entries.values())
    assert manifest.corrupt == 0
    assert [manifest.get(entry(n).id) for n in (1, 2)] == [None, entry(2)]


def test_cut_at_every_byte(scratch: Path, written: bytes) -> None:
    for cut in range(len(written)):
        whole = written[:cut].splitlines(keepends=True)
        if whole and not whole[-1].endswith(b"\n"):
            whole.pop()
        manifest = replay(scratch, written[:cut])
        assert expected(whole) == manifest.entries
        assert manifest.corrupt == 0


def test_append_after_a_torn_line(scratch: Path, written: bytes) -> None:
    """The torn half must not become the beginning of the next record."""
    for cut in range(len(written)):
        (scratch / MANIFEST).write_bytes(written[:cut])
        manifest = opened(scratch)
        before = manifest.entries
        manifest.add(entry(77))
        manifest.close()
        again = opened(scratch)
        again.close()
        assert before | {entry(77).id: entry(77)} == again.entries
        assert again.corrupt == 0


def test_short_record_over_a_long_torn_one(scratch: Path, written: bytes) -> None:
    """The rest of the torn record must not become a line of its own."""
    lines = written.splitlines(keepends=True)
    (scratch / MANIFEST).write_bytes(b"".join(lines[:3]) + lines[3][:-1])
    manifest = opened(scratch)
    manifest.drop(entry(0).id)
    manifest.close()
    again = opened(scratch)
    again.add(entry(9))
    again.close()
    assert (again.corrupt, list(again.entries)) == (0, [entry(1).id, entry(9).id])
    last = (scratch / MANIFEST).read_bytes().splitlines()[3:]
    assert [module._line({"op": "drop", "id": entry(0).id})[:-1]] == last[:1]
    assert len(last) == 2


@given(st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=8))
@settings(max_examples=400, deadline=None)
def test_flipped_bits(scratch: Path, written: bytes, flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(written)
    for at, mask in flips:
        damaged[at % len(damaged)] ^= mask
    manifest = replay(scratch, bytes(damaged))

    everything = {entry(number).id: entry(number) for number in range(6)}
    assert manifest.entries.items() <= everything.items()
    still = set(bytes(damaged).splitlines(keepends=True))
    lines = written.splitlines(keepends=True)
    for number in (0, 2, 4, 5):  # never dropped
        if lines[number + 1] in still:
            assert entry(number).id in manifest.entries


@pytest.mark.parametrize("line", range(1, 9))
def test_damaged_line_is_counted_and_cleaned_up(scratch: Path, written: bytes, line: int) -> None:
    lines = written.splitlines(keepends=True)
    lines[line] = lines[line][:20] + b"X" + lines[line][21:]
    manifest = replay(scratch, b"".join(lines))
    assert manifest.corrupt == 1
    again = opened(scratch)
    again.close()
    assert again.corrupt == 0
    assert manifest.entries == again.entries


def test_valid_checksum_is_not_enough(scratch: Path, written: bytes) -> None:
    """Records of another shape are skipped, not half understood."""
    records: list[Any] = [[], 7, {"op": "add"}, {"op": "drop"}, {"op": "add", "id": 3}]
    records.append({"op": "add", **dict.fromkeys(module._NAMES, "x")})
    lines = b"".join(module._line(record) for record in records)
    manifest = replay(scratch, written + lines)

    assert len(records) == manifest.corrupt
    assert len(manifest.entries) == 4


def test_records_without_a_shape(scratch: Path, written: bytes) -> None:
    """A record from before shapes existed is read as a file of the plainest shape."""
    old = asdict(entry(7))
    for name in module._SHAPE:
        del old[name]
    manifest = replay(scratch, written + module._line({"op": "add"} | old))

    plain = dataclasses.replace(entry(7), n_stream=1, checkpoints=(), extendable=True)
    assert (manifest.entries[entry(7).id], manifest.corrupt) == (plain, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_stream": "1"},
        {"n_stream": True},
        {"checkpoints": 5},
        {"checkpoints": ["5"]},
        {"extendable": 1},
        {"other": 1},
    ],
)
def test_records_with_a_strange_shape(
    scratch: Path, written: bytes, wrong: dict[str, object]
) -> None:
    record = {"op": "add"} | asdict(entry(7)) | wrong
    manifest = replay(scratch, written + module._line(record))

    assert entry(7).id not in manifest.entries
    assert manifest.corrupt == 1


def test_future_version_is_refused(tmp_path: Path) -> None:
    """A newer kvferry's manifest must not be read, still less compacted."""
    content = module._line({"format": "kvferry.manifest", "version": 2})
    with pytest.raises(KvError, match="unknown manifest format"):
        replay(tmp_path, content)
    assert content == (tmp_path / MANIFEST).read_bytes()


def test_compacts_when_drops_outnumber(tmp_path: Path) -> None:
    manifest = opened(tmp_path)
    for number in range(200):
        manifest.add(entry(number))
    for number in range(199):
        manifest.drop(entry(number).id)
    assert (tmp_path / MANIFEST).stat().st_size < 200 * 150
    manifest.add(entry(500))
    manifest.close()

    assert {entry(199).id, entry(500).id} == set(opened(tmp_path).entries)


@pytest.mark.parametrize("step", ["open", "pwrite", "fsync", "rename"])
def test_compaction_that_stops_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The old manifest stays valid, on disk and in this process."""
    manifest = Manifest(tmp_path)
    manifest.open()
    for number in range(3):
        manifest.add(entry(number))
    manifest.drop(entry(0).id)

    def fail(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        manifest.compact()
    assert {MANIFEST} == {p.name for p in tmp_path.iterdir()}
    manifest.add(entry(9))
    manifest.close()
    assert [entry(n).id for n in (1, 2, 9)] == list(opened(tmp_path).entries)


def test_leftover_of_a_compaction_is_removed(tmp_path: Path, written: bytes) -> None:
    (tmp_path / NEW_MANIFEST).write_bytes(written[:50])
    manifest = replay(tmp_path, written)
    assert len(manifest.entries) == 4
    assert not (tmp_path / NEW_MANIFEST).exists()


def partly(real: Callable[[int, Any, int], int]) -> Callable[[int, Any, int], int]:
    """Return a `pwrite` that writes ten bytes and then finds the disk full."""

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, bytes(data[:10]), offset)

    return pwrite


@pytest.mark.parametrize("truncate_works", [True, False])
def test_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, truncate_works: bool) -> None:
    manifest = opened(tmp_path)
    manifest.add(entry(1))

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", partly(os.pwrite))
        if not truncate_works:
            patch.setattr(os, "ftruncate", fail)
        with pytest.raises(KvError, match="No space"):
            manifest.add(entry(2))
    assert [entry(1).id] == list(manifest.entries)
    manifest.add(entry(3))
    manifest.close()
    again = opened(tmp_path)
    assert [entry(1).id, entry(3).id] == list(again.entries)
    assert again.corrupt == 0


def test_lock_is_exclusive_and_released(tmp_path: Path) -> None:
    first, second = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    first.acquire()
    with pytest.raises(KvError, match=f"{tmp_path} is in use"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()
    second.release()


def test_lock_file_is_no_symlink(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KvError):
        DirectoryLock(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_whether_it_is_there_is_known_while_it_is_written_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check waits for no slow disk; it once waited for the writer, here for ever."""
    manifest, seen = Manifest(tmp_path, fsync=True), list[bool]()

    def looking(call: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: object) -> None:
            call(*arguments)
            seen.append(manifest.is_there())

        return called

    manifest.open()
    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, looking(getattr(os, name)))
    manifest.add(entry(1))
    manifest.compact()
    manifest.add(entry(2))
    assert seen == [True] * 5  # an add, a compaction's file, its rename and directory, an add

    (tmp_path / MANIFEST).rename(tmp_path / "elsewhere")
    assert not manifest.is_there()
    (tmp_path / MANIFEST).write_bytes(b"")
    assert not manifest.is_there()
    manifest.close()
