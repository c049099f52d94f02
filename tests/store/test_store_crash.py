"""`router.store.store`: crashes, changed files, full disks and second owners."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from msgspec.structs import replace

from router.base.errors import KvError, KvFileError
from router.base.types import KvDir
from router.store import files, manifests, records
from router.store.files import manifest_name
from router.store.places.directory import Directory
from router.store.records import StoredSnapshot
from router.store.store import KvStore
from tests.support.files.state_files import full
from tests.support.files.stores import (
    NAMESPACE,
    TOKENS,
    Stores,
    at,
    enospc,
    names,
    path,
    put,
    touch,
    write,
)


async def test_oldest_comes_first(stores: Stores) -> None:
    ticks = iter(range(100))
    store = KvStore(stores.kv_dirs, wall_now=lambda: float(next(ticks)))
    await store.load()
    put_in = []
    for n in range(2, 6):
        put_in.append(await put(store, full(range(n))))
        await store.flush()
    _, loaded = await stores.restart(store)
    assert put_in == loaded


async def test_commit_needs_a_verified_unchanged_file(store: KvStore) -> None:
    kv_dir, raw = store._kv_dirs[0], full(TOKENS)
    staged = await store.verify(kv_dir, write(store), len(raw))
    touch(Path(kv_dir, staged.name))
    with pytest.raises(KvFileError, match="changed after it was verified"):
        await store.commit(staged, NAMESPACE)
    with pytest.raises(KvFileError, match="was not verified"):
        await store.commit(staged, NAMESPACE)


async def test_touched_file_is_checked_again(stores: Stores, store: KvStore) -> None:
    snapshot = await put(store)
    await store.flush()
    touch(path(snapshot))
    assert await store.open(snapshot, snapshot.kv_dir, 1)
    touch(path(snapshot))
    _, loaded = await stores.restart(store)
    assert [snapshot] == loaded


@pytest.mark.parametrize("change", ["bytes", "size", "gone", "symlink"])
async def test_changed_file_is_never_offered(
    stores: Stores, store: KvStore, tmp_path: Path, change: str
) -> None:
    snapshot = await put(store)
    await store.flush()
    raw = full(TOKENS)
    file = path(snapshot)
    if change == "bytes":
        file.write_bytes(raw[:-1] + b"?")
        touch(file)
    elif change == "size":
        os.truncate(file, len(raw) - 1)
    else:
        file.unlink()
        if change == "symlink":
            (tmp_path / "elsewhere").write_bytes(raw)
            file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KvFileError):
        await store.open(snapshot, snapshot.kv_dir, 1)
    again, loaded = await stores.restart(store)
    assert loaded == []
    assert names(again) == set()


async def test_changed_before_the_checksum_is_known(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.checksum

    def touching(file: Any) -> str:
        touch(Path(file.name))
        return real(file)

    monkeypatch.setattr(files, "checksum", touching)
    monkeypatch.setattr(files, "open_regular", opened_by_path)
    snapshot = await put(store)
    await store.flush()
    ((lost, reason),) = stores.lost
    assert snapshot == lost
    assert "changed after it was committed" in reason


def opened_by_path(file: Path) -> Any:
    return file.open("rb")


@pytest.mark.parametrize("step", ["sync_directory", "checksum", "read_head", "write"])
async def test_disk_trouble_after_the_commit(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The engine is told, and neither the file nor the record stays."""
    where: dict[str, Any] = {"checksum": files, "sync_directory": files}
    monkeypatch.setattr(where.get(step, records), step, enospc)
    snapshot = await put(store)
    await store.flush()

    assert [snapshot] == [lost for lost, _ in stores.lost]
    assert "No space" in stores.lost[0][1]
    assert set() == names(store)
    with pytest.raises(KvFileError):
        await store.open(snapshot, snapshot.kv_dir, 1)


