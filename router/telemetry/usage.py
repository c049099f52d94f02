"""What each tenant used, by day and model: kept in memory, and in a file over restarts.

The sums of a day are rows, so the book stays small: tenants x models x days. Days are of UTC.
"""

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from router.base.tasks import in_thread, spawn, within
from router.base.types import BackendId, Caller, Cost, Outcome, Request, RequestRecord
from router.core.model.tenancy import Budget

Json = dict[str, Any]
log = structlog.get_logger(__name__)

_EVERY_S = 1.0  # between writes: so much is lost at most if the process is killed
_PATIENCE_S = 5.0  # of a start and of an end with a file that does not answer
_KEEP_DAYS = 400  # of those that have rows: no clock that is wrong can empty the book
_MOST_TOKENS = 10**9  # of one request
_FORMAT = 1  # `user_version` of the file


class UsageRow(NamedTuple):
    """The row of a request: "" is the tenant of requests without a key."""

    day: str  # YYYY-MM-DD
    tenant: str
    model: str


@dataclass(slots=True)
class UsageSums:
    """Totals of a row. `server_s`: seconds in which a server computed for it."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    server_s: float = 0.0

    @property
    def cached_tokens(self) -> int:
        """Return the prompt tokens that were not computed."""
        return max(self.prompt_tokens - self.computed_tokens, 0)

    def add(self, other: "UsageSums") -> None:
        """Add other totals."""
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.computed_tokens += other.computed_tokens
        self.generated_tokens += other.generated_tokens
        self.server_s += other.server_s


_NEWEST = "SELECT DISTINCT day FROM usage ORDER BY day DESC LIMIT ?"
_COLUMNS = tuple(one.name for one in fields(UsageSums))
_CREATE = (
    "CREATE TABLE IF NOT EXISTS usage (day TEXT, tenant TEXT, model TEXT, "
    + ", ".join(f"{name} NUMERIC NOT NULL" for name in _COLUMNS)
    + ", PRIMARY KEY (day, tenant, model)) WITHOUT ROWID"
)
_ADD = (
    f"INSERT INTO usage VALUES ({', '.join('?' * (3 + len(_COLUMNS)))})"  # noqa: S608 - our names
    f" ON CONFLICT DO UPDATE SET {', '.join(f'{n} = {n} + excluded.{n}' for n in _COLUMNS)}"
)


class UsageFile:
    """A file of sums. Every method may block, and raises sqlite3.Error or OSError."""

    def __init__(self, path: Path) -> None:
        """Open the file; it is made if there is none. Others may not read it."""
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600))
        if os.stat(path).st_uid == os.geteuid():
            os.chmod(path, 0o600)
        self._db = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
        try:
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, _FORMAT):
                raise sqlite3.DatabaseError(f"its format {version} is of a newer kvferry")
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute(_CREATE)
            self._db.execute(f"PRAGMA user_version={_FORMAT}")
            self._db.commit()
        except BaseException:
            self._db.close()
            raise

    def add(self, found: Mapping[UsageRow, UsageSums]) -> None:
        """Add sums to their rows, all or none."""
        with self._db:
            self._db.executemany(_ADD, [(*place, *astuple(sums)) for place, sums in found.items()])

    def forget(self) -> None:
        """Delete all rows but those of the newest days."""
        with self._db:
            self._db.execute(f"DELETE FROM usage WHERE day NOT IN ({_NEWEST})", (_KEEP_DAYS,))  # noqa: S608

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class UsageBook:
    """The sums of this process, and those in the file. For one event loop."""

    def __init__(self, wall_now: Callable[[], float], budget: Budget | None = None) -> None:
        """Set up without a file: all is kept in memory. `budget`: asks for the sums of a day."""
        self._wall_now = wall_now
        self._budget = budget or Budget()
        self._budget.costs_of_day = self._costs_of_day
        self._path: Path | None = None
        self._file: UsageFile | None = None
        self._read = False
        self._stored: dict[UsageRow, UsageSums] = {}  # in the file, or for good in memory
        self._fresh: dict[UsageRow, UsageSums] = {}  # not yet in the file
        self._writing: dict[UsageRow, UsageSums] = {}
        self._turn = asyncio.Lock()
        self.totals: dict[str, UsageSums] = {}  # of this process, by tenant
        self.problem = ""  # why the last write failed

    async def open(self, path: Path) -> None:
        """Keep the sums in a file, once it can be opened and read."""
        self._path = path
        try:
            await within(self._saving(), _PATIENCE_S, str(path))
        except TimeoutError as error:
            self._note(error)

    def over(self, record: RequestRecord) -> None:
        """Add a finished request that reached a backend."""
        failed = int(record.outcome in (Outcome.BACKEND_ERROR, Outcome.REFUSED))
        sums = UsageSums(requests=1, failed=failed, server_s=record.server_s)
        self._add(record.caller, record.model or record.slot.backend, sums, record.cost)

    def late(self, request: Request, backend: BackendId, cost: Cost) -> None:
        """Add what a request cost after its end, or though it was never sent."""
        self._add(request.caller, request.model or backend, UsageSums(), cost)

    def rows(self, days: int) -> list[Json]:
        """Return the rows of the last days, today included, the newest first."""
        since, found = self._day(days - 1), dict[UsageRow, UsageSums]()
        for place, sums in self._parts():
            if place.day >= since:
                found.setdefault(place, UsageSums()).add(sums)
        return [_row(place, found[place]) for place in sorted(found, reverse=True)]

    async def run(self) -> None:
        """Write what is new every second, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await asyncio.wait({self._saving()})

    def _saving(self) -> "asyncio.Task[None]":
        """Return a task that writes what is new: a write under way is never cancelled."""
        return spawn(self.save(), name="usage save")

    async def save(self) -> None:
        """Write what is new. What cannot be written stays, for the next time."""
        async with self._turn:
            try:
                await self._write()
            except Exception as error:  # noqa: BLE001 - nothing of the sums may be lost
                self._note(error)
            else:
                self._note(None)

    async def aclose(self) -> None:
        """Write what is new, and close the file."""
        try:
            await within(self._saving(), 2 * _PATIENCE_S, str(self._path))
            if self._file is not None:
                closing, self._file = in_thread(self._file.close, "usage"), None
                await within(closing, _PATIENCE_S, str(self._path))
        except Exception as error:  # noqa: BLE001 - the end of the process does not wait
            self._note(error)

    async def _write(self) -> None:
        if self._path is not None and self._file is None:
            await self._read_rows()  # also of a file that cannot be written: limits hold
            self._file = await in_thread(partial(_opened, self._path), "usage")
            await self._read_rows()
        if not self._fresh:
            return
        self._writing, self._fresh = self._fresh, {}
        target = self._fresh
        try:
            if self._file is not None:
                await in_thread(partial(self._file.add, self._writing), "usage")
            target = self._stored
        finally:
            _merge(target, self._writing)
            self._writing = {}

    async def _read_rows(self) -> None:
        """Read the rows of the file once, if it is there."""
        assert self._path is not None
        known = None if self._read else await in_thread(partial(_known, self._path), "usage")
        if known is not None:
            _merge(self._stored, known)
            self._read = True
            self._budget.recount()

    def _add(self, caller: Caller | None, model: str, sums: UsageSums, cost: Cost) -> None:
        sums.prompt_tokens = _sane(cost.cached + cost.computed)
        sums.computed_tokens = _sane(cost.computed)
        sums.generated_tokens = _sane(cost.generated)
        tenant = "" if caller is None else caller.tenant
        self._fresh.setdefault(UsageRow(self._day(), tenant, model), UsageSums()).add(sums)
        self.totals.setdefault(tenant, UsageSums()).add(sums)

    def _parts(self) -> Iterable[tuple[UsageRow, UsageSums]]:
        for part in (self._stored, self._writing, self._fresh):
            yield from part.items()

    def _costs_of_day(self, number: int) -> dict[str, Cost]:
        """Return the sums of each tenant on a day, counted since 1970."""
        day, found = _name(number * 86400), dict[str, UsageSums]()
        for place, sums in self._parts():
            if place.day == day:
                found.setdefault(place.tenant, UsageSums()).add(sums)
        return {
            tenant: Cost(sums.cached_tokens, sums.computed_tokens, sums.generated_tokens)
            for tenant, sums in found.items()
        }

    def _note(self, error: Exception | None) -> None:
        """Log a problem of the file once, and note its end."""
        problem = "" if error is None else str(error) or type(error).__name__
        if problem and problem != self.problem:
            log.warning("usage_not_written", file=str(self._path), reason=problem)
        self.problem = problem

    def _day(self, ago: int = 0) -> str:
        return _name(self._wall_now() - ago * 86400)


