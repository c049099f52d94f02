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

from router.adapters.http1 import Header
from router.adapters.llama_client import RelayedResponse
from router.errors import BackendError, BackendTimeoutError, BadRequestError
from router.types import Outcome
from router.web.answer import HOP_BY_HOP, Answer

# Our own server has already decoded a compressed body.
_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"content-encoding", b"expect"}
# It would make the server go on generating after its client has left (llama-server.md section 5.6).
_RESUMABLE = {b"x-conversation-id"}

_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_WHOLE_BYTES = 1024 * 1024


def forward_headers(request: web.BaseRequest, *, resumable: bool = False) -> list[Header]:
    """The client's headers as the backend gets them; `resumable`: it may make a stream one that
    goes on without it."""
    left_out = _NOT_FORWARDED if resumable else _NOT_FORWARDED | _RESUMABLE
    if "Connection" in request.headers:
        left_out = left_out | {
            name.strip().lower().encode("utf-8", "surrogateescape")
            for value in request.headers.getall("Connection")
            for name in value.split(",")
        }
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
    """Cancels a wait for the backend when it has lasted too long; `since` when it lasts, None: it
    does not wait now. Loop time.

    One timer that looks now and then: one for each event of a stream would cost as much as sending
    it.
    """

    def __init__(self, limit_s: float, timeout: asyncio.Timeout) -> None:
        self._limit_s = limit_s
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self.since: float | None = self._loop.time()
        self.look()

    def look(self) -> None:
        """End the wait, or look again when it could be time to."""
        now = self._loop.time()
        since = now if self.since is None else self.since
        if since + self._limit_s <= now:
            self._timeout.reschedule(now)
        else:
            self.timer = self._loop.call_at(since + self._limit_s, self.look)


@asynccontextmanager
async def _silence(limit_s: float) -> AsyncIterator[_Silence]:
    """Raises TimeoutError inside when the backend has been silent for `limit_s`."""
    async with asyncio.timeout(None) as timeout:
        silence = _Silence(limit_s, timeout)
        try:
            yield silence
        finally:
            silence.timer.cancel()


async def relay(
    request: web.BaseRequest,
    upstream: RelayedResponse,
    headers: Mapping[str, str],
    idle_timeout_s: float,
    capture: Capture,
    on_first_byte: Callable[[], None],
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
        if upstream.is_complete:  # no patience needed
            body = await upstream.read()
            capture.add(body)
            on_first_byte()
            await response.prepare(request)
            request[STARTED] = response
            await response.write_eof(body)
            return response, outcome
        async with _silence(idle_timeout_s) as silence:
            async for chunk in upstream:
                if not response.prepared:
                    on_first_byte()
                    await response.prepare(request)
                    request[STARTED] = response
                capture.add(chunk)
                # The client's slowness is not the backend's silence.
                silence.since = None
                await response.write(chunk)
                silence.since = loop.time()
    except (ConnectionResetError, aiohttp.ClientConnectionResetError):
        return response, Outcome.CLIENT_GONE
    except TimeoutError:
        failed = BackendTimeoutError
    except BackendError:
        failed = BackendError
    if failed is not None:
        if not response.prepared:
            raise failed("the backend broke off before it answered")
        if request.transport is not None:
            request.transport.abort()
        return response, Outcome.BACKEND_ERROR
    await response.write_eof()
    return response, outcome
