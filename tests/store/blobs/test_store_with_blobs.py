"""`KvStore` with a tier of blobs: split in the background, assembled for a restore, never lost."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.base.errors import KvError, KvFileError
from router.base.tasks import spawn
from router.base.types import Blob, KvDir, MemoryKind
from router.store import files, manifests
from router.store import store as store_module
from router.store.blobs.blobs import blob_of, local_name
from router.store.format.split import TOKENS
from router.store.places.directory import Directory
from tests.support.files.blob_stores import NAMESPACE, Place, state, until, write_out, written_bytes
from tests.support.files.state_files import head

LONG = 3600.0


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path / "kv", tmp_path / "blobs")
    yield made
    for store in made.open:
        await store.aclose()


async def test_a_state_that_is_not_understood(place: Place) -> None:
    store, noting, _ = await place.store()
    raw = head(range(9)) + bytes(range(256)) * 40
    snapshot = await place.put(store, raw, MemoryKind.OPAQUE)
    assert await place.read(store, await until(noting, snapshot), 0) == raw


async def test_equal_bytes_are_stored_once(place: Place) -> None:
    store, noting, _ = await place.store()
    first = await until(noting, await place.put(store, state(700, 1)))
    second = await until(noting, await place.put(store, state(700, 2)))
    shared = 512 // TOKENS
    assert first.blobs[:shared] == second.blobs[:shared]
    assert not {*first.blobs[shared:]} & {*second.blobs[shared:]}
    await store.delete(second)
    assert await place.read(store, first) == state(700, 1)
    await store.delete(first)
    assert not place.disk()


async def test_the_blobs_of_a_state_are_left_to_the_next(place: Place) -> None:
    """Else the next turn of a conversation is written as a whole, once its state replaced this."""
    store, told, _ = await place.store(whole_bytes=None)
    first = await until(told, await place.put(store, state(600)), whole=True)
    told.worth = False
    second = await place.put(store, state(700))
    third = await place.put(store, state(800))
    written = written_bytes(store)
    await store.delete(first)
    record = place.blobs / files.manifest_name(first.id)
    assert not record.exists(), "its prompt is gone at once"
    await store.delete(second)
    told.worth = True
    await write_out(store)
    new = [blob for blob in told.now[third.id].blobs if blob not in first.blobs]
    spent = written_bytes(store) - written
    assert sum(blob.size_bytes for blob in new) < spent < sum(b.size_bytes for b in first.blobs)
    assert len(place.disk()) == 1 + len(told.now[third.id].blobs)


async def test_restreamed_and_cut_from_blobs(place: Place) -> None:
    store, noting, _ = await place.store()
    snapshot = await until(noting, await place.put(store, state(700)))
    assert len(await place.read(store, snapshot, 3)) == len(state(700)) + 8
    staged = await store.cut(snapshot, 600)
    made = await until(noting, await store.commit(staged, NAMESPACE))
    assert await place.read(store, made) == state(600)
    assert made.blobs[:2] == snapshot.blobs[:2]


async def test_what_is_replaced_in_time_is_never_written(place: Place) -> None:
    store, _, _ = await place.store(write_after_s=LONG, whole_bytes=None)
    await store.delete(await place.put(store, state(700)))
    await store.aclose()
    assert not place.disk()


async def test_what_would_be_evicted_is_not_written(place: Place) -> None:
    store, noting, _ = await place.store(whole_bytes=None)
    noting.worth = False
    snapshot = await place.put(store, state(700))
    await store.aclose()
    assert not place.disk()
    assert snapshot.id not in noting.now


async def test_beyond_the_budget_nothing_is_written(place: Place) -> None:
    store, noting, _ = await place.store(max_written_per_day=1, whole_bytes=40_000)
    first = await until(noting, await place.put(store, state(700, 1)), whole=True)
    second = await place.put(store, state(700, 2))
    assert await place.read(store, second) == state(700, 2), "it stays in the KV directory"
    third = await place.put(store, state(700, 3))
    async with asyncio.timeout(30):
        while not noting.gone:
            noting.told.clear()
            await noting.told.wait()
    assert noting.gone == [second.id], "there is room for one file"
    assert await place.read(store, first) == state(700, 1)
    assert await place.read(store, third) == state(700, 3)


async def test_a_full_disk_loses_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store, noting, _ = await place.store(whole_bytes=None)

    def full_disk(self: Directory, name: str, content: bytes) -> None:
        if name.endswith(".blob"):
            tried.set()
            raise KvError("No space left on device")
        put(self, name, content)

    put = Directory.put

    tried = _Flag(asyncio.get_running_loop())
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "put", full_disk)
        snapshot = await place.put(store, state(700))
        await asyncio.wait_for(tried.event.wait(), 30)
    assert await place.read(store, snapshot) == state(700)
    await store.aclose()
    assert noting.now[snapshot.id].blobs, "written at the end"


class _Flag:
    """An event that another thread may set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.event = loop, asyncio.Event()

    def set(self) -> None:
        self._loop.call_soon_threadsafe(self.event.set)


