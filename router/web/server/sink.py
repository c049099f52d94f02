"""The client's side of a request: nothing was sent yet, a stream begins, or an answer is sent.

llama-server sends the head of a stream when a slot takes its request, and pings while it computes
the prompt. The router does the same while it prepares a slot, and pings in its queue, too. A head
promises nothing but the status: up to the first event another backend can take over, and a later
error is an event of the stream (docs/adr/0026).
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import orjson
from aiohttp import web

from router.base.tasks import spawn
from router.llama.early_events import PING, EarlyEvents
from router.llama.http1 import Header, OnHead
from router.llama.replies import error_of
from router.llama.routes import Shape
from router.llama.wire import ParsedRequest
from router.web.server.error_responses import OWN_HEADERS, origin_of
from router.web.server.relayed_response import AnswerHead, RelayedAnswer
from router.web.server.settings import Settings

# A head waits so long for the first bytes: most streams then begin with one packet.
HEAD_S = 0.2
# Where the client asks for no other interval. llama-server pings after 30 s of silence
# (llama-server.md section 5.6). Chosen: below the shortest idle timeout of a proxy in common use,
# 30 s.
PING_S = 10.0
_SERVER = "llama.cpp"


@dataclass(frozen=True, slots=True)
class OwnHead:
    """A head that the router makes in place of a server's."""

    headers: tuple[Header, ...]
    status: int = 200
    reason: str = "OK"


class Sink:
    """What the client of one request gets. The owner of the request calls `end` at its end.

    Of a request for a stream, pings begin at once; `take` and `fail` stop them, and `resume` begins
    them again.
    """

    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self.answer: web.StreamResponse | None = None  # its head is on the way to the client
        self.events: EarlyEvents | None = None  # of a request for a stream
        self._stream: RelayedAnswer | None = None  # None: its head has not been sent
        self._pending: deque[bytes] = deque()
        self._writes: asyncio.Task[None] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._ping_timer: asyncio.TimerHandle | None = None

    def expect_stream(
        self, parsed: ParsedRequest, own: Mapping[str, str], settings: Settings
    ) -> None:
        """Begin to ping. `own`: the router's headers of a head that comes before any backend."""
        self._settings, self._anthropic = settings, parsed.shape is Shape.MESSAGES
        self.events = EarlyEvents(parsed)
        self._ping_s = PING_S if self.events.ping_s is None else self.events.ping_s
        self._loop = asyncio.get_running_loop()
        self._due: tuple[AnswerHead, Mapping[str, str]] = self._own_head(OWN_HEADERS["Server"]), own
        self.resume()

    def on_head(self, own: Mapping[str, str]) -> OnHead | None:
        """Return the callback that starts the client's stream when the server's head arrives."""
        return None if self.events is None else partial(self._came, own)

    def _came(self, own: Mapping[str, str], head: AnswerHead) -> None:
        if head.status == HTTPStatus.OK and _is_stream(head):
            self.head_due(own, head)

    def head_due(self, own: Mapping[str, str], head: AnswerHead | None = None) -> None:
        """Send a head in a moment, unless the answer begins before. None: one like a server's."""
        if self.events is not None and self._stream is None and self._head_timer is None:
            self._due = head or self._own_head(_SERVER), own
            self._head_timer = self._loop.call_later(HEAD_S, self._begin, *self._due)

    def send(self, events: bytes, own: Mapping[str, str]) -> None:
        """Send events that come before those of the answer."""
        if events:
            self._begin(self._own_head(_SERVER), own)
            self._write(events)
            if self._ping_timer is not None:
                self._ping_timer.cancel()
                self._ping_timer = None
                self.resume()

    async def take(self, head: AnswerHead, own: Mapping[str, str]) -> RelayedAnswer:
        """Return the answer to write to: the stream that has begun, or a new one for `head`.

        Raises ConnectionResetError.
        """
        begun = None if self.events is None else await self._hand_over()
        return RelayedAnswer(head, own) if begun is None else begun

    def resume(self, answer: RelayedAnswer | None = None) -> None:
        """Ping from now on, once per interval.

        `answer`: what `take` returned. No event of it was sent, and another answer may be.
        """
        if self.events is None:
            return
        if answer is not None and answer.prepared:
            self._stream = answer
        if self._ping_s and self._ping_timer is None:
            self._ping_timer = self._loop.call_later(self._ping_s, self._ping)

    async def fail(self, response: web.Response) -> web.StreamResponse:
        """Return an error as the answer; in a stream that has begun, as its last event.

        Raises ConnectionError.
        """
        stream = None if self.events is None else await self._hand_over()
        if stream is None:
            return response
        assert isinstance(response.body, bytes)
        await self.end_with(stream, error_of(response.body, response.status))
        return stream

    async def end_with(self, stream: RelayedAnswer, error: Mapping[str, object]) -> None:
        """End a stream with an error in the dialect of its route. Raises ConnectionError."""
        event = b"event: error\n" if self._anthropic else b""
        told = {"type": "error", "error": error} if self._anthropic else {"error": error}
        await stream.write(event + b"data: " + orjson.dumps(told) + b"\n\n")
        await stream.write_eof()

    @property
    def begun(self) -> web.StreamResponse | None:
        """Return the answer, or the stream without an event, if the client has got something."""
        return self._stream if self.answer is None else self.answer

    def abort(self) -> None:
        """Close the connection at once: a partial answer must not look complete."""
        if self._http.transport is not None:
            self._http.transport.abort()

    def end(self) -> None:
        """Send no more pings, and no head of the router's own. May be called again."""
        for timer in (self._head_timer, self._ping_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._ping_timer = None

    async def _hand_over(self) -> RelayedAnswer | None:
        """Stop, and return the stream if its head was sent. Raises ConnectionResetError."""
        self.end()
        if self._writes is not None:
            try:
                async with asyncio.timeout(self._settings.limits.send_timeout_s):
                    await self._writes
            except TimeoutError:
                raise ConnectionResetError("the client takes nothing") from None
        return self._stream

    def _begin(self, head: AnswerHead, own: Mapping[str, str]) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self._stream is None:
            self._stream = RelayedAnswer(head, own)
            self._write(b"")

    def _ping(self) -> None:
        self._ping_timer = None
        self._begin(*self._due)
        self._write(PING)
        self.resume()

    def _write(self, data: bytes) -> None:
        self._pending.append(data)
        if self._writes is None or self._writes.done():
            self._writes = spawn(self._write_pending(), name="start of a stream")

    async def _write_pending(self) -> None:
        assert self._stream is not None
        try:
            await self._stream.prepare(self._http)
            while self._pending:
                await self._stream.write(self._pending.popleft())
        except ConnectionError:
            self._pending.clear()  # the client is gone: its request is cancelled

    def _own_head(self, server: str) -> OwnHead:
        """Return the head of a stream as `server` would send it."""
        return OwnHead(
            (
                (b"Server", server.encode()),
                (b"Access-Control-Allow-Origin", (origin_of(self._http) or "").encode()),
                (b"X-Accel-Buffering", b"no"),
                (b"Content-Type", b"text/event-stream"),
            )
        )


def _is_stream(head: AnswerHead) -> bool:
    """Return whether pings may follow a head: not in a body of a stated length."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )
