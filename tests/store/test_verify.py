"""`router.store.verify`: every file is read, and what is damaged is given up."""

from pathlib import Path

import pytest

from router.base.errors import KvFileError
from router.store.blobs import blob_files
from router.store.store import KvStore
from router.store.verify import Verified
from tests.support.files.blob_stores import Place, state, until


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "kv", tmp_path / "blobs")


async def verified(store: KvStore) -> Verified:
    """Check all parts, and return the sums."""
    parts = [await store.verify_all("")]
    while parts[-1].next is not None:
        parts.append(await store.verify_all(parts[-1].next))
    return Verified(
        sum(part.checked for part in parts),
        sum(part.size_bytes for part in parts),
        tuple(name for part in parts for name in part.damaged),
        None,
    )


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


async def test_all_files_are_read(place: Place) -> None:
    store, told, _ = await place.store(whole_bytes=None)
    snapshots = [await place.put(store, state(600, salt)) for salt in range(20)]
    split = [await until(told, one, whole=True) for one in snapshots]
    await store.flush()
    blobs = {blob for one in split for blob in one.blobs}
    size_bytes = sum(b.size_bytes for b in blobs) + sum(s.size_bytes for s in split)
    assert await verified(store) == Verified(len(blobs) + 20, size_bytes, (), None)
    await store.aclose()


async def test_a_damaged_blob(place: Place) -> None:
    store, told, _ = await place.store()
    first = await until(told, await place.put(store, state(600, 1)))
    second = await until(told, await place.put(store, state(300)))
    await store.flush()
    path = blob_files.path_of(place.blobs, first.blobs[-1].id)
    flip(path)
    assert (await verified(store)).damaged == (path.name,)
    assert told.gone == [first.id]
    assert await verified(store) == Verified(
        len(second.blobs), sum(b.size_bytes for b in second.blobs), (), None
    )
    with pytest.raises(KvFileError, match="does not exist"):
        await place.read(store, first)
    await store.aclose()


async def test_a_damaged_whole_file(place: Place) -> None:
    store, told, _ = await place.store(whole_bytes=None, write_after_s=3600.0)
    lost = await place.put(store, state(600, 1))
    kept = await place.put(store, state(600, 2))
    await store.flush()
    path = place.kv / f"kvf-{lost.id}.kv"
    flip(path)
    assert (await verified(store)).damaged == (path.name,)
    assert told.gone == [lost.id]
    assert await place.read(store, kept) == state(600, 2)
    await store.aclose()


async def test_blobs_make_up_for_a_damaged_whole_file(place: Place) -> None:
    store, told, _ = await place.store(whole_bytes=None)
    snapshot = await until(told, await place.put(store, state(600)), whole=True)
    await store.flush()
    flip(place.kv / f"kvf-{snapshot.id}.kv")
    assert len((await verified(store)).damaged) == 1
    assert told.gone == []
    assert await place.read(store, await until(told, snapshot)) == state(600)
    await store.aclose()
