"""Listen at an address: limit its connections, and the time for the head of a request.

aiohttp reads the requests. This module counts connections, sets aiohttp's limits, and answers bytes
that are no request with errors in the router's own shape. Knows no routes.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import cast

import structlog
from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from router.base.errors import (
    ClientTooSlowError,
    FramingError,
    HeaderTooLargeError,
    RouterError,
    TargetTooLongError,
    TooManyConnectionsError,
)
from router.base.types import RequestId
from router.engine.loop_throttle import LoopThrottle
from router.web.server.error_responses import error_response, request_id
from router.web.server.settings import Settings

log = structlog.get_logger(__name__)

NO_LIMIT = -1

_NEW_LINE, _END = b"\r\n", b"\r\n\r\n"

OnRefused = Callable[[RequestId, RouterError], None]


class Listener(web.Server):
    """The factory of a protocol for each connection to one address; needs a running loop.

    `settings` may change: a change counts for later connections.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        settings: Settings,
        on_refused: OnRefused,
        throttle: LoopThrottle,
        *,
        for_peers: bool = False,
    ) -> None:
        """Set up the factory; `on_refused` gets errors of input that never reached `handler`.

        `for_peers`: a host has the connections of many clients, so it is not limited as one.
        """
        self._for_peers = for_peers
        # Without cancellation a request abandoned during a long prefill keeps its slot.
        super().__init__(handler, handler_cancellation=True)
        self.settings = settings
        self.on_refused = on_refused
        self.throttle = throttle
        self._open: Counter[str] = Counter()
        self._n_open = 0

    def __call__(self) -> web.RequestHandler:
        limits = self.settings.limits
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            access_log=None,
            auto_decompress=False,  # else a body that is refused is decoded here, unlimited
            max_line_size=limits.max_request_line_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
            keepalive_timeout=limits.keep_alive_timeout_s,
        )

    def admit(self, client: str) -> None:
        """Count a connection of `client` until `leave`. Raises TooManyConnectionsError."""
        limits = self.settings.limits
        whole, each = limits.connections, limits.connections_per_client
        if whole != NO_LIMIT and self._n_open >= whole:
            raise TooManyConnectionsError(f"{whole} connections are open (limits.connections)")
        # Who connects to a Unix socket has no address.
        one = client and not self._for_peers
        if each != NO_LIMIT and one and self._open[client] >= each:
            raise TooManyConnectionsError(
                f"{each} connections of this address are open (limits.connections_per_client)"
            )
        self._n_open += 1
        self._open[client] += 1

    def leave(self, client: str) -> None:
        """Stop counting a connection that was admitted and is closed."""
        self._n_open -= 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