def _opened(path: Path) -> UsageFile:
    file = UsageFile(path)
    with suppress(sqlite3.Error):  # on a full disk
        file.forget()
    return file


def _known(path: Path) -> dict[UsageRow, UsageSums] | None:
    """Return the rows of a file that perhaps cannot be written; None: there is no file yet.

    Blocks. Raises sqlite3.Error.
    """
    if not path.exists():
        return None
    try:
        return _rows_of(path, "mode=ro")
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return None
        if "unable to open" not in str(error) and "readonly" not in str(error):
            raise
        return _rows_of(path, "mode=ro&immutable=1")  # the log of writes cannot be made beside it


def _rows_of(path: Path, how: str) -> dict[UsageRow, UsageSums]:
    """Return the rows of the newest days. One that kvferry did not write is left out."""
    names = ", ".join((*UsageRow._fields, *_COLUMNS))
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as db:
        db.text_factory = partial(str, encoding="utf-8", errors="replace")
        sql = f"SELECT {names} FROM usage WHERE day IN ({_NEWEST})"  # noqa: S608 - our names
        found = list(db.execute(sql, (_KEEP_DAYS,)))
    good = [row for row in found if _is_row(row)]
    if len(good) < len(found):
        log.warning("usage_rows_unreadable", rows=len(found) - len(good))
    return {UsageRow(*row[:3]): UsageSums(*row[3:]) for row in good}


def _merge(into: dict[UsageRow, UsageSums], more: Mapping[UsageRow, UsageSums]) -> None:
    for place, sums in more.items():
        into.setdefault(place, UsageSums()).add(sums)


def _is_row(row: tuple[Any, ...]) -> bool:
    return all(isinstance(each, str) for each in row[:3]) and all(
        isinstance(each, int | float) and 0 <= each < inf for each in row[3:]
    )


def _name(at: float) -> str:
    """Return a time's day of UTC."""
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=max(at, 0.0))).date().isoformat()


def _sane(tokens: int | None) -> int:
    """Return a count that a file can take, of what a server reported."""
    return min(max(tokens or 0, 0), _MOST_TOKENS)


def _row(place: UsageRow, sums: UsageSums) -> Json:
    named = dict(zip(_COLUMNS, astuple(sums), strict=True))
    named["server_s"] = round(sums.server_s, 3)
    return {**place._asdict(), **named, "cached_tokens": sums.cached_tokens}
