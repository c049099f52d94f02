"""Output of the fleet bench: its table, the same in brief, and the picture of it."""

from pathlib import Path

import pytest

from bench.fleet import plots
from bench.fleet.counters import Counts
from bench.fleet.measure import COLUMNS, PARTS, brief
from bench.report import Report


def test_counts_are_differences() -> None:
    after = Counts(9, 5, 0, 100, 2.0, 3, 1, 2, 4, 0.75, 8.0, 6.0)
    before = Counts(4, 1, 0, 40, 0.5, 1, 0, 2, 1, 0.5, 7.0, 4.0)

    added = after.since(before)
    assert added == Counts(5, 4, 0, 60, 1.5, 2, 1, 2, 3, 0.25)
    assert (added.router_cpu_s, added.server_cpu_s) == (1.0, 2.0)
    assert Counts(9, 5, 0).since(Counts(4, 1, 0)).moved_bytes is None


def _report() -> Report:
    report = Report("fleet", "t", list(COLUMNS), {}, parts=PARTS)
    for who, run, n_tokens, wall_s in (
        *(("kvferry", 1, 50, 2.0), ("kvferry", 2, 51, 1.0), ("kvferry", "median", 50, 1.0)),
        ("nginx", 1, 90, 4.0),
    ):
        cells = dict.fromkeys(COLUMNS, None) | {"contender": who, "run": run, "wall s": wall_s}
        cells |= {"computed": n_tokens, "oracle": 40, "TTFT p50 ms": 5.0, "p90": 6.0, "p99": 7.0}
        report.add(*cells.values())
    return report


def test_each_column_is_shown_once() -> None:
    shown = [column for columns in PARTS.values() for column in columns[2:]]
    assert [*COLUMNS[:2], *shown] == list(COLUMNS)


def test_in_brief_a_contender_has_one_row_with_its_range() -> None:
    rows = brief(_report()).records()

    assert [(row["contender"], row["computed"], row["wall s"]) for row in rows] == [
        ("kvferry", 50, "1 (1 to 2)"),
        ("nginx", 90, 4.0),
    ]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_table_has_one_picture(ending: str, tmp_path: Path) -> None:
    one, two = tmp_path / f"1.{ending}", tmp_path / f"2.{ending}"
    for path in (one, two):
        plots.draw(_report().records(), "t", path)

    assert one.read_bytes() == two.read_bytes()
    if ending == "svg":
        # Small enough to be committed, and its words are text.
        assert len(one.read_bytes()) < 100_000
        assert ">nginx</text>" in one.read_text()