class _Connection(web.RequestHandler):
    """One connection of a client.

    The head of a request may take `limits.header_timeout`: from its first byte, or from the end of
    the previous answer if the head began before that. The time that the loop throttle holds the
    connection does not count. Before the head the connection is idle; aiohttp applies
    `limits.keep_alive_timeout` then.
    """

    __slots__ = (
        "_answered",
        "_begun",
        "_body",
        "_body_remaining",
        "_client",
        "_head_remaining_s",
        "_head_timer",
        "_held",
        "_listener",
    )

    def __init__(self, listener: Listener, **options: object) -> None:
        super().__init__(listener, **options)  # type: ignore[arg-type]
        self._listener = listener
        self._client: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_remaining_s: float | None = None  # of a head that had begun before it was held
        self._held = False  # by the loop throttle; nothing more is read meanwhile
        self._answered = 0  # of `_request_count`
        self._begun = False  # a head: its end has not come
        self._body: StreamReader = EMPTY_PAYLOAD  # of the last request
        self._body_remaining = 0  # bytes of it that have not come, at most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        client = client_of(transport.get_extra_info("peername"))
        try:
            self._listener.admit(client)
        except TooManyConnectionsError as error:
            self.transport = cast(asyncio.Transport, transport)
            self._refuse(error)
            return
        self._client = client
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_is_in()
        if self._client is not None:
            self._listener.leave(self._client)
            self._client = None
        super().connection_lost(exc)
        self._body = EMPTY_PAYLOAD  # the old one refers to this connection

    def data_received(self, data: bytes) -> None:
        if not data or self._messages or self._current_request is not None:
            self._receive(data)  # more of a request that has begun
            return
        if not self._listener.throttle.call(partial(self._begin, data)):
            self._held = True
            self._stop_head_timer()  # it goes on with the time that is left
            self._pause_transport_reading()

    def _process_keepalive(self) -> None:
        """Close a long idle connection (for aiohttp), unless the loop throttle holds it."""
        if self._held:
            timeout_s = self._listener.settings.limits.keep_alive_timeout_s
            self._keepalive_handle = self._loop.call_later(timeout_s, self._process_keepalive)
        else:
            super()._process_keepalive()

    def _begin(self, data: bytes) -> None:
        if self.transport is None:  # lost while the loop throttle held it
            return
        if self._held:
            self._held = False
            self._resume_transport_reading()
        self._receive(data)

    def _receive(self, data: bytes) -> None:
        before = self._request_count
        super().data_received(data)
        if self._request_count != before:
            self._head_is_in()
        self._follow(data, self._request_count - before)
        self._wait_for_head()

    def _follow(self, data: bytes, n_new: int) -> None:
        """Track whether a head has begun, which aiohttp's parser does not report.

        The search begins behind the last request that the parser found. A head is missed behind
        a body that is chunked and came in parts, or that came together with other requests. The
        connection then counts as idle until more of the head comes.
        """
        behind = data[self._body_remaining :]
        remaining = self._body_remaining - len(data)
        if n_new:
            message, self._body = self._messages[-1]
            if getattr(message, "upgrade", False) and n_new == 1 and not self._upgraded:
                # aiohttp drops what came behind such a request (h2c) in its packet. The connection
                # ends with the answer, and a client sends the next request anew.
                head, _, rest = data.lstrip(_NEW_LINE).partition(_END)
                if rest[_length(message) :] and b"chunked" not in head.lower():
                    self.close()
            remaining = sys.maxsize
            if length := _length(message):
                behind = behind.lstrip(_NEW_LINE).partition(_END)[2] if n_new == 1 else b""
                remaining = length - len(behind)
                behind = behind[length:]
        if self._upgraded or not self._body.is_eof():
            self._begun, self._body_remaining = False, 0 if self._upgraded else max(remaining, 0)
            return
        # A whole head would be a request; empty lines before a head do not count.
        begins = bool(behind.rpartition(_END)[2].lstrip(_NEW_LINE))
        self._begun, self._body_remaining = begins or (self._begun and not n_new), 0

    def _wait_for_head(self) -> None:
        """Start the timer for the rest of a head, if no request is unanswered."""
        idle = self._answered == self._request_count and not self._held
        if idle and self._begun and self._head_timer is None:
            limit_s = self._listener.settings.limits.header_timeout_s
            remaining_s = limit_s if self._head_remaining_s is None else self._head_remaining_s
            self._head_timer = self._loop.call_later(remaining_s, self._head_timed_out, limit_s)

    def _head_is_in(self) -> None:
        self._stop_head_timer()
        self._head_remaining_s = None

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_remaining_s = max(self._head_timer.when() - self._loop.time(), 0.0)
            self._head_timer.cancel()
            self._head_timer = None

    def _head_timed_out(self, limit_s: float) -> None:
        self._head_timer = None
        if self._waiter is None:  # the connection is being closed
            return
        told = f"the headers did not arrive within {limit_s:g} s (limits.header_timeout)"
        self._refuse(ClientTooSlowError(told))

    def _refuse(self, error: RouterError) -> None:
        """Send an error and close: there is no request to answer."""
        name = request_id()
        self._listener.on_refused(name, error)
        response = error_response(error, name)
        head = [f"HTTP/1.1 {response.status} {response.reason}"]
        head += [f"{name}: {value}" for name, value in response.headers.items()]
        body = cast(bytes, response.body)
        head += [f"Content-Length: {len(body)}", "Connection: close"]
        if self.transport is not None:
            self.transport.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are no request (for aiohttp), without repeating any of them."""
        if status < 500:
            error = self._wrong_with(exc)
        else:
            log.error("request_failed", exc_info=exc)
            error = RouterError("an error inside the router")
        if request.writer.output_size > 0:
            raise ConnectionError("part of an answer has been sent already")
        name = request_id()
        self._listener.on_refused(name, error)
        response = error_response(error, name)
        response.force_close()
        return response

    def log_exception(self, *args: object, **options: object) -> None:
        """Log the error that ended a connection (for aiohttp).

        An unreadable rest of a body gets no traceback: its request has been answered.
        """
        if not isinstance(options.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **options)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the response of a handler (for aiohttp); True if the client has disconnected."""
        sent = await self._finish(request, resp, start_time)
        self._answered += 1
        self._wait_for_head()
        return sent

    async def _finish(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the router's own answer as a whole, within `limits.send_timeout`.

        A relayed answer has been sent already.
        """
        if resp.prepared:
            return await super().finish_response(request, resp, start_time)
        try:
            async with asyncio.timeout(self._listener.settings.limits.send_timeout_s):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            if self.transport is not None:
                self.transport.abort()
            return resp, True

    def _wrong_with(self, exc: BaseException | None) -> RouterError:
        limits = self._listener.settings.limits
        if isinstance(exc, LineTooLong):
            # aiohttp reports the size of the limit, and not which limit.
            limit = exc.args[1]
            if limit == limits.max_request_line_bytes != limits.max_header_bytes:
                return TargetTooLongError(
                    f"the request line is longer than {limit} bytes (limits.max_request_line)"
                )
            return HeaderTooLargeError(f"a header is larger than {limit} bytes (limits.max_header)")
        if "Too many headers" in str(exc):
            return HeaderTooLargeError(
                f"there are more than {limits.max_headers} headers (limits.max_headers)"
            )
        return FramingError("the request is not valid HTTP/1.1")


def _length(message: object) -> int:
    """Return the length of a request's body as its head states it; 0 for a chunked body.

    Leading zeros are allowed, and there may be more of them than `int` takes.
    """
    if isinstance(message, RawRequestMessage):
        return int(message.headers.get("Content-Length", "").lstrip("0") or 0)
    return 0


def client_of(peername: object) -> str:
    """Return the client of a connection: its address, or its whole /64 of IPv6."""
    host = peername[0] if isinstance(peername, tuple) and peername else ""
    try:
        address: IPv4Address | IPv6Address = ip_address(str(host).partition("%")[0])
    except ValueError:
        return str(host)
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
    return str(address)
