"""Purges of tenants reach directories that were not open, or did not answer, when they are back."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from router.base.types import KvDir, Namespace, Snapshot, Tenant
from router.core.model.tenancy import is_of, tenant_of
from router.store import purges
from router.store.blobs.split_snapshots import BlobSettings
from router.store.records import KvDirectory, StoredSnapshot
from router.store.store import KvStore
from tests.support.files.blob_stores import state, write_out

ALICE, BOB = Namespace("m@alice"), Namespace("m@bob")
NOTE = "a1" * 16


class Run:
    """Runs of one router over some directories."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path

    async def start(self, *names: str, blobs: str = "") -> tuple[KvStore, list[Snapshot]]:
        """Return a store over directories of these names, and the snapshots that it offers."""
        dirs = [KvDir(str(self.root / name)) for name in names]
        for name in [*names, *([blobs] if blobs else [])]:
            (self.root / name).mkdir(mode=0o700, exist_ok=True)
        directory = KvDir(str(self.root / blobs))
        settings = BlobSettings(directory, write_after_s=0.0, whole_bytes=0, least_bytes=1)
        store = KvStore(
            dirs,
            wall_now=lambda: 0.0,
            fsync=False,
            blobs=settings if blobs else None,
            tenant_of=tenant_of,
            purges=self.root / "state" / purges.NAME,
        )
        return store, await store.load()


async def save(store: KvStore, root: Path, namespace: Namespace, n: int = 300) -> Snapshot:
    raw, name = state(n), store.staging_name()
    (root / name).write_bytes(raw)
    staged = await store.verify(KvDir(str(root)), name, len(raw))
    return await store.commit(staged, namespace)


async def test_a_directory_that_was_not_open_obeys(tmp_path: Path) -> None:
    runs = Run(tmp_path)
    store, _ = await runs.start("a", "b")
    for name in "ab":
        for namespace in (ALICE, Namespace("m@alice~salt"), BOB):
            await save(store, tmp_path / name, namespace)
    await store.aclose()

    store, found = await runs.start("a")
    for one in found:
        if is_of(tenant_of(one.namespace), "alice"):
            await store.delete(one)
    assert await store.purge(Tenant("alice"), NOTE) == {}
    await store.aclose()

    store, found = await runs.start("a", "b")
    assert {one.namespace for one in found} == {BOB}
    assert len(found) == 2
    anew = await save(store, tmp_path / "b", ALICE)
    await store.aclose()
    store, found = await runs.start("a", "b")
    assert anew.id in {one.id for one in found}, "it was obeyed once"
    await store.aclose()


async def test_blobs_of_a_run_whose_setting_is_off_do_not_come_back(tmp_path: Path) -> None:
    runs = Run(tmp_path)
    store, _ = await runs.start("a", blobs="blobs")
    await save(store, tmp_path / "a", ALICE)
    bobs = await save(store, tmp_path / "a", BOB)
    await store.flush()
    await write_out(store)
    await store.aclose()

    store, found = await runs.start("a")
    for one in [one for one in found if one.namespace == ALICE]:
        await store.delete(one)
    await store.purge(Tenant("alice"), NOTE)
    await store.aclose()

    store, found = await runs.start("a", blobs="blobs")
    assert [one.id for one in found] == [bobs.id]
    await store.flush()
    await store.aclose()


async def test_runs_without_a_common_directory_know_each_others_purges(tmp_path: Path) -> None:
    runs = Run(tmp_path)
    store, _ = await runs.start("a")
    for namespace in (ALICE, BOB):
        await save(store, tmp_path / "a", namespace)
    await store.aclose()
    store, _ = await runs.start("b")
    assert await store.purge(Tenant("alice"), NOTE) == {}
    await store.aclose()

    store, found = await runs.start("a")
    assert [one.namespace for one in found] == [BOB]
    await store.aclose()


def test_only_sound_notes_are_taken() -> None:
    """Another program may have written them: no folder is a path, no id is a name."""
    made = purges.Purges(lambda _: Tenant(""))
    made.add(NOTE, "#../../victim")
    made.add("../x", "alice")
    made.add(NOTE[:-1], "alice")
    assert made.everywhere == {}
    made.add(NOTE, f"#{'ab' * 8}")
    assert made.by_name == {}
    made.add(NOTE, "alice")
    made.add(NOTE, f"#{'cd' * 8}")
    assert made.by_name == {NOTE: "alice"}, "a name replaces a folder, and not the other way"


