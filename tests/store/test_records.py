"""`router.store.records`: agreement of a record and its file. Crashes: test_store_crash.py."""

from pathlib import Path

import pytest

from router.base.errors import KvError
from router.base.tasks import Tasks
from router.base.tokens import pack
from router.base.types import KvDir, Namespace, Snapshot, SnapshotId, StateShape
from router.store import records
from router.store.files import identity
from router.store.io_pool import Threads
from router.store.records import KvDirectory, StoredSnapshot
from router.store.sidecars import Sidecars
from tests.support.files.state_files import full
from tests.support.files.stores import touch

ID = SnapshotId("0" * 32)
TOKENS = [5, 6, 7, 8]


def opened(path: Path) -> KvDirectory:
    return records.open_directory(
        KvDir(str(path)),
        [],
        Threads(str(path), lambda: None, Tasks().spawn),
        fsync=False,
        group_access=False,
    )


def closed(directory: KvDirectory) -> None:
    records.close_directory(directory)


def test_unreadable_records_let_go_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt releases the directory; the second fails for the same reason."""

    def fails(_: object) -> list[str]:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr("router.store.sidecars.os.listdir", fails)
        for _ in range(2):
            with pytest.raises(KvError, match="cannot read the records"):
                opened(tmp_path)
    closed(opened(tmp_path))


def test_what_has_no_record_yet_may_have_been_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record could not be written and no caller knows it yet; this once was a KeyError."""
    raw = full(TOKENS)
    file = tmp_path / f"kvf-{ID}.kv"
    file.write_bytes(raw)
    directory = opened(tmp_path)
    snapshot = Snapshot(ID, Namespace("n"), directory.kv_dir, pack(TOKENS), len(raw), StateShape())
    held = StoredSnapshot(snapshot, directory, identity(file))

    def add(*_: object) -> None:
        raise KvError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Sidecars, "add", add)
        with pytest.raises(KvError, match="full"):
            records.record(held, fsync=False)
    touch(file)
    records.check_again(held)

    assert held.identity == identity(file)
    assert not directory.sidecars.records
    closed(directory)
