"""Bytes from a backend to a client: one coroutine, nothing in between, one end.

Knows nothing of slots or prompts. Back-pressure of the client reaches the backend because the
next chunk is read only after the last one was written.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from router.adapters.llama_client import RelayedResponse
from router.errors import BackendError, BackendTimeoutError, BadRequestError
from router.types import Outcome

# Of a hop, not of the message (RFC 9110 section 7.6.1), or set anew for the next hop.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# `x-conversation-id` would make the server go on generating after its client has left
# (llama-server.md section 5.6); our own server has already decoded a compressed body.
_NOT_FORWARDED = _HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "expect",
    "x-conversation-id",
}

_HEAD_BYTES = 64 * 1024
_TAIL_BYTES = 64 * 1024
_WHOLE_BYTES = 1024 * 1024


def forward_headers(request: web.Request) -> CIMultiDict[str]:
    """The client's headers as the backend gets them."""
    named = {
        name.strip().lower()
        for value in request.headers.getall("Connection", [])
        for name in value.split(",")
    }
    return CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if name.lower() not in _NOT_FORWARDED and name.lower() not in named
    )


def forward_target(request: web.Request) -> str:
    """Path and query as the backend gets them: as they came. Raises BadRequestError.

    A target may also be a whole URL, as for a forward proxy; the host in it is not ours to visit.
    """
    raw = request.raw_path
    if not raw.startswith("/"):
        raw = request.rel_url.raw_path_qs
    if not raw.startswith("/"):
        raise BadRequestError("the request target is not a path")
    return raw


class _Relayed(web.StreamResponse):
    """Headers go out with the first bytes, in one packet: one packet less for the client to wake
    up for, 0.15 ms of a short answer. aiohttp does so for `web.Response`; if it forgets this
    attribute, nothing is lost but that.
    """

    _send_headers_immediately = False


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


async def relay(
    request: web.Request,
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
    response = _Relayed(status=upstream.status, reason=upstream.reason)
    for name, value in upstream.headers.items():
        if name.lower() not in _HOP_BY_HOP:
            response.headers.add(name, value)
    response.headers.update(headers)
    loop = asyncio.get_running_loop()
    failed: type[BackendError] | None = None
    try:
        async with asyncio.timeout(idle_timeout_s) as patience:
            async for chunk in upstream:
                if not response.prepared:
                    on_first_byte()
                    await response.prepare(request)
                capture.add(chunk)
                # The client's slowness is not the backend's silence.
                patience.reschedule(None)
                await response.write(chunk)
                patience.reschedule(loop.time() + idle_timeout_s)
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
    if not response.prepared:  # no body at all
        on_first_byte()
        await response.prepare(request)
    await response.write_eof()
    return response, Outcome.OK if upstream.status < 400 else Outcome.REFUSED