async def test_two_routers_of_one_user_keep_each_others_purges(tmp_path: Path) -> None:
    runs = Run(tmp_path)
    one, _ = await runs.start("a")
    two, _ = await runs.start("b")
    await one.purge(Tenant("alice"), NOTE)
    await two.purge(Tenant("bob"), "b2" * 16)
    await one.aclose()
    await two.aclose()
    store, _ = await runs.start("c")
    assert store.purges.everywhere == {NOTE: "alice", "b2" * 16: "bob"}
    await store.aclose()


async def test_a_damaged_list_is_set_aside(tmp_path: Path) -> None:
    runs, listed = Run(tmp_path), tmp_path / "state" / purges.NAME
    listed.parent.mkdir()
    listed.write_text("{")
    store, _ = await runs.start("a")
    await store.purge(Tenant("alice"), NOTE)
    await store.aclose()
    assert json.loads(listed.read_text()) == {NOTE: "alice"}
    assert listed.with_name(f"{purges.NAME}-damaged").read_text() == "{"


async def test_a_folder_is_obeyed_by_a_directory_that_opens_later(tmp_path: Path) -> None:
    """The cold tier tells a folder of a tenant of which nothing was here then."""
    runs = Run(tmp_path)
    store, _ = await runs.start("a")
    for namespace in (ALICE, BOB):
        await save(store, tmp_path / "a", namespace)
    await store.aclose()
    store, _ = await runs.start("b")
    store.purges.folder_of = {Tenant("alice"): "ab" * 8, Tenant("bob"): "cd" * 8}.__getitem__
    await store.purge(Tenant(f"#{'ab' * 8}"), NOTE)
    (again,) = await store.add([KvDir(str(tmp_path / "a"))])
    assert again.namespace == BOB
    await store.aclose()
    store, found = await runs.start("a", "b")  # without a cold tier nobody knows whose it is
    assert [one.namespace for one in found] == [BOB]
    await store.aclose()


async def test_one_that_cannot_be_noted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Run(tmp_path)
    store, _ = await runs.start("a", "b")

    def fails(directory: KvDirectory, notes: Mapping[str, str]) -> None:
        if directory.path.name == "b":
            raise OSError("read-only")
        plain(directory, notes)

    plain = purges._write
    monkeypatch.setattr(purges, "_write", fails)
    problems = await store.purge(Tenant("alice"), NOTE)
    assert list(problems) == [str(tmp_path / "b")]
    await store.aclose()


async def test_notes_that_cannot_be_read_are_as_none(tmp_path: Path) -> None:
    """Then the directory obeys once more."""
    runs = Run(tmp_path)
    store, _ = await runs.start("a", "b")
    await store.purge(Tenant("alice"), NOTE)
    await save(store, tmp_path / "b", ALICE)
    await store.aclose()
    (tmp_path / "b" / purges.NAME).write_text("{")
    store, found = await runs.start("a", "b")
    assert found == []
    assert json.loads((tmp_path / "b" / purges.NAME).read_text()) == {NOTE: "alice"}
    await store.aclose()


def test_the_oldest_notes_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    made = purges.Purges(lambda _: Tenant(""))
    monkeypatch.setattr(purges, "_MOST", 10)
    for number in range(15):
        made.add(f"{number:032x}", "alice")
    assert f"{4:032x}" not in made
    assert f"{5:032x}" in made


async def test_a_purge_while_a_directory_is_read_does_not_count_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshots are not known yet: it obeys when they are."""
    runs = Run(tmp_path)
    store, _ = await runs.start("a", "b")
    await save(store, tmp_path / "b", ALICE)
    await store.aclose()
    store, _ = await runs.start("a")
    await store.purge(Tenant("alice"), NOTE)
    recover = KvStore._recover

    async def slow(self: KvStore, directory: KvDirectory) -> list[StoredSnapshot]:
        await self.purge(Tenant("bob"), "b2" * 16)
        return await recover(self, directory)

    monkeypatch.setattr(KvStore, "_recover", slow)
    assert await store.add([KvDir(str(tmp_path / "b"))]) == []
    await store.aclose()
