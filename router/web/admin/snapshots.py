"""Snapshots for an operator: list them, show one, purge some.

Answers are bounded in size and hold no text. This module selects the snapshots to purge; the
engine purges them, like everything that changes core state.
"""

import asyncio
import heapq
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Annotated, Any, Self, TypeVar

import structlog
from aiohttp import web
from msgspec import to_builtins
from pydantic import Field, ValidationError

from router.base.errors import BadRequestError, NotFoundError, UnsupportedMediaTypeError
from router.base.tokens import head, unpack
from router.base.types import Snapshot, SnapshotId, Tenant
from router.config import values as values
from router.config.loader import ConfigSection, path_text, problems_of
from router.core.model.tenancy import is_of, tenant_of
from router.engine.engine import Engine
from router.llama.wire import parse_body
from router.store.files import final_name, manifest_name
from router.web.admin.guard import Guard
from router.web.admin.state_json import snapshot_row
from router.web.fleet.purging import Purging, Reached, is_tenant, new_note
from router.web.server.call import Call
from router.web.server.error_responses import json_response
from router.web.server.inbound import Bodies

log = structlog.get_logger(__name__)

PATH = "/kvferry/snapshots"
MOST_AT_ONCE = 1000
# Enough to recognize a template or a system prompt, but not what a user wrote.
_SHOWN_IDS = 8
_BATCH = 250  # about a millisecond
# The shortest prefix of an id that names a snapshot, if it is unique.
_LEAST_OF_AN_ID = 6


class Filter(ConfigSection):
    """A selection of snapshots; all given conditions must hold.

    `tenant`: all namespaces of this one, those of prompts with a `cache_salt` too.
    """

    tenant: values.Text = ""
    older_than_s: values.PositiveSeconds | None = Field(default=None, alias="older_than")
    id: tuple[values.Text, ...] = Field(default=(), strict=False)

    @property
    def takes_all(self) -> bool:
        """Return True if no condition excludes any: each is missing, null or empty."""
        return not (self.tenant or self.older_than_s or self.id)


class Listing(Filter):
    """A list of the newest."""

    limit: Annotated[int, Field(ge=1, le=MOST_AT_ONCE)] = 100


class Purge(Filter):
    """A purge. `all` is required if there is no condition.

    `everywhere`: also on the other hosts, and all in the cold tier. Needs `tenant` alone.
    """

    all: bool = False
    everywhere: bool = False
    dry_run: bool = False


_F = TypeVar("_F", bound=ConfigSection)


@dataclass(frozen=True, slots=True)
class Item:
    """A snapshot now. `uses` counts the save too; `idle_s` is since the last restore, or None."""

    snapshot: Snapshot
    uses: int
    in_use: int
    age_s: float
    idle_s: float | None

    def fits(self, wanted: Filter, ids: frozenset[SnapshotId]) -> bool:
        """Return True if all conditions hold. `ids` are those of the filter, in full."""
        snapshot = self.snapshot
        return (
            (not ids or snapshot.id in ids)
            and (not wanted.tenant or is_of(tenant_of(snapshot.namespace), wanted.tenant))
            and (wanted.older_than_s is None or self.age_s > wanted.older_than_s)
        )

    def row(self) -> dict[str, object]:
        """Return the snapshot as JSON."""
        snapshot = self.snapshot
        return snapshot_row(snapshot, self.uses, self.in_use) | {
            "media": snapshot.shape.media,
            "age_s": round(self.age_s, 1),
            "idle_s": None if self.idle_s is None else round(self.idle_s, 1),
            "kv_dir": snapshot.kv_dir,
            "file": final_name(snapshot.id) if snapshot.whole else manifest_name(snapshot.id),
        }


@dataclass(slots=True)
class Sums:
    """Totals of some snapshots; `in_use` is the number of those in use."""

    count: int = 0
    tokens: int = 0
    size_bytes: int = 0
    in_use: int = 0

    def add(self, items: Sequence[Item]) -> Self:
        """Add these to the totals. Returns self."""
        self.count += len(items)
        self.tokens += sum(len(item.snapshot) for item in items)
        self.size_bytes += sum(item.snapshot.size_bytes for item in items)
        self.in_use += sum(item.in_use > 0 for item in items)
        return self


@dataclass(slots=True, eq=False)
class Snapshots:
    """The routes under PATH. `now` is the engine's clock, `wall_now` seconds since the epoch."""

    _engine: Engine
    _guard: Guard
    _now: Callable[[], float]
    _wall_now: Callable[[], float]
    _purging: Purging
    _bodies: Bodies

    async def all(self, call: Call) -> web.Response:
        """List the newest snapshots that match, with the totals of all that do."""
        query = _parsed(Listing, _of_query(call.http.query))
        sums, newest = Sums(), list[Item]()
        async for found in self._fitting(query):
            sums.add(found)
            newest = heapq.nsmallest(query.limit, newest + found, key=_rank)
        return json_response(asdict(sums) | {"snapshots": [item.row() for item in newest]})

    async def one(self, call: Call) -> web.Response:
        """Show (GET) or purge (DELETE) one snapshot. Raises NotFoundError, ForbiddenError."""
        (wanted,) = self._named([call.named])
        item = next(item for item in self._items() if item.snapshot.id == wanted)
        if call.http.method == "DELETE":
            self._guard.check(call.http)
            sums = asdict(Sums().add([item]))
            log.info("purged", by=call.http.remote, **sums)
            await self._engine.purge([wanted])
            reached = await self._purging.in_cold([item.snapshot])
            return json_response(sums | {"elsewhere": to_builtins(reached)})
        prefix = unpack(head(item.snapshot.tokens, _SHOWN_IDS))
        return json_response(item.row() | {"prefix_ids": prefix})

    async def purge(self, call: Call) -> web.Response:
        """Purge all snapshots that match the body; those in use go after their last use.

        Their copies in the cold tier go too. Raises ForbiddenError, BadRequestError,
        UnsupportedMediaTypeError. The content type must be JSON, which no HTML form can send.
        """
        wanted = _parsed(Purge, await self._body(call))
        if wanted.all != wanted.takes_all:
            raise BadRequestError("give at least one filter, or `all` and no filter")
        is_of_one_tenant = wanted.tenant and not (wanted.older_than_s or wanted.id)
        if wanted.everywhere and not is_of_one_tenant:
            raise BadRequestError("everywhere: needs `tenant`, and no other filter")
        if wanted.everywhere and not is_tenant(wanted.tenant):
            raise BadRequestError("tenant: give the name of a tenant, without a salt")
        sums, doomed = Sums(), list[Snapshot]()
        async for found in self._fitting(wanted):
            sums.add(found)
            doomed += [item.snapshot for item in found]
        reached, note = list[Reached](), new_note(everywhere=wanted.everywhere)
        if not wanted.dry_run:
            log.info("purged", by=call.http.remote, **asdict(sums))
            if is_of_one_tenant:
                here = await self._purging.here(Tenant(wanted.tenant), note)
                reached += [here] if here.problem else []
            else:
                await self._engine.purge([one.id for one in doomed])
            if wanted.everywhere:
                reached += await self._purging.elsewhere(Tenant(wanted.tenant), note)
            else:
                reached += await self._purging.in_cold(doomed)
        return json_response(
            asdict(sums) | {"dry_run": wanted.dry_run, "elsewhere": to_builtins(reached)}
        )

    async def _body(self, call: Call) -> dict[str, Any]:
        """Return the JSON of a call that changes something."""
        self._guard.check(call.http)
        if call.http.content_type != "application/json":
            raise UnsupportedMediaTypeError("the body must be application/json")
        call.is_trusted = True
        await self._bodies.read(call)
        return parse_body(call.raw)

    def _items(self) -> Iterator[Item]:
        catalog = self._engine.state.inventory.catalog
        now, wall_now = self._now(), self._wall_now()
        for snapshot, uses, references in catalog.snapshots():
            used_at = catalog.used_at(snapshot.id)
            age_s = max(wall_now - snapshot.saved_at, 0.0)  # the wall clock may have been set back
            idle_s = None if used_at is None else now - used_at
            yield Item(snapshot, uses, references, age_s, idle_s)

    async def _fitting(self, wanted: Filter) -> AsyncIterator[list[Item]]:
        """Yield the matching snapshots in batches; other tasks run between two batches."""
        ids = frozenset(self._named(wanted.id))
        items = self._items()
        while batch := list(islice(items, _BATCH)):
            yield [item for item in batch if item.fits(wanted, ids)]
            await asyncio.sleep(0)

    def _named(self, numbers: Sequence[str]) -> list[SnapshotId]:
        """Return the snapshot ids given in full or as unique prefixes. Raises NotFoundError."""
        catalog = self._engine.state.inventory.catalog
        known = sorted(s.id for s, _, _ in catalog.snapshots()) if numbers else []
        named = []
        for number in numbers:
            if len(number) < _LEAST_OF_AN_ID:
                raise NotFoundError(f"give at least {_LEAST_OF_AN_ID} digits of an id")
            at = bisect_left(known, number)
            found = [one for one in known[at : at + 2] if one.startswith(number)]
            if not found:
                raise NotFoundError(f"there is no snapshot {number!r}")
            if len(found) > 1 and found[0] != number:
                raise NotFoundError(f"more than one snapshot begins with {number!r}")
            named.append(found[0])
        return named


def _of_query(query: Mapping[str, str]) -> dict[str, object]:
    """Return a query string as JSON values."""
    made: dict[str, object] = dict(query)
    if "id" in query:
        made["id"] = query["id"].split(",")
    if query.get("limit", "").isdecimal():
        made["limit"] = int(query["limit"][:20])
    return made


def _parsed(kind: type[_F], value: dict[str, Any]) -> _F:
    """Validate a query or body. Raises BadRequestError with every problem."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        problems = problems_of(error, kind, {})
    raise BadRequestError("; ".join(f"{path_text(path)}: {text}" for path, text in problems))


def _rank(item: Item) -> tuple[float, str]:
    return -item.snapshot.saved_at, item.snapshot.id