def flip(place: Place, blob: Blob) -> None:
    path = place.blobs / local_name(blob)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


async def test_a_flipped_bit_is_a_miss(place: Place) -> None:
    store, noting, _ = await place.store()
    first = await until(noting, await place.put(store, state(700, 1)))
    second = await until(noting, await place.put(store, state(700, 2)))
    other = await until(noting, await place.put(store, state(300)))
    flip(place, first.blobs[512 // TOKENS - 1])
    with pytest.raises(KvFileError, match="other content"):
        await place.read(store, first)
    await store.flush()
    assert set(noting.gone) == {first.id, second.id}
    assert await place.read(store, other) == state(300), "it has another second blob"
    await store.delete(first)
    again = await until(noting, await place.put(store, state(700, 2)))
    assert await place.read(store, again) == state(700, 2), "the blob was written anew"


async def test_a_whole_file_makes_up_for_a_damaged_blob(place: Place) -> None:
    store, noting, _ = await place.store(whole_bytes=40_000)
    first = await until(noting, await place.put(store, state(700, 1)), whole=True)
    second = await until(noting, await place.put(store, state(700, 2)), whole=True)
    first = await until(noting, first)  # dropped: there is room for one
    flip(place, first.blobs[0])
    with pytest.raises(KvFileError, match="other content"):
        await place.read(store, first)
    await store.flush()
    assert noting.gone == [first.id]
    second = await until(noting, second, whole=True)
    assert await place.read(store, second) == state(700, 2)


async def test_blobs_make_up_for_a_changed_file(place: Place) -> None:
    store, noting, _ = await place.store(whole_bytes=None)
    snapshot = await until(noting, await place.put(store, state(700)), whole=True)
    path = place.kv / f"kvf-{snapshot.id}.kv"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert await place.read(store, snapshot) == state(700)
    assert not noting.now[snapshot.id].whole


async def test_a_file_that_is_read_is_not_dropped(place: Place) -> None:
    store, noting, _ = await place.store(whole_bytes=40_000)
    kv_dir = KvDir(str(place.kv))
    first = await until(noting, await place.put(store, state(700, 1)), whole=True)
    name = await store.open(first, kv_dir, 1)
    second = await until(noting, await place.put(store, state(700, 2)))
    assert (place.kv / name).read_bytes() == state(700, 1)
    await store.close(first, kv_dir, name)
    assert await place.read(store, second) == state(700, 2)


async def test_deleted_while_it_is_split(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store, noting, _ = await place.store()
    loop, inside, go = (
        asyncio.get_running_loop(),
        _Flag(asyncio.get_running_loop()),
        asyncio.Event(),
    )
    real = manifests.write

    async def wait() -> None:
        await go.wait()

    def held(*args: Any, **named: Any) -> int:
        inside.set()
        asyncio.run_coroutine_threadsafe(wait(), loop).result(10)
        return real(*args, **named)

    monkeypatch.setattr(manifests, "write", held)
    snapshot = await place.put(store, state(700))
    await inside.event.wait()
    deleting = spawn(store.delete(snapshot), name="delete")
    await asyncio.sleep(0)
    go.set()
    await deleting
    await store.aclose()
    assert not place.disk()
    assert not place.whole()
    assert snapshot.id not in noting.now


@pytest.mark.parametrize("harm", ["gone", "flipped"])
async def test_a_manifest_that_is_damaged_later_is_a_miss(place: Place, harm: str) -> None:
    store, told, _ = await place.store()
    snapshot = await until(told, await place.put(store, state(700)))
    path = place.blobs / files.manifest_name(snapshot.id)
    raw = path.read_bytes()
    path.unlink()
    if harm == "flipped":
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(KvFileError, match=r"missing|checksum"):
        await place.read(store, snapshot)
    await store.delete(snapshot)
    await store.aclose()
    assert not place.disk()


async def test_the_budget_outlives_a_restart(place: Place) -> None:
    store, told, _ = await place.store(whole_bytes=None, max_written_per_day=10)
    await until(told, await place.put(store, state(700)), whole=True)
    await store.aclose()
    store, told, _ = await place.store(whole_bytes=None, max_written_per_day=10)
    other = await place.put(store, state(700, 1))
    status = store.tier_status()
    assert status is not None
    assert status.budget_left_bytes == 0
    await store.aclose()
    assert other.id not in told.now


@pytest.mark.parametrize("longest_s", [5.0, -1.0])
async def test_a_restore_that_is_soon_over_writes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, longest_s: float
) -> None:
    """Linux gives the disk nothing of a file that is removed at once."""
    monkeypatch.setattr(store_module, "_WRITTEN_S", longest_s)
    store, told, _ = await place.store()
    store._directories[place.kv_dir].on_disk = True
    snapshot = await until(told, await place.put(store, state(700)))
    before = store.tier_status()
    assert await place.read(store, snapshot) == state(700)
    after = store.tier_status()
    assert before is not None
    assert after is not None
    more_bytes = after.today_bytes - before.today_bytes
    assert more_bytes == (0 if longest_s > 0 else snapshot.size_bytes)
    await store.aclose()


async def test_a_directory_under_another_name(place: Place) -> None:
    store, told, _ = await place.store()
    alias = place.kv.with_name("alias")
    alias.symlink_to(place.kv, target_is_directory=True)
    assert await store.add([KvDir(str(alias))]) == []
    place.kv = alias
    snapshot = await until(told, await place.put(store, state(700)))
    assert await place.read(store, snapshot) == state(700)


async def test_another_disk_in_the_place_of_the_blobs(place: Place) -> None:
    store, told, _ = await place.store(write_after_s=LONG, whole_bytes=None)
    snapshot = await place.put(store, state(700))
    moved = place.blobs.rename(place.blobs.with_name("moved"))
    place.blobs.mkdir()
    await write_out(store)
    assert not place.disk(), "no prompt is written to another disk"
    assert await place.read(store, snapshot) == state(700)
    place.blobs.rmdir()
    moved.rename(place.blobs)
    await store.aclose()
    assert snapshot.id in told.now


async def test_a_missing_blob_is_found_at_the_start(place: Place) -> None:
    store, noting, _ = await place.store()
    first = await until(noting, await place.put(store, state(700, 1)))
    second = await until(noting, await place.put(store, state(700, 2)))
    await store.aclose()
    (place.blobs / local_name(first.blobs[-1])).unlink()
    _, _, found = await place.store()
    assert found == [second]
    assert len(place.disk()) == 1 + len(second.blobs)


async def test_nothing_is_left_after_a_kill(place: Place) -> None:
    """What a killed router may leave: blobs without a manifest, and halves of files."""
    store, noting, _ = await place.store()
    snapshot = await until(noting, await place.put(store, state(700)))
    await store.aclose()
    raw = b"no manifest names it"
    Directory(place.blobs).put(local_name(blob_of(memoryview(raw))), raw)
    path = place.blobs / local_name(snapshot.blobs[0])
    path.with_name(path.name + "-0a1b2c3d.new").touch()
    manifest = place.blobs / files.manifest_name(snapshot.id)
    manifest.with_name(manifest.name + "-0a1b2c3d.new").touch()
    await place.store()
    assert len(place.disk()) == 1 + len(snapshot.blobs)


async def test_a_delete_goes_on_without_its_caller(place: Place) -> None:
    """The engine cancels its tasks when it ends: a purged snapshot must not come back."""
    store, told, _ = await place.store(whole_bytes=None)
    snapshot = await until(told, await place.put(store, state(700)), whole=True)
    caller = asyncio.get_running_loop().create_task(store.delete(snapshot))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait([caller])
    await store.aclose()
    assert not place.disk()
    assert not place.whole()


async def test_a_purge_is_not_obeyed_while_a_manifest_stays(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next start would offer the snapshot again."""
    store, noting, _ = await place.store()
    snapshot = await until(noting, await place.put(store, state(700)))

    def refused(*_: object) -> None:
        raise KvError("Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(Directory, "delete", refused)
        with pytest.raises(KvError, match="Read-only"):
            await store.delete(snapshot)
    await store.aclose()
    _, _, found = await place.store()
    assert [one.id for one in found] == [snapshot.id]


async def test_what_is_worth_nothing_makes_room(place: Place) -> None:
    """And not a file that was used less lately, whose blobs are still to be written."""
    store, told, _ = await place.store(write_after_s=LONG, whole_bytes=80_000)
    worthless = await place.put(store, state(700, 1))
    used_less = await place.put(store, state(700, 2))
    assert await place.read(store, worthless) == state(700, 1)
    told.worthless = {worthless.id}
    await place.put(store, state(700, 3))
    async with asyncio.timeout(30):
        while not told.gone:
            told.told.clear()
            await told.told.wait()
    assert told.gone == [worthless.id]
    assert await place.read(store, used_less) == state(700, 2)


async def test_the_end_waits_for_a_split(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    store, told, _ = await place.store(whole_bytes=None)
    loop, go = asyncio.get_running_loop(), asyncio.Event()
    inside, real, calls = _Flag(loop), manifests.write, 0

    def held(*args: Any, **named: Any) -> int:
        nonlocal calls
        if args[1].file is not None:
            return real(*args, **named)
        calls += 1
        inside.set()
        asyncio.run_coroutine_threadsafe(_wait(go), loop).result(10)
        return real(*args, **named)

    monkeypatch.setattr(manifests, "write", held)
    snapshot = await place.put(store, state(700))
    await inside.event.wait()
    closing = loop.create_task(store.aclose())
    await asyncio.sleep(0)
    go.set()
    await closing
    assert calls == 1, "it is not split by a second thread"
    assert snapshot.id in told.now
    assert len(place.disk()) == 1 + len(told.now[snapshot.id].blobs)


async def _wait(go: asyncio.Event) -> None:
    await go.wait()


async def test_a_touched_file_is_split_all_the_same(place: Place) -> None:
    store, told, _ = await place.store(write_after_s=LONG, whole_bytes=None)
    snapshot = await place.put(store, state(700))
    await store.flush()
    os.utime(place.kv / f"kvf-{snapshot.id}.kv", ns=(1, 1))
    await write_out(store)
    assert told.now[snapshot.id].blobs


async def test_a_changed_file_is_not_split(place: Place) -> None:
    store, told, _ = await place.store(write_after_s=LONG, whole_bytes=None)
    snapshot = await place.put(store, state(700))
    await store.flush()
    path = place.kv / f"kvf-{snapshot.id}.kv"
    path.write_bytes(b"x" + path.read_bytes()[1:])
    await write_out(store)
    assert snapshot.id not in told.now
    assert not place.disk()
    assert path.exists(), "the restore finds out what is wrong with it"
