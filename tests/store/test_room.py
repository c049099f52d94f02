"""`router.store.room`: what a disk has to spare, and for whom that can be said."""

from router.store import room


def test_missing_bytes_are_told_once_until_files_had_time_to_go() -> None:
    missing = room.Missing()
    assert not missing.is_known(-100)
    assert missing.is_known(-100), "being deleted"
    assert missing.is_known(-40)
    assert not missing.is_known(-130), "somebody has written more"
    assert [missing.is_known(-130) for _ in range(8)] == [True] * 6 + [False, True]
    assert not missing.is_known(50)
    assert not missing.is_known(None)
    assert not missing.is_known(-1)
