"""What each tenant used, by day and model: kept in memory, and in a file over restarts.

The sums of a day are rows, so the book stays small: tenants x models x days. Days are of UTC.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from router.base.types import Outcome, RequestRecord

Json = dict[str, Any]
log = structlog.get_logger(__name__)

_EVERY_S = 1.0  # between writes: so much is lost at most if the process is killed
_KEEP_DAYS = 400
_MOST_TOKENS = 10**9  # of one request
_FORMAT = 1  # `user_version` of the file


class Place(NamedTuple):
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

    @property
    def limited_tokens(self) -> int:
        """Return the tokens that count for a limit: those that a server computed."""
        return self.computed_tokens + self.generated_tokens

    def add(self, other: "UsageSums") -> None:
        """Add other totals."""
        self.requests += other.requests
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.computed_tokens += other.computed_tokens
        self.generated_tokens += other.generated_tokens
        self.server_s += other.server_s


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
    """A file of sums. Every method may block, and raises sqlite3.Error."""

    def __init__(self, path: Path) -> None:
        """Open the file; it is made if there is none."""
        self._db = sqlite3.connect(path, check_same_thread=False, timeout=5.0)
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, _FORMAT):
            raise sqlite3.DatabaseError(f"its format {version} is of a newer kvferry")
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(_CREATE)
        self._db.execute(f"PRAGMA user_version={_FORMAT}")
        self._db.commit()

    def add(self, found: dict[Place, UsageSums]) -> None:
        """Add sums to their rows, all or none."""
        with self._db:
            self._db.executemany(_ADD, [(*place, *astuple(sums)) for place, sums in found.items()])

    def rows(self, since: str) -> dict[Place, UsageSums]:
        """Return the rows from a day on."""
        found = self._db.execute("SELECT * FROM usage WHERE day >= ?", (since,))
        return {Place(*row[:3]): UsageSums(*row[3:]) for row in found}

    def forget(self, before: str) -> None:
        """Delete the rows before a day."""
        with self._db:
            self._db.execute("DELETE FROM usage WHERE day < ?", (before,))

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class UsageBook:
    """The sums of this process, and those in the file. For one event loop."""

    def __init__(self, wall_now: Callable[[], float]) -> None:
        """Set up without a file: all is kept in memory."""
        self._wall_now = wall_now
        self._file: UsageFile | None = None
        self._stored: dict[Place, UsageSums] = {}  # in the file, or for good in memory
        self._fresh: dict[Place, UsageSums] = {}  # not yet in the file
        self._writing: dict[Place, UsageSums] = {}
        self._turn = asyncio.Lock()
        self.totals: dict[str, UsageSums] = {}  # of this process, by tenant
        self._today: Counter[str] = Counter()  # tokens computed today, by tenant
        self._minute: Counter[str] = Counter()
        self._of_minute = self._of_day = 0
        self._name_of_day = ""
        self._problem = ""  # why the last write failed

    async def open(self, path: Path) -> None:
        """Keep the sums in a file, and read it. Raises sqlite3.Error."""
        since = self._day(_KEEP_DAYS)

        def read() -> tuple[UsageFile, dict[Place, UsageSums]]:
            file = UsageFile(path)
            file.forget(since)
            return file, file.rows(since)

        self._file, self._stored = await asyncio.to_thread(read)
        self._begin_windows()
        for place, sums in self._stored.items():
            if place.day == self._name_of_day:
                self._today[place.tenant] += sums.limited_tokens

    def over(self, record: RequestRecord) -> None:
        """Add a finished request that reached a backend."""
        tenant = "" if record.caller is None else record.caller.tenant
        told = record.computed_tokens
        computed = _sane(record.least_computed if told is None else told)
        sums = UsageSums(
            requests=1,
            failed=int(record.outcome in (Outcome.BACKEND_ERROR, Outcome.REFUSED)),
            prompt_tokens=_sane(max(record.prompt_tokens or 0, computed)),
            computed_tokens=computed,
            generated_tokens=_sane(record.generated_tokens),
            server_s=record.server_s,
        )
        self._begin_windows()
        place = Place(self._name_of_day, tenant, record.model or record.slot.backend)
        self._fresh.setdefault(place, UsageSums()).add(sums)
        self.totals.setdefault(tenant, UsageSums()).add(sums)
        self._today[tenant] += sums.limited_tokens
        self._minute[tenant] += sums.limited_tokens

    def used(self, tenant: str) -> tuple[int, int]:
        """Return the tokens computed for a tenant in this minute and on this day."""
        self._begin_windows()
        return self._minute[tenant], self._today[tenant]

    def left_s(self) -> tuple[float, float]:
        """Return the seconds until the minute and the day end."""
        now = self._wall_now()
        return 60 - now % 60, 86400 - now % 86400

    def rows(self, days: int) -> list[Json]:
        """Return the rows of the last days, today included, the newest first."""
        since = self._day(days - 1)
        found: dict[Place, UsageSums] = {}
        for part in (self._stored, self._writing, self._fresh):
            for place, sums in part.items():
                if place.day >= since:
                    found.setdefault(place, UsageSums()).add(sums)
        return [_row(place, found[place]) for place in sorted(found, reverse=True)]

    async def run(self) -> None:
        """Write what is new every second, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            await self.save()

    async def save(self) -> None:
        """Write what is new. What cannot be written stays, for the next time."""
        async with self._turn:
            if not self._fresh:
                return
            self._writing, self._fresh = self._fresh, {}
            problem: Exception | None = None
            try:
                if self._file is not None:
                    await asyncio.to_thread(self._file.add, self._writing)
            except Exception as error:  # noqa: BLE001 - nothing of the sums may be lost
                problem = error
            target = self._stored if problem is None else self._fresh
            for place, sums in self._writing.items():
                target.setdefault(place, UsageSums()).add(sums)
            self._writing = {}
            reason = "" if problem is None else str(problem)
            if reason and reason != self._problem:
                log.warning("usage_not_written", reason=reason)
            self._problem = reason

    async def aclose(self) -> None:
        """Write what is new, and close the file."""
        await self.save()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
            self._file = None

    def _begin_windows(self) -> None:
        """Begin to count anew in another minute or on another day, and forget days of long ago."""
        now = self._wall_now()
        minute, day = int(now // 60), int(now // 86400)
        if minute != self._of_minute:
            self._of_minute, self._minute = minute, Counter()
        if day != self._of_day:
            self._of_day, self._today = day, Counter()
            self._name_of_day = self._day()
            oldest = self._day(_KEEP_DAYS)
            self._stored = {one: sums for one, sums in self._stored.items() if one.day >= oldest}

    def _day(self, ago: int = 0) -> str:
        now = datetime.fromtimestamp(self._wall_now(), UTC)
        return (now - timedelta(days=ago)).date().isoformat()


def _sane(tokens: int | None) -> int:
    """Return a count that a file can take, of what a server reported."""
    return min(max(tokens or 0, 0), _MOST_TOKENS)


def _row(place: Place, sums: UsageSums) -> Json:
    named = dict(zip(_COLUMNS, astuple(sums), strict=True))
    named["server_s"] = round(sums.server_s, 3)
    return {**place._asdict(), **named, "cached_tokens": sums.cached_tokens}
