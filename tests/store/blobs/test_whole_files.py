"""`router.store.blobs.whole_files`, and a store whose blobs are on the disk of its files."""

import asyncio
from pathlib import Path

from router.base.types import KvDir, Snapshot, SnapshotId
from router.store.blobs.split_snapshots import FOLDER, BlobSettings
from router.store.blobs.whole_files import WholeFiles
from router.store.store import KvStore
from tests.support.files.blob_stores import NAMESPACE, Told, state, until

A, B = SnapshotId("a"), SnapshotId("b")


class Sharing(Told):
    """A listener that knows which snapshots begin alike."""

    same: tuple[SnapshotId, ...] = ()

    def alike(self, snapshot: Snapshot) -> list[tuple[SnapshotId, int]]:
        others = [one for one in self.same if one != snapshot.id]
        return [(one, 512) for one in others if snapshot.id in self.same]


async def put(store: KvStore, kv: Path, raw: bytes) -> Snapshot:
    name = store.staging_name()
    (kv / name).write_bytes(raw)
    staged = await store.verify(KvDir(str(kv)), name, len(raw))
    return await store.commit(staged, NAMESPACE)


async def test_split_only_where_another_shares(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    store = KvStore(
        [KvDir(str(kv))], wall_now=lambda: 1.5, blobs=BlobSettings(write_after_s=0.0, least_bytes=1)
    )
    store.listener = told = Sharing()
    await store.load()
    alone = await put(store, kv, state(700, 1))
    await store.flush()
    assert (kv / f"kvf-{alone.id}.kv").exists()
    first, second = [await put(store, kv, state(700, salt)) for salt in (2, 3)]
    told.same = (first.id, second.id)
    (split,) = store._splits.values()
    for one in (first, second):
        split._add(store._held[one.id])  # due once more
    for one in (first, second):
        assert (await until(told, one)).kv_dir == str(kv / FOLDER)
    assert (kv / f"kvf-{alone.id}.kv").exists()
    assert alone.id not in told.now
    status = store.tier_status()
    assert status is not None
    assert (status.snapshots, status.whole_files, status.unwritten) == (2, 1, 0)
    assert status.blob_bytes < 0.75 * status.sum_bytes
    await store.aclose()
    assert [path.name for path in kv.glob("*.kv")] == [f"kvf-{alone.id}.kv"]

    again = KvStore(
        [KvDir(str(kv))], wall_now=lambda: 1.5, blobs=BlobSettings(write_after_s=3600.0)
    )
    assert {one.id for one in await again.load()} == {alone.id, first.id, second.id}
    await again.aclose()


def test_split_files_have_a_limit_of_their_own() -> None:
    files = WholeFiles(split_limit_bytes=10, same_disk=True)
    files.add(A, 8, due=0.0)
    files.add(B, 8, due=None)
    assert files.to_drop(()) is None
    files.written(A)
    assert files.to_drop(()) == B, "unused for longest"
    assert files.to_drop({B}) == A


async def opened(
    kv_dirs: list[Path], blobs: BlobSettings | None, same: Sharing | None = None
) -> KvStore:
    dirs = [KvDir(str(path)) for path in kv_dirs]
    store = KvStore(dirs, wall_now=lambda: 1.5, blobs=blobs)
    store.listener = same or Sharing()
    await store.load()
    return store


async def turns(n: int = 300) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_files_that_cannot_be_split_wait_for_a_minute(tmp_path: Path) -> None:
    """Regression: each put the other one to now."""
    told = Sharing()
    settings = BlobSettings(write_after_s=0.0, least_bytes=1, max_written_per_day=1)
    store = await opened([tmp_path / "kv"], settings, told)
    made = [await put(store, tmp_path / "kv", state(700, salt)) for salt in (1, 2)]
    told.same = (made[0].id, made[1].id)
    (split,) = store._splits.values()
    for one in made:
        split._add(store._held[one.id])
    await turns()
    assert 1 <= split.put_off <= 4
    await store.aclose()


async def test_second_turn_of_a_conversation_stays_whole(tmp_path: Path) -> None:
    """Regression: the first had left it blobs that there never were, so it was split for them."""
    store = await opened([tmp_path / "kv"], BlobSettings(write_after_s=3600.0, least_bytes=1))
    first = await put(store, tmp_path / "kv", state(600))
    second = await put(store, tmp_path / "kv", state(700))
    await store.delete(first)
    (split,) = store._splits.values()
    assert not split._sharers(second.id)
    await store.aclose()


async def test_files_of_several_directories_are_all_split(tmp_path: Path) -> None:
    """Regression: some were given up before they were held."""
    kv_dirs = [tmp_path / "a", tmp_path / "b"]
    made: list[Snapshot] = []
    for kv in kv_dirs:
        before = await opened([kv], None)
        made += [await put(before, kv, state(700, len(made) + salt)) for salt in range(3)]
        await before.aclose()
    told, blobs = Sharing(), KvDir(str(tmp_path / "blobs"))
    settings = BlobSettings(blobs, write_after_s=0.0, whole_bytes=0, least_bytes=1)
    store = await opened(kv_dirs, settings, told)
    for one in made:
        await until(told, one)
    assert not told.gone
    await store.aclose()


async def test_former_kv_directory_for_blobs_is_emptied(tmp_path: Path) -> None:
    before = await opened([tmp_path / "old"], None)
    await put(before, tmp_path / "old", state(700))
    await before.aclose()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kvf-x").write_text("not ours")
    (tmp_path / "old" / "manifests").symlink_to(elsewhere)
    store = await opened([tmp_path / "kv"], BlobSettings(KvDir(str(tmp_path / "old"))))
    assert not store._held
    assert not list((tmp_path / "old").glob("kvf-*"))
    assert (elsewhere / "kvf-x").exists(), "no link is followed"
    await store.aclose()


async def test_directories_on_one_disk_have_one_budget(tmp_path: Path) -> None:
    """Regression: it was shown once for each, and after a restart only the first one's counted."""
    kv_dirs, settings = [tmp_path / "a", tmp_path / "b"], BlobSettings(max_written_per_day=1e6)
    store = await opened(kv_dirs, settings)
    await put(store, kv_dirs[1], state(700))
    written = len(state(700))
    await store.flush()
    for _ in range(2):
        status = store.tier_status()
        assert status is not None
        assert (status.today_bytes, status.budget_left_bytes) == (written, 1e6 - written)
        await store.aclose()
        store = await opened(kv_dirs, settings)
    await store.aclose()
