"""`router.store.blobs.write_budget`: bytes of 24 hours, over restarts and changes of the clock."""

from pathlib import Path

import pytest

from router.store.blobs.write_budget import NAME, WriteBudget

HOUR_S = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000 * HOUR_S

    def __call__(self) -> float:
        return self.now


def test_bytes_of_24_hours_count() -> None:
    clock = Clock()
    budget = WriteBudget(100, clock)
    budget.spend(30)
    clock.now += 12 * HOUR_S
    budget.spend(60)
    budget.spend(5)
    assert (budget.spent_bytes, budget.left_bytes) == (95, 5)
    budget.spend(50)
    assert budget.left_bytes == 0
    clock.now += 11 * HOUR_S
    assert budget.spent_bytes == 145
    clock.now += HOUR_S
    assert budget.spent_bytes == 115, "the first hour is over"


def test_a_restart_does_not_begin_anew(tmp_path: Path) -> None:
    clock = Clock()
    budget = WriteBudget(100, clock)
    for _ in range(30):
        budget.spend(1)
        clock.now += HOUR_S
    budget.write(tmp_path)
    again = WriteBudget(100, clock)
    again.read(tmp_path)
    assert again.spent_bytes == budget.spent_bytes == 23
    clock.now -= 20 * HOUR_S
    assert again.spent_bytes == 24, "a clock that was set back frees nothing"


@pytest.mark.parametrize("content", [b"", b"{}", b"[[1]]", b'[["a", 1]]', b"\xff"])
def test_a_damaged_file_begins_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    budget = WriteBudget(100, Clock())
    budget.read(tmp_path)
    assert budget.spent_bytes == 0
