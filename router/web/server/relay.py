"""Relay bytes from a backend to a client: one coroutine, no buffer in between, one end.

Knows nothing of slots or prompts. Back-pressure of the client reaches the backend because the
next chunk is read only after the last one was written.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter

import aiohttp
from aiohttp import web

from router.base.errors import BackendError, BackendTimeoutError
from router.base.types import Outcome
from router.engine.loop_throttle import LoopThrottle
from router.llama import json_offload
from router.llama.answer_counts import AnswerCounts
from router.llama.early_events import PING
from router.llama.http1 import Response
from router.llama.replies import error_of
from router.web.server.call import Call
from router.web.server.relayed_response import RelayedAnswer
from router.web.server.settings import Settings

# Bytes of a complete answer, and of answers before it that are not yet sent: up to this number the
# router does not wait for the client.
_SENT_AT_ONCE = 64 * 1024
# A stream up to this size is parsed in place, at about 1 µs for 100 bytes. Of a longer stream the
# two ends are parsed in place, the rest in a thread. A plain answer is one JSON object, of which
# an end says nothing: it is parsed whole, in 4 ms at most.
INLINE_BYTES = 32 * 1024
_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_WHOLE_BYTES = 1024 * 1024


class Capture:
    """The bytes of a response, to be read at its end: all, or the two ends of a huge one."""

    def __init__(self) -> None:
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.size_bytes = 0
        self.complete = True

    def add(self, chunk: bytes) -> None:
        """Keep a chunk, by reference."""
        self.size_bytes += len(chunk)
        if self.size_bytes <= _WHOLE_BYTES:
            self._head.append(chunk)
            return
        if self.complete:
            self.complete = False
            whole = b"".join(self._head)
            self._head = [whole[:_HEAD_BYTES]]
        self._tail.append(chunk)
        self._tail_bytes += len(chunk)
        while self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    @property
    def chunks(self) -> list[bytes]:
        """Return the bytes in order; with a gap in the middle unless `complete`."""
        return [*self._head, *self._tail]

    def ends(self, limit: int) -> list[bytes]:
        """Return the first and the last `limit` bytes, with an empty line between."""
        whole = b"".join(self.chunks)
        return [whole[:limit], b"\n\n", whole[-limit:]]


class _Silence:
    """The idle timeouts of a relay: cancel a wait that has lasted too long.

    The wait is for a backend that sends nothing (`since`: from when, in loop time), or for a client
    that takes nothing (`since` is None). The timers check only now and then: a timer for each event
    of a stream would cost as much as to send it. A client is idle if nothing has changed between
    two checks.
    """

    def __init__(
        self, settings: Settings, timeout: asyncio.Timeout, taken: Callable[[], object]
    ) -> None:
        limits = settings.limits
        self._idle_s, self._send_s = limits.idle_timeout_s, limits.send_timeout_s
        self._timeout = timeout
        self._taken = taken
        self._seen: object = None
        self._loop = asyncio.get_running_loop()
        self.since: float | None = self._loop.time()
        self.check_idle()
        self.client_timer = self._loop.call_later(self._send_s, self.check_client)

    def check_idle(self) -> None:
        """End the wait for a backend, or check again at its earliest timeout."""
        now = self._loop.time()
        since = now if self.since is None else self.since
        if since + self._idle_s <= now:
            self._timeout.reschedule(now)
        else:
            self.timer = self._loop.call_at(since + self._idle_s, self.check_idle)

    def check_client(self) -> None:
        """End the wait for a client, or check again later."""
        seen = self._taken() if self.since is None else None
        if seen is not None and seen == self._seen:
            self._timeout.reschedule(self._loop.time())
        else:
            self._seen = seen
            self.client_timer = self._loop.call_later(self._send_s, self.check_client)


@asynccontextmanager
async def _silence(
    request: web.BaseRequest, settings: Settings, capture: Capture
) -> AsyncIterator[_Silence]:
    """Limit the silence of both sides.

    Raises TimeoutError if the backend was silent for too long, ConnectionResetError if the client.
    """

    def taken() -> object:
        """Return a value that differs once the client has taken something."""
        transport = request.transport
        return capture.size_bytes, transport.get_write_buffer_size() if transport else None

    silence: _Silence | None = None
    try:
        async with asyncio.timeout(None) as timeout:
            silence = _Silence(settings, timeout, taken)
            try:
                yield silence
            finally:
                silence.timer.cancel()
                silence.client_timer.cancel()
    except TimeoutError:
        if silence is None or silence.since is not None:
            raise
        raise ConnectionResetError("the client takes nothing") from None


async def relay(
    call: Call,
    upstream: Response,
    headers: Mapping[str, str],
    settings: Settings,
    throttle: LoopThrottle,
    capture: Capture | None = None,
    counts: AnswerCounts | None = None,
    on_begun: Callable[[], object] = lambda: None,
) -> tuple[web.StreamResponse, Outcome]:
    """Copy a response until one side stops; the client gets it with `counts` corrected.

    Raises BackendError if the backend fails before an event or another byte of its answer was sent,
    so that another can be tried. A later failure aborts the client's connection: a partial answer
    must not look complete.
    """
    sink = call.sink
    try:
        response = await sink.take(upstream, headers)
    except ConnectionResetError:
        sink.abort()
        assert sink.begun is not None
        return sink.begun, Outcome.CLIENT_GONE
    kept = capture or Capture()
    passage = _Passage(call, upstream, response, settings, throttle, kept, counts, on_begun)
    try:
        outcome = await passage.copy()
    except (ConnectionResetError, aiohttp.ClientConnectionResetError):
        sink.abort()  # the client may be connected and take nothing
        return response, Outcome.CLIENT_GONE
    except (TimeoutError, BackendError) as error:
        failed = BackendTimeoutError if isinstance(error, TimeoutError) else BackendError
    else:
        return response, outcome
    if passage.begun:
        sink.abort()
        return response, Outcome.BACKEND_ERROR
    sink.resume(response)
    raise failed("the backend failed before it answered")


@dataclass(slots=True)
class _Passage:
    """One answer on its way. `begun`: an event of it, or another byte that counts, was sent."""

    call: Call
    upstream: Response
    response: RelayedAnswer
    settings: Settings
    throttle: LoopThrottle
    capture: Capture
    counts: AnswerCounts | None
    on_begun: Callable[[], object]
    begun: bool = False

    async def copy(self) -> Outcome:
        """Copy the answer to its end. Raises TimeoutError, BackendError, ConnectionResetError."""
        upstream = self.upstream
        if self.response.prepared and upstream.status != HTTPStatus.OK:
            await self._as_event()
            return Outcome.REFUSED
        if self.counts is not None and upstream.header("content-length") is not None:
            # The server sends a plain answer when it is whole: to wait for its end costs nothing.
            async with _silence(self.call.http, self.settings, self.capture):
                await upstream.read()
        if upstream.is_complete and not self.response.prepared:
            await self._at_once()
        else:
            await self._as_it_comes()
        return Outcome.OK if upstream.status < 400 else Outcome.REFUSED

    async def _at_once(self) -> None:
        """Send an answer that is whole: only the client may have to be awaited."""
        body, response = await self.upstream.read(), self.response
        await self.throttle.pass_by()
        self.capture.add(body)
        if self.counts is not None:
            body = await json_offload.read(body, self.counts.whole, body)
            response.set_length(len(body))
        await self._begin()
        if len(body) + _unsent_bytes(self.call.http) <= _SENT_AT_ONCE:
            await response.write_eof(body)
            return
        async with _silence(self.call.http, self.settings, self.capture) as silence:
            silence.since = None
            await response.write_eof(body)
            await self.call.http.writer.drain()

    async def _as_it_comes(self) -> None:
        loop, response = asyncio.get_running_loop(), self.response
        counts, events = self.counts, self.call.sink.events
        async with _silence(self.call.http, self.settings, self.capture) as silence:
            async for chunk in self.upstream:
                # A wait at the loop throttle or for a slow client is not the backend's silence.
                silence.since = None
                await self.throttle.pass_by()
                if not self.begun:
                    if events is None or chunk.replace(PING, b""):
                        await self._begin()
                    else:
                        await response.prepare(self.call.http)
                self.capture.add(chunk)
                right = chunk if counts is None else counts.part(chunk)
                await response.write(right if events is None else events.part(right))
                silence.since = loop.time()
            silence.since = None
            await self.throttle.pass_by()
            rest = b"" if counts is None else counts.rest()
            await response.write_eof(rest if events is None else events.whole(rest))
            await self.call.http.writer.drain()

    async def _begin(self) -> None:
        self.begun = True
        self.call.first_byte = perf_counter()
        self.call.let_go()
        self.on_begun()
        await self.response.prepare(self.call.http)
        self.call.sink.answer = self.response

    async def _as_event(self) -> None:
        """Send an error into a stream that has begun."""
        async with _silence(self.call.http, self.settings, self.capture) as silence:
            body = await self.upstream.read()
            silence.since = None
            await self.call.sink.end_with(self.response, error_of(body, self.upstream.status))


def _unsent_bytes(request: web.BaseRequest) -> int:
    return 0 if request.transport is None else request.transport.get_write_buffer_size()
