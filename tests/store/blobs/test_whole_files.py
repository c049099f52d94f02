"""`router.store.blobs.whole_files`, and a store whose blobs are on the disk of its files."""

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
        [KvDir(str(kv))],
        wall_now=lambda: 1.5,
        blobs=BlobSettings(write_after_s=0.0, least_bytes=1),
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
    status = split.status()
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
