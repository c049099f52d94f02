"""The start of a stream, before the first event of its answer: head, pings, progress.

llama-server sends the head of a stream when a slot takes its request, and pings while it computes
the prompt. The router does the same while it prepares a slot, and pings in its queue, too. A head
promises nothing but the status: up to the first event another backend can take over, and a later
error is an event of the stream (docs/adr/0026).
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web

from router.base.tasks import spawn
from router.llama.early_events import PING, EarlyEvents
from router.llama.http1 import Header
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


class StreamStart:
    """One stream that has not begun. Its owner calls `end` when the request is over.

    Pings begin at once; `hand_over` stops them, and `resume` begins them again.
    """

    def __init__(
        self,
        request: web.BaseRequest,
        parsed: ParsedRequest,
        own: Mapping[str, str],
        settings: Settings,
    ) -> None:
        """Set up a start. `own`: the router's headers of a head that comes before any backend."""
        self._request, self._own, self._settings = request, own, settings
        self._anthropic = parsed.shape is Shape.MESSAGES
        self.events = EarlyEvents(parsed)
        self._ping_s = PING_S if self.events.ping_s is None else self.events.ping_s
        self._loop = asyncio.get_running_loop()
        self._pending: deque[bytes] = deque()
        self._writes: asyncio.Task[None] | None = None
        self._due: tuple[AnswerHead | None, Mapping[str, str]] | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._ping_timer: asyncio.TimerHandle | None = None
        self.stream: RelayedAnswer | None = None  # None: its head has not been sent
        self.resume()

    def head_due(self, head: AnswerHead | None, own: Mapping[str, str]) -> None:
        """Send a head in a moment, unless the answer begins before. None: one like a server's."""
        if self.stream is None and self._head_timer is None:
            self._due = head, own
            self._head_timer = self._loop.call_later(HEAD_S, self._begin, head, own)

    def send(self, events: bytes, own: Mapping[str, str]) -> None:
        """Send events that come before those of the answer."""
        if events:
            self._begin(None, own)
            self._write(events)
            if self._ping_timer is not None:
                self._ping_timer.cancel()
                self._ping_timer = None
                self.resume()

    def resume(self, stream: RelayedAnswer | None = None) -> None:
        """Ping from now on, once per interval; into `stream`, if its head was sent."""
        self.stream = self.stream or stream
        if self._ping_s and self._ping_timer is None:
            self._ping_timer = self._loop.call_later(self._ping_s, self._ping)

    async def hand_over(self) -> RelayedAnswer | None:
        """Stop, and return the stream if its head was sent. Raises ConnectionResetError."""
        self.end()
        if self._writes is not None:
            try:
                async with asyncio.timeout(self._settings.limits.send_timeout_s):
                    await self._writes
            except TimeoutError:
                raise ConnectionResetError("the client takes nothing") from None
        return self.stream

    def end(self) -> None:
        """Begin nothing more. May be called again."""
        for timer in (self._head_timer, self._ping_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._ping_timer = None

    async def fail(self, error: Mapping[str, object]) -> None:
        """End the stream with an error in the dialect of its route. Raises ConnectionError."""
        stream = await self.hand_over()
        assert stream is not None, "else the error has a status"
        event = b"event: error\n" if self._anthropic else b""
        told = {"type": "error", "error": error} if self._anthropic else {"error": error}
        await stream.write(event + b"data: " + orjson.dumps(told) + b"\n\n")
        await stream.write_eof()

    def _begin(self, head: AnswerHead | None, own: Mapping[str, str]) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self.stream is None:
            self.stream = RelayedAnswer(head or _head_like(_SERVER, self._request), own)
            self._write(b"")

    def _ping(self) -> None:
        self._ping_timer = None
        self._begin(*(self._due or (_head_like(OWN_HEADERS["Server"], self._request), self._own)))
        self._write(PING)
        self.resume()

    def _write(self, data: bytes) -> None:
        self._pending.append(data)
        if self._writes is None or self._writes.done():
            self._writes = spawn(self._write_pending(), name="start of a stream")

    async def _write_pending(self) -> None:
        assert self.stream is not None
        try:
            await self.stream.prepare(self._request)
            while self._pending:
                await self.stream.write(self._pending.popleft())
        except ConnectionError:
            self._pending.clear()  # the client is gone: its request is cancelled


def _head_like(server: str, request: web.BaseRequest) -> OwnHead:
    """Return the head of a stream as `server` would send it."""
    return OwnHead(
        (
            (b"Server", server.encode()),
            (b"Access-Control-Allow-Origin", (origin_of(request) or "").encode()),
            (b"X-Accel-Buffering", b"no"),
            (b"Content-Type", b"text/event-stream"),
        )
    )
