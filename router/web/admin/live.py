"""`GET /kvferry/events`: the live page's server-sent events.

The router reads the engine's state once a second while there are viewers, and not otherwise. All
viewers read the same few messages: each gets a full `picture` first and then the changes. A viewer
that is too slow misses messages and gets another full picture, so its backlog is bounded.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson
from aiohttp import web

from router.base.errors import TooManyViewersError
from router.base.ports import Spawn
from router.telemetry.decision_log import LoggedDecision
from router.web.admin.state_json import Picture, Row, changes
from router.web.server.call import Call
from router.web.server.error_responses import OWN_HEADERS, REQUEST_ID

REFRESH_EVERY_S = 1.0
MAX_VIEWERS = 32
DECISIONS = 100  # in a full picture and in a change; the newest
HISTORY = 500  # decisions in a full picture; the older ones only as points of the charts
POINT = ("time", "ttft_s", "source", "prompt_tokens", "computed_tokens")
_KEPT = 10  # messages: a viewer that stalls for less than 10 s needs no full picture
_HEARTBEAT_S = 15.0  # until a comment: no proxy shall close a silent connection
_PATIENCE_S = 30.0  # then a viewer that reads nothing is dropped
_SURVEY_EVERY_S = 5.0
_SURVEYED_PER_S = 2000  # snapshots: N are surveyed at most every N / 2000 s
_RETRY_MS = 2000

_HEADERS = OWN_HEADERS | {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would buffer events
    "X-Content-Type-Options": "nosniff",
}


@dataclass(eq=False)
class Live:
    """The event streams of all viewers. After `stop` all streams end, also new ones."""

    _take_picture: Callable[[], Picture]
    _n_snapshots: Callable[[], int]
    _survey_of: Callable[[], Awaitable[Row]]
    _decisions: Callable[[int], list[LoggedDecision]]  # the last N, newest first
    _spawn: Spawn
    _wall_now: Callable[[], float]
    _may_read: Callable[[web.BaseRequest], bool]

    def __post_init__(self) -> None:
        """Set up without viewers."""
        self._viewers = 0
        self._refreshing = False
        self._stopping = False
        self._picture: Picture = {}
        self._survey: Row = {"sizes": [], "top": []}
        self._survey_due = 0.0
        self._told: dict[int, LoggedDecision] = {}  # the newest decisions, by identity
        self._id = 0  # of the newest message
        self._messages: deque[bytes] = deque(maxlen=_KEPT)
        # The number of a message, and the full picture as of that, with its time.
        self._whole: tuple[int, float, bytes] | None = None
        self._news = asyncio.Event()

    def stop(self) -> None:
        """End all streams: an open page must not delay the stop of the router."""
        self._stopping = True
        self._tell()

    async def events(self, call: Call) -> web.StreamResponse:
        """Send the stream until the viewer disconnects or loses access, or the router stops.

        Raises TooManyViewersError.
        """
        response = web.StreamResponse(headers=_HEADERS | {REQUEST_ID: call.id})
        if call.http.method == "HEAD":
            await response.prepare(call.http)
            return response
        if self._viewers >= MAX_VIEWERS:
            raise TooManyViewersError(f"{MAX_VIEWERS} viewers watch already; try again later")
        self._viewers += 1
        try:
            await response.prepare(call.http)
            await self._show(response, partial(self._may_read, call.http))
        except TimeoutError:
            if call.http.transport is not None:
                call.http.transport.abort()
        finally:
            self._viewers -= 1
        return response

    async def _show(self, response: web.StreamResponse, may_read: Callable[[], bool]) -> None:
        """Send messages to one viewer.

        Raises TimeoutError if the viewer reads nothing, ConnectionError if it disconnected.
        """
        if not self._refreshing:
            self._refresh()
            self._refreshing = True
            self._spawn(self.keep_refreshing(), name="live page")
        seen: int | None = None  # the last message; an earlier stream's Last-Event-ID is no use
        while self._refreshing and not self._stopping and may_read():
            news = self._news
            if seen is None:
                data, seen = b"retry: %d\n\n" % _RETRY_MS + self._whole_picture(), self._id
            elif seen != self._id:
                data, seen = self._since(seen), self._id
            else:
                data = b": \n\n"
            async with asyncio.timeout(_PATIENCE_S):
                await response.write(data)
            if seen == self._id:
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), _HEARTBEAT_S)

    def _since(self, seen: int) -> bytes:
        """Return the messages after `seen`; a full picture if some are no longer kept."""
        missed = self._id - seen
        if missed <= len(self._messages):
            return b"".join(self._messages[i] for i in range(-missed, 0))
        return self._whole_picture()

    def _whole_picture(self) -> bytes:
        """Return the full picture as of the newest message; cached for all new viewers."""
        now = self._wall_now()
        # The picture contains the time: it is stale after 1 s, even without changes.
        if self._whole is None or self._whole[0] != self._id or now - self._whole[1] > 1:
            self._whole = (self._id, now, _message(self._id, "picture", self._in_full()))
        return self._whole[2]

    def _in_full(self) -> dict[str, object]:
        recent = self._decisions(HISTORY)
        # Decisions since the last look will be sent as a change.
        entries = [entry.as_json() for entry in itertools.dropwhile(self._is_new, recent)]
        return {
            "time": self._wall_now(),
            **self._picture,
            "decisions": entries[:DECISIONS],
            "history": [[row[name] for name in POINT] for row in entries[DECISIONS:]],
        }

    async def keep_refreshing(self) -> None:
        """Look once a second until there are no viewers, or the router stops."""
        try:
            while self._viewers and not self._stopping:
                await self._survey_if_due()
                await asyncio.sleep(REFRESH_EVERY_S)
                self._refresh()
        finally:
            self._refreshing = False
            self._tell()  # after a bug: end the streams, since a frozen page looks alive

    async def _survey_if_due(self) -> None:
        """Survey the snapshots if due: the interval grows with their number, as the cost does."""
        now = asyncio.get_running_loop().time()
        if now >= self._survey_due:
            pause_s = max(_SURVEY_EVERY_S, self._n_snapshots() / _SURVEYED_PER_S)
            self._survey_due = now + pause_s
            self._survey = await self._survey_of()

    def _refresh(self) -> None:
        """Read the engine's state, and send what changed, if anything."""
        picture = self._take_picture()
        picture["host"]["snapshots"] = self._survey
        told: dict[str, object] = {**changes(self._picture, picture)}
        if decisions := self._new_decisions():
            told["decisions"] = decisions
        self._picture = picture
        if told:
            self._id += 1
            self._messages.append(_message(self._id, "change", told))
            self._tell()

    def _new_decisions(self) -> list[Row]:
        """Return the new decisions, newest first, at most `DECISIONS`."""
        recent = self._decisions(DECISIONS)
        new = [entry.as_json() for entry in itertools.takewhile(self._is_new, recent)]
        # Keep all, not only the newest: a retry of its request replaces that entry.
        self._told = {id(entry): entry for entry in recent}
        return new

    def _is_new(self, entry: LoggedDecision) -> bool:
        return id(entry) not in self._told

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _message(number: int, event: str, data: dict[str, object]) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, event.encode(), orjson.dumps(data))
