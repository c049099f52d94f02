"""`router.store.blobs.whole_files`: what is written when, and dropped first."""

from math import inf

from router.base.types import SnapshotId
from router.store.blobs.whole_files import WholeFiles

A, B, C = SnapshotId("a"), SnapshotId("b"), SnapshotId("c")


def test_a_file_is_written_when_it_is_due() -> None:
    files = WholeFiles()
    files.add(A, 10, 7.0)
    files.add(B, 10, 5.0)
    assert files.to_write(4.9) is None
    assert files.wakeup() == 5.0
    assert files.to_write(5.0) == B
    files.written(B)
    assert files.to_write(6.0) is None
    assert files.unwritten() == [A]
    files.put_off(A, 9.0)
    assert files.to_write(8.0) is None
    files.written(A)
    assert files.wakeup() == inf


def test_a_file_that_is_gone_is_never_written() -> None:
    files = WholeFiles()
    files.add(A, 10, 7.0)
    files.drop(A)
    files.drop(A)
    files.written(A)
    files.put_off(A, 8.0)
    assert files.to_write(9.0) is None
    assert files.total_bytes == 0


def test_drops_what_was_unused_for_longest() -> None:
    files = WholeFiles(limit_bytes=25)
    for name in (A, B, C):
        files.add(name, 10, None)
    files.use(A)
    assert files.to_drop({}) == B
    assert files.to_drop({B}) == C, "in use"
    files.drop(B)
    assert files.to_drop({}) is None, "there is room"


def test_without_room_a_file_is_written_early() -> None:
    files = WholeFiles(limit_bytes=15)
    files.add(A, 10, 100.0)
    assert files.to_write(0.0) is None
    files.add(B, 10, 101.0)
    assert files.to_drop({}) is None, "nothing is written"
    assert files.to_write(0.0) == A
    files.written(A)
    assert files.to_drop({}) == A
    assert files.to_give_up({A}) == B


def test_nothing_is_given_up_where_there_is_room() -> None:
    files = WholeFiles(limit_bytes=15)
    files.add(A, 10, 0.0)
    assert files.to_give_up({}) is None


def test_a_file_counts_once() -> None:
    files = WholeFiles()
    files.add(A, 10, 1.0)
    files.add(A, 12, None)
    assert files.total_bytes == 12
    assert files.unwritten() == []