@pytest.mark.parametrize("step", ["stage", "verify", "rename", "sync", "checksum"])
async def test_crash_before_the_record(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A file without a record is swept away, whatever step it had reached."""
    kv_dir = store._kv_dirs[0]
    kept = await put(store)
    await store.flush()
    other = full([1, 2])
    name = write(store, other)
    with monkeypatch.context() as patch:
        patch.setattr(records, "record", crash_after(step))
        if step != "stage":
            staged = await store.verify(kv_dir, name, len(other))
            if step != "verify":
                await store.commit(staged, NAMESPACE)
                await store.flush()
    assert len(names(store)) == 2
    _, loaded = await stores.restart(store)
    assert [kept] == loaded
    assert {path(kept).name} == names(store)


def crash_after(step: str) -> Callable[..., None]:
    def record(held: Any, *_: Any, **__: Any) -> None:
        with files.open_regular(held.path) as file:
            if step in ("sync", "checksum"):
                os.fsync(file.fileno())
            if step == "checksum":
                files.checksum(file)

    return record


async def test_crash_while_the_record_is_written(stores: Stores, store: KvStore) -> None:
    kept = await put(store)
    await store.flush()
    torn = await put(store, full([1, 2]))
    await store.aclose()
    written = at(kept.kv_dir, manifest_name(torn.id))
    os.truncate(written, 40)
    written.rename(at(kept.kv_dir, f"{manifest_name(torn.id)}-0a1b2c3d.new"))

    again = stores.make()
    assert [kept] == await again.load()
    assert {path(kept).name} == names(again)


async def test_crash_between_drop_and_unlink(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await put(store)
    await store.flush()
    monkeypatch.setattr(StoredSnapshot, "unlink", lambda _: None)
    await store.delete(snapshot)
    monkeypatch.undo()
    assert path(snapshot).exists()
    again, loaded = await stores.restart(store)
    assert loaded == []
    assert set() == names(again)


async def test_full_disk_can_still_be_emptied(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await put(store)
    await store.flush()
    monkeypatch.setattr(files, "put_whole", enospc)
    await store.delete(snapshot)
    assert set() == names(store)


async def test_leftovers_are_swept_and_others_left_alone(stores: Stores) -> None:
    store = stores.make()
    directory = at(store._kv_dirs[0])
    directory.mkdir(mode=0o700)
    (directory / store.staging_name()).write_bytes(b"x")
    (directory / f"kvf-{'0' * 32}.kv").write_bytes(full(TOKENS))
    (directory / f"kvf-{'0' * 32}.json").write_bytes(b"x")
    (directory / f"kvf-{'0' * 32}.manifest").write_bytes(b"x")
    (directory / f"kvf-{'0' * 32}.manifest-0a1b2c3d.new").write_bytes(b"x")
    others = {"mine.bin", "kvf-1.kv", "kvf-x.part", ".hidden", "draft-0a1b2c3d.new"}
    for name in others:
        (directory / name).write_bytes(b"x")
    assert await store.load() == []
    assert others == names(store)


async def test_one_owner_per_directory(stores: Stores, store: KvStore) -> None:
    second = stores.make(stores.kv_dirs[1], stores.kv_dirs[0])
    with pytest.raises(KvError, match="in use by another kvferry"):
        await second.load()
    # The directory that `second` had locked is free again.
    third = stores.make(stores.kv_dirs[1])
    assert await third.load() == []


async def test_one_directory_under_two_names(stores: Stores, tmp_path: Path) -> None:
    other = KvDir(str(tmp_path / "link"))
    at(other).symlink_to(stores.kv_dirs[0])
    store = stores.make(stores.kv_dirs[0], other)
    await store.load()
    snapshot = await put(store)
    assert path(snapshot).name == await store.open(snapshot, other, 1)


async def test_unusable_directory(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for kv_dir in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(KvError, match=str(kv_dir)):
            await stores.make(KvDir(str(kv_dir))).load()


async def test_unreadable_directory_is_let_go_of(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> list[str]:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr("router.store.records.os.listdir", fails)
        with pytest.raises(KvError, match="cannot read the manifests"):
            await stores.make().load()
    assert await stores.make().load() == []


async def test_read_only_directory(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def read_only(name: Any, flags: int, *rest: Any) -> int:
        if flags & (os.O_CREAT | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(KvError, match="Read-only"):
        await stores.make().load()


async def test_record_of_another_file_is_not_believed(stores: Stores, store: KvStore) -> None:
    snapshot = await put(store)
    await store.flush()
    directory = Directory(Path(snapshot.kv_dir))
    found = manifests.read(directory, manifest_name(snapshot.id))
    assert found.file is not None
    other = replace(found.file, inode=0, checksum="0" * 32)
    manifests.write(directory, replace(found, file=other))
    _, loaded = await stores.restart(store)
    assert loaded == []


async def test_deleted_while_its_checksum_is_computed(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No record may be written for a deleted snapshot."""
    inside, go = threading.Event(), threading.Event()
    real = files.checksum

    def slow(file: BinaryIO) -> str:
        inside.set()
        go.wait(10)
        return real(file)

    monkeypatch.setattr(files, "checksum", slow)
    snapshot = await put(store)
    await asyncio.to_thread(inside.wait, 10)
    await store.delete(snapshot)
    go.set()
    await store.flush()
    assert not at(snapshot.kv_dir, manifest_name(snapshot.id)).exists()


async def test_a_start_without_descriptors_deletes_nothing(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be opened now may be sound: the next start offers it."""
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    await store.aclose()
    real = files.open_regular

    def scarce(file: Path) -> BinaryIO:
        if file.suffix == ".kv":
            raise OSError(errno.EMFILE, "Too many open files")
        return real(file)

    monkeypatch.setattr(files, "open_regular", scarce)
    again, loaded = await stores.restart(store)
    assert loaded == []
    monkeypatch.setattr(files, "open_regular", real)
    assert [one.id for one in (await stores.restart(again))[1]] == [snapshot.id]
