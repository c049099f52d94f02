"""The book of usage: sums by day, tenant and model, in memory and in a file."""

import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from router.base.types import (
    BackendId,
    Caller,
    Cost,
    Outcome,
    RequestId,
    RequestRecord,
    SlotId,
    Source,
)
from router.core.model.tenancy import Budget, Limits
from router.telemetry import usage
from router.telemetry.usage import UsageBook, UsageFile
from tests.support.scheduler.build import request

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
    cost=Cost(60, 40, 10),
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
    book.over(replace(RECORD, outcome=Outcome.BACKEND_ERROR, cost=Cost(60, 40)))

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
    budget = Budget(Clock())
    budget.limit({"alice": Limits(tokens_per_day=200)})
    await UsageBook(Clock(), budget).open(tmp_path / "usage.sqlite")
    assert budget.left("alice") == 50


async def test_days_beyond_the_newest_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage, "_KEEP_DAYS", 2)
    clock = Clock()
    for days in (0, 100, 450):
        clock.now = NOON + days * DAY
        book = UsageBook(clock)
        await book.open(tmp_path / "usage.sqlite")
        book.over(RECORD)
        await book.aclose()
    book = UsageBook(clock)
    await book.open(tmp_path / "usage.sqlite")
    assert len(book.rows(99_999)) == 2


@pytest.mark.parametrize("wrong", [0.0, NOON + 30_000 * DAY], ids=["1970", "2106"])
async def test_a_start_with_a_wrong_clock_forgets_nothing(tmp_path: Path, wrong: float) -> None:
    clock, budget = Clock(), Budget(Clock())
    budget.limit({"alice": Limits(tokens_per_day=200)})
    for now in (NOON, wrong, NOON):
        clock.now = now
        book = UsageBook(clock, budget)
        await book.open(tmp_path / "usage.sqlite")
        book.over(RECORD)
        await book.aclose()
    await UsageBook(clock, budget).open(tmp_path / "usage.sqlite")
    assert budget.left("alice") == 100


async def test_a_cost_that_is_known_late_belongs_to_no_new_request() -> None:
    book = UsageBook(Clock())
    book.over(replace(RECORD, cost=Cost(computed=10)))
    book.late(request(caller=ALICE, model="m"), BackendId("a"), Cost(computed=30, generated=5))
    (row,) = book.rows(1)
    assert (row["requests"], row["prompt_tokens"], row["computed_tokens"]) == (1, 40, 40)
    assert row["generated_tokens"] == 5


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


def newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"PRAGMA user_version={usage._FORMAT + 1}")


def other_columns(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file:
        file.execute("CREATE TABLE usage (day TEXT, tenant TEXT)")


@pytest.mark.parametrize(
    "spoil",
    [
        newer,
        other_columns,
        lambda path: path.write_bytes(b"SQLite format 3\0" + b"x" * 4096),
        lambda path: path.write_text("no database"),
        lambda path: path.mkdir(),
    ],
    ids=["newer", "other columns", "damaged", "text", "directory"],
)
async def test_a_file_that_cannot_be_used_stops_nothing(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """It is left as it is; the sums are kept until the file is usable."""
    path = tmp_path / "usage.sqlite"
    spoil(path)
    before = None if path.is_dir() else path.read_bytes()
    book = UsageBook(Clock())
    await book.open(path)
    book.over(RECORD)
    await book.save()
    assert book.problem
    assert [row["requests"] for row in book.rows(1)] == [1]
    assert before is None or spoil is other_columns or path.read_bytes() == before

    path.rename(tmp_path / "aside")
    await book.save()
    assert not book.problem
    await book.aclose()
    again = UsageBook(Clock())
    await again.open(path)
    assert [row["requests"] for row in again.rows(1)] == [1]
    await again.aclose()


async def test_rows_of_others_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "usage.sqlite"
    book = UsageBook(Clock())
    await book.open(path)
    book.over(RECORD)
    await book.aclose()
    with closing(sqlite3.connect(path)) as file, file:
        for day, bad in enumerate(("'many'", "-1", "x'00'", "9e999", "cast(x'ff' as text)")):
            file.execute(f"INSERT INTO usage VALUES ('d{day}', 't', {bad}, 0, 0, 0, {bad}, 0, 0)")

    again = UsageBook(Clock())
    await again.open(path)
    assert [row["requests"] for row in again.rows(99_999)] == [1]
    await again.aclose()


async def test_a_file_that_comes_late_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a mount: what a tenant has used before counts as soon as it is there."""
    path, aside = tmp_path / "usage.sqlite", tmp_path / "aside"
    book = UsageBook(Clock())
    await book.open(path)
    book.over(replace(RECORD, caller=ALICE))
    await book.aclose()
    path.rename(aside)
    path.mkdir()
    budget = Budget(Clock())
    budget.limit({"alice": Limits(tokens_per_day=50)})
    again = UsageBook(Clock(), budget)
    await again.open(path)
    assert again.problem
    path.rmdir()
    aside.rename(path)
    await again.save()
    assert budget.left("alice") == 0
    await again.aclose()


@pytest.mark.parametrize("where", ["forget", "__init__"])
async def test_a_full_disk_gives_no_new_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What a tenant has used today is read, though nothing can be written."""
    path = tmp_path / "usage.sqlite"
    book = UsageBook(Clock())
    await book.open(path)
    book.over(replace(RECORD, caller=ALICE))
    await book.save()
    await book.aclose()

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(UsageFile, where, full)
    budget = Budget(Clock())
    budget.limit({"alice": Limits(tokens_per_day=50)})
    again = UsageBook(Clock(), budget)
    await again.open(path)
    assert budget.left("alice") == 0
    await again.aclose()


async def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    """Also one that an older kvferry made, and what SQLite puts beside it."""
    path = tmp_path / "usage.sqlite"
    path.touch(0o644)
    book = UsageBook(Clock())
    await book.open(path)
    book.over(RECORD)
    await book.save()
    modes = {each.name: stat.S_IMODE(os.stat(each).st_mode) for each in os.scandir(tmp_path)}
    assert set(modes.values()) == {0o600}
    assert len(modes) == 3
    await book.aclose()


async def test_a_file_that_does_not_answer_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the start nor the end; what it takes late is written once."""
    answers, opened = threading.Event(), usage._opened

    def late(path: Path) -> object:
        answers.wait(60)
        return opened(path)

    monkeypatch.setattr(usage, "_opened", late)
    monkeypatch.setattr(usage, "_PATIENCE_S", 0.01)
    book = UsageBook(Clock())
    await book.open(tmp_path / "usage.sqlite")
    assert "did not answer" in book.problem
    book.over(RECORD)
    await book.aclose()
    answers.set()
    await book.save()
    assert [row["requests"] for row in book.rows(1)] == [1]
    assert not book.problem
    await book.aclose()
