"""The slot journal on disk: entries of one process, of one backend."""

import os
from pathlib import Path

import pytest

from router.base.tokens import pack
from router.base.types import BackendId, KvDir, Namespace, Tenant
from router.store.slot_journal import JournalEntry, read_entries, write_entries

PROCESS = ("marker", "model", "build")
A = BackendId("a")
KNOWN = {"a", "a-1"}


def entry(index: int = 0, process: tuple[str, ...] = PROCESS) -> JournalEntry:
    return JournalEntry(
        process, index, 7, Namespace("n"), Tenant("alice"), pack([1, 2, 3]), 2, (1,)
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    kv_dir = KvDir(str(tmp_path))
    write_entries(kv_dir, A, [entry(0), entry(1)])
    found = read_entries(kv_dir, A, PROCESS, KNOWN)

    assert sorted(found, key=lambda one: one.index) == [entry(0), entry(1)]
    assert found[0].n_tokens == 5
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


def test_entries_of_another_process_are_removed(tmp_path: Path) -> None:
    kv_dir = KvDir(str(tmp_path))
    write_entries(kv_dir, A, [entry()])

    assert read_entries(kv_dir, A, ("other", "model", "build"), KNOWN) == []
    assert list(tmp_path.iterdir()) == []


def test_another_backend_keeps_its_own(tmp_path: Path) -> None:
    kv_dir = KvDir(str(tmp_path))
    write_entries(kv_dir, BackendId("a-1"), [entry()])

    assert read_entries(kv_dir, A, PROCESS, KNOWN) == []
    assert read_entries(kv_dir, BackendId("a-1"), PROCESS, KNOWN) == [entry()]


def test_a_broken_file_is_no_entry(tmp_path: Path) -> None:
    (tmp_path / "kvf-slot-a-0.journal").write_bytes(b"\xc1")

    assert read_entries(KvDir(str(tmp_path)), A, PROCESS, KNOWN) == []
    assert read_entries(KvDir(str(tmp_path / "none")), A, PROCESS, KNOWN) == []


def test_no_flipped_bit_is_believed(tmp_path: Path) -> None:
    """One ended the monitor of its backend, which stayed down until the file was removed."""
    kv_dir, path = KvDir(str(tmp_path)), tmp_path / "kvf-slot-a-0.journal"
    write_entries(kv_dir, A, [entry()])
    kept = path.read_bytes()
    for bit in range(8 * len(kept)):
        damaged = bytearray(kept)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert read_entries(kv_dir, A, PROCESS, KNOWN) == []


@pytest.mark.parametrize("name", ["kvf-slot-a-0.journal", "kvf-slot-a-0.journal-new"])
def test_no_link_is_written_through_and_no_pipe_waited_for(tmp_path: Path, name: str) -> None:
    """Another process writes the directory."""
    target, kv_dir = tmp_path / "target", tmp_path / "kv"
    target.write_bytes(b"precious")
    kv_dir.mkdir()
    for put in (lambda path: path.symlink_to(target), os.mkfifo):
        put(kv_dir / name)
        assert read_entries(KvDir(str(kv_dir)), A, PROCESS, KNOWN) == []
        write_entries(KvDir(str(kv_dir)), A, [entry()])
        assert read_entries(KvDir(str(kv_dir)), A, PROCESS, KNOWN) == [entry()]
        assert [path.name for path in kv_dir.iterdir()] == ["kvf-slot-a-0.journal"]
        (kv_dir / "kvf-slot-a-0.journal").unlink()
    assert target.read_bytes() == b"precious"


def test_entries_of_a_backend_that_is_not_known_are_removed(tmp_path: Path) -> None:
    """It was taken out of the configuration: its prompts do not stay on disk."""
    kv_dir = KvDir(str(tmp_path))
    write_entries(kv_dir, A, [entry()])
    write_entries(kv_dir, BackendId("gone"), [entry()])

    assert read_entries(kv_dir, A, PROCESS, KNOWN) == [entry()]
    assert [path.name for path in tmp_path.iterdir()] == ["kvf-slot-a-0.journal"]
