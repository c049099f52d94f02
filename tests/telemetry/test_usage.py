"""The book of usage: sums by day, tenant and model, in memory and in a file."""

import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.base.types import BackendId, Caller, Outcome, RequestId, RequestRecord, SlotId, Source
from router.telemetry import usage
from router.telemetry.usage import UsageBook, UsageFile

DAY = 86400.0
NOON = 20_000 * DAY + 43_200  # 2024-10-04
ALICE, BOB = Caller("laptop", "alice"), Caller("desk", "bob")
RECORD = RequestRecord(
    request=RequestId("r"),
    slot=SlotId(BackendId("a"), 0),
    source=Source.COLD,
    reason="",
    outcome=Outcome.OK,
    planned_tokens=0,
    prompt_tokens=100,
    cached_tokens=60,
    computed_tokens=40,
    generated_tokens=10,
    waited_s=0.0,
    prepared_s=0.0,
    ttft_s=0.1,
    total_s=1.0,
    predicted_s=0.1,
    model="m",
    server_s=0.5,
    caller=ALICE,
)


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


def test_sums_of_a_day_are_one_row() -> None:
    book = UsageBook(Clock())
    book.over(RECORD)
    book.over(replace(RECORD, outcome=Outcome.BACKEND_ERROR, generated_tokens=None))

    assert book.rows(1) == [
        {
            "day": "2024-10-04",
            "tenant": "alice",
            "model": "m",
            "requests": 2,
            "failed": 1,
            "prompt_tokens": 200,
            "computed_tokens": 80,
            "generated_tokens": 10,
            "server_s": 1.0,
            "cached_tokens": 120,
        }
    ]


def test_rows_are_by_day_tenant_and_model() -> None:
    clock = Clock()
    book = UsageBook(clock)
    for record in (RECORD, replace(RECORD, caller=BOB), replace(RECORD, caller=None, model=None)):
        book.over(record)
    clock.now += DAY
    book.over(RECORD)

    named = [(row["day"][-2:], row["tenant"], row["model"]) for row in book.rows(2)]
    assert named == [
        ("05", "alice", "m"),
        ("04", "bob", "m"),
        ("04", "alice", "m"),
        ("04", "", "a"),
    ]
    assert len(book.rows(1)) == 1


def test_windows_of_a_minute_and_a_day_end() -> None:
    clock = Clock()
    book = UsageBook(clock)
    book.over(RECORD)
    assert (book.used("alice"), book.used("bob")) == ((50, 50), (0, 0))
    assert book.left_s() == (60, 43_200)
    clock.now += 60
    assert book.used("alice") == (0, 50)
    clock.now += DAY
    assert book.used("alice") == (0, 0)


async def test_file_keeps_the_sums(tmp_path: Path) -> None:
    """Also where the process is killed: what was written is there."""
    book = UsageBook(Clock())
    for turn in (1, 2, 3):
        book = UsageBook(Clock())
        await book.open(tmp_path / "usage.sqlite")
        book.over(RECORD)
        assert [row["requests"] for row in book.rows(1)] == [turn]
        await book.save()  # and no `aclose`
        assert [row["requests"] for row in book.rows(1)] == [turn]
    assert book.used("alice") == (50, 150)


async def test_days_of_long_ago_are_forgotten(tmp_path: Path) -> None:
    clock = Clock()
    book = UsageBook(clock)
    for days in (0, 100, 450):
        clock.now = NOON + days * DAY
        book = UsageBook(clock)
        await book.open(tmp_path / "usage.sqlite")
        book.over(RECORD)
        await book.aclose()
    assert len(book.rows(99_999)) == 2


async def test_what_cannot_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = UsageBook(Clock())
    await book.open(tmp_path / "usage.sqlite")
    book.over(RECORD)
    with monkeypatch.context() as patch:

        def fails(*_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        patch.setattr(UsageFile, "add", fails)
        await book.save()
        assert [row["requests"] for row in book.rows(1)] == [1]
    book.over(RECORD)
    await book.aclose()

    again = UsageBook(Clock())
    await again.open(tmp_path / "usage.sqlite")
    assert [row["requests"] for row in again.rows(1)] == [2]
    await again.aclose()


async def test_file_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    with sqlite3.connect(path) as file:
        file.execute(f"PRAGMA user_version={usage._FORMAT + 1}")
    with pytest.raises(sqlite3.DatabaseError, match="of a newer kvferry"):
        await UsageBook(Clock()).open(path)
