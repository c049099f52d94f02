"""Bytes from a backend to a client: one coroutine, nothing in between, one end.

Knows nothing of slots or prompts. Back-pressure of the client reaches the backend because the
next chunk is read only after the last one was written.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from router.base.errors import BackendError, BackendTimeoutError, BadRequestError
from router.base.types import Caller, Outcome
from router.engine.loop_throttle import Turnstile
from router.llama.client import RelayedResponse
from router.llama.http1 import Header
from router.web.server.relayed_response import HOP_BY_HOP, Answer, named_in_connection
from router.web.server.settings import Settings

# Our own server has already decoded a compressed body.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"content-encoding", b"expect"}
# It would make the server go on generating after its client has left (llama-server.md section 5.6).
_RESUMABLE = {b"x-conversation-id"}

_KEYS = frozenset({b"authorization", b"x-api-key"})

# There are keys, so what a request carries as one is ours; and whose it is, if it needed any.
KEYED = web.RequestKey("keyed", bool)
CALLER = web.RequestKey("caller", Caller)

# Of an answer that has come as a whole, and those before it that the client has not taken yet;
# nobody waits for the client then.
_SENT_AT_ONCE = 64 * 1024
_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_WHOLE_BYTES = 1024 * 1024


def forward_headers(request: web.BaseRequest, *, resumable: bool = False) -> list[Header]:
    """The client's headers as the backend gets them. Where clients have keys, those are ours.
    `resumable`: the client may make a stream one that goes on without it."""
    left_out = _NOT_FORWARDED if resumable else _NOT_FORWARDED | _RESUMABLE
    if KEYED in request:
        left_out = left_out | _KEYS
    if "Connection" in request.headers:
        left_out = left_out | named_in_connection(request.raw_headers)
    return [header for header in request.raw_headers if header[0].lower() not in left_out]


def forward_target(request: web.BaseRequest) -> str:
    """Path and query as the backend gets them: as they came. Raises BadRequestError.

    A target may also be a whole URL, as for a forward proxy; the host in it is not ours to visit.
    """
    raw = request.raw_path
    if not raw.startswith("/"):
        raw = request.rel_url.raw_path_qs
    if not raw.startswith("/"):
        raise BadRequestError("the request target is not a path")
    return raw


# The response of a request, once its head is on its way to the client.
STARTED = web.RequestKey("started", web.StreamResponse)


class Capture:
    """What went by, to be read when it is over: all of it, or the two ends of something huge."""

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
        """The bytes in order; with a gap in the middle unless `complete`."""
        return [*self._head, *self._tail]

    def ends(self, limit: int) -> list[bytes]:
        """The first and the last `limit` bytes."""
        whole = b"".join(self.chunks)
        return [whole[:limit], b"\n\n", whole[-limit:]]


class _Silence:
    """Cancels a wait that has lasted too long: for a backend that sends nothing (`since` when, in
    loop time), or for a client that takes nothing (`since` is None).

    Timers that look now and then: one for each event of a stream would cost as much as sending it.
    Of a client it is seen that nothing has changed from one look to the next.
    """

    def __init__(
        self, settings: Settings, timeout: asyncio.Timeout, taken: Callable[[], object]
    ) -> None:
        self._idle_s, self._send_s = settings.idle_timeout_s, settings.send_timeout_s
        self._timeout = timeout
        self._taken = taken
        self._seen: object = None
        self._loop = asyncio.get_running_loop()
        self.since: float | None = self._loop.time()
        self.look()
        self.client_timer = self._loop.call_later(self._send_s, self.look_at_client)

    def look(self) -> None:
        """End the wait for a backend, or look again when it could be time to."""
        now = self._loop.time()
        since = now if self.since is None else self.since
        if since + self._idle_s <= now:
            self._timeout.reschedule(now)
        else:
            self.timer = self._loop.call_at(since + self._idle_s, self.look)

    def look_at_client(self) -> None:
        """End the wait for a client, or look again."""
        seen = self._taken() if self.since is None else None
        if seen is not None and seen == self._seen:
            self._timeout.reschedule(self._loop.time())
        else:
            self._seen = seen
            self.client_timer = self._loop.call_later(self._send_s, self.look_at_client)


@asynccontextmanager
async def _silence(
    request: web.BaseRequest, settings: Settings, capture: Capture
) -> AsyncIterator[_Silence]:
    """Raises TimeoutError inside when the backend has been silent for too long, and
    ConnectionResetError when the client has."""

    def taken() -> object:
        """Another value if the client has taken something."""
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
    request: web.BaseRequest,
    upstream: RelayedResponse,
    headers: Mapping[str, str],
    settings: Settings,
    capture: Capture,
    on_first_byte: Callable[[], None],
    turnstile: Turnstile,
) -> tuple[web.StreamResponse, Outcome]:
    """Copy a response until one side stops.

    Raises BackendError if the backend fails before anything was sent, so that another can be
    tried. Afterwards a failure aborts the client's connection: it must not look like an end.
    """
    response = Answer(upstream, headers)
    outcome = Outcome.OK if upstream.status < 400 else Outcome.REFUSED
    loop = asyncio.get_running_loop()
    failed: type[BackendError] | None = None
    try:
        if upstream.is_complete:  # nothing to wait for but the client, if it is much
            body = await upstream.read()
            await turnstile.pass_by()
            capture.add(body)
            on_first_byte()
            await response.prepare(request)
            request[STARTED] = response
            if len(body) + _unsent_bytes(request) <= _SENT_AT_ONCE:
                await response.write_eof(body)
                return response, outcome
            async with _silence(request, settings, capture) as silence:
                silence.since = None
                await response.write_eof(body)
                await request.writer.drain()
            return response, outcome
        async with _silence(request, settings, capture) as silence:
            async for chunk in upstream:
                # Neither a turn that is waited for nor the client's slowness is the backend's
                # silence.
                silence.since = None
                await turnstile.pass_by()
                if not response.prepared:
                    on_first_byte()
                    await response.prepare(request)
                    request[STARTED] = response
                capture.add(chunk)
                await response.write(chunk)
                silence.since = loop.time()
            silence.since = None
            await turnstile.pass_by()
            await response.write_eof()
            await request.writer.drain()
    except (ConnectionResetError, aiohttp.ClientConnectionResetError):
        _abort(request)  # it may be there, and take nothing
        return response, Outcome.CLIENT_GONE
    except TimeoutError:
        failed = BackendTimeoutError
    except BackendError:
        failed = BackendError
    if failed is not None:
        if not response.prepared:
            raise failed("the backend broke off before it answered")
        _abort(request)
        return response, Outcome.BACKEND_ERROR
    return response, outcome


def _unsent_bytes(request: web.BaseRequest) -> int:
    return 0 if request.transport is None else request.transport.get_write_buffer_size()


def _abort(request: web.BaseRequest) -> None:
    if request.transport is not None:
        request.transport.abort()
