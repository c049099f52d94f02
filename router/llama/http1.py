"""HTTP/1.1 client for a backend or peer: briefly kept connections, and streamed responses.

Lean on purpose (docs/adr/0006): httptools parses, this module has the pool and the flow control.
The only fact about llama-server in it is how long the server keeps connections.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast
from urllib.parse import urlsplit

import httptools

from router.base.errors import BackendError
from router.base.tasks import Tasks
from router.base.urls import UNIX, authority

# llama-server closes idle connections after about 5 s without saying so
# (llama-server.md, "Connections").
KEEP_IDLE_S = 2.0
# Bytes of a response that may be buffered before reading from the backend is paused.
_HIGH_WATER = 256 * 1024

Header = tuple[bytes, bytes]
"""Name and value as on the wire; names in any case."""


class HttpError(OSError):
    """A broken connection, or an answer that is not HTTP.

    `unanswered`: no byte of it came. `sent`: the request was on its way.
    """

    def __init__(self, message: str, *, unanswered: bool = False, sent: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered
        self.sent = sent


class Response:
    """An answer with its headers and first bytes; iterate it or `read` it. Always `close` it."""

    def __init__(self, connection: "_Connection") -> None:
        self._connection = connection
        self.status = connection.status
        self.reason = connection.reason
        self.headers: list[Header] = connection.headers
        self.chunk = connection.read
        self._body: bytes | None = None

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None; `name` is in lower case."""
        wanted = name.encode()
        values = (value for found, value in self.headers if found.lower() == wanted)
        return next((value.decode("latin-1") for value in values), None)

    @property
    def is_complete(self) -> bool:
        """Return True if the whole answer has come: reading does not wait."""
        return self._body is not None or self._connection.is_complete

    def __aiter__(self) -> "Response":
        return self

    async def __anext__(self) -> bytes:
        """Return all bytes that have come. Raises BackendError if the backend breaks off."""
        try:
            chunk = await self.chunk()
        except OSError as error:
            raise BackendError("the backend closed the connection during its answer") from error
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def read(self) -> bytes:
        """Return the whole body, also when called again. Raises BackendError."""
        if self._body is None:
            self._body = b"".join([chunk async for chunk in self])
        return self._body

    def close(self) -> None:
        """Return the connection to the pool if the response was read to its end, else abort it."""
        self._connection.finish()


OnHead = Callable[[Response], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Host and port to connect to, and whether over TLS; or the path of a Unix socket."""

    host: str
    port: int
    tls: bool
    socket: str | None = None

    @classmethod
    def of(cls, url: str) -> "Target":
        """Return the target of a base URL, or of `unix:/PATH`."""
        if url.startswith(UNIX):
            return cls("localhost", 80, tls=False, socket=url.removeprefix(UNIX))
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls)


class Pool:
    """Connections to one backend, on one event loop."""

    def __init__(
        self,
        target: Target,
        connect_timeout_s: float,
        tls: ssl.SSLContext | None = None,
        *,
        keeps_streams: bool = False,
    ) -> None:
        """Set up the pool. `tls`: replaces the default context of a target with TLS.

        `keeps_streams`: the server does not close after a chunked answer.
        """
        self._target = target
        self.keeps_streams = keeps_streams
        self.connect_timeout_s = connect_timeout_s  # may be changed
        # Called when the backend closes a connection that it would have kept.
        self.on_hang_up: Callable[[], None] = lambda: None
        self._tls = (tls or ssl.create_default_context()) if target.tls else None
        self._host = authority(target.host, target.port).encode()
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._open: set[_Connection] = set()
        self._tasks = Tasks()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        headers: Iterable[Header],
        body: bytes | None,
        timeout_s: float,
        on_head: OnHead | None = None,
    ) -> Response:
        """Send a request; return the response with its headers and the first bytes of its body.

        `on_head` gets the response once its headers are in. Raises HttpError, OSError,
        TimeoutError.
        If the backend had closed a kept connection, it did not work on the request. The request
        is then sent again on a fresh connection. `timeout_s` is for the answer; connecting has
        its own timeout.
        """
        head = self._head(method, path, headers, body)
        kept = self._kept()
        if kept is not None:
            try:
                return await kept.send(method, head, body, timeout_s, on_head)
            except HttpError as error:
                if not error.unanswered:
                    raise
                self.on_hang_up()
        try:
            fresh = await self._connect()
        except OSError as error:
            # A kept connection broke, and no process listens: the backend ended with the request.
            if kept is None:
                raise
            raise HttpError("the connection broke", sent=True) from error
        return await fresh.send(method, head, body, timeout_s, on_head)

    async def aclose(self) -> None:
        """Close every connection, also those in use."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        await self._tasks.aclose()
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()

    def keep(self, connection: "_Connection") -> None:
        """Keep a free connection. It is closed if no request takes it within KEEP_IDLE_S."""
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), connection))
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_IDLE_S, self._close_stale)

    def replace(self) -> None:
        """Open a connection in place of a used-up one, as after every stream.

        Connecting is half of a short request's cost on its way to the backend.
        """
        if not self._idle and not self._closed:
            self._tasks.spawn(self._spare(), name="spare connection")

    async def _spare(self) -> None:
        with suppress(OSError):  # also TimeoutError; the next request gets its own error
            self.keep(await self._connect())

    def forget(self, connection: "_Connection") -> None:
        """Drop a closed connection."""
        self._open.discard(connection)

    def _close_stale(self) -> None:
        loop = asyncio.get_running_loop()
        limit = loop.time() - KEEP_IDLE_S
        while self._idle and self._idle[0][0] <= limit:
            self._idle.popleft()[1].abort()
        self._sweep = None
        if self._idle:
            self._sweep = loop.call_at(self._idle[0][0] + KEEP_IDLE_S, self._close_stale)

    def _kept(self) -> "_Connection | None":
        """Return the idle connection used last, which stays open longest; None if there is none."""
        while self._idle:
            _, connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> "_Connection":
        loop, target = asyncio.get_running_loop(), self._target
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                if target.socket is not None:
                    _, connection = await loop.create_unix_connection(
                        lambda: _Connection(self), target.socket
                    )
                else:
                    _, connection = await loop.create_connection(
                        lambda: _Connection(self), target.host, target.port, ssl=self._tls
                    )
        except UnicodeError as error:  # of IDNA: an empty label, or one of over 63 characters
            raise HttpError(f"{target.host!r} is not a host name") from error
        self._open.add(connection)
        return connection

    def _head(self, method: str, path: str, headers: Iterable[Header], body: bytes | None) -> bytes:
        target = path.encode("utf-8", "surrogateescape")
        lines = [b"%b %b HTTP/1.1" % (method.encode(), target), b"Host: " + self._host]
        lines += [b"%b: %b" % header for header in headers]
        if body is not None or method in ("POST", "PUT", "PATCH"):
            lines.append(b"Content-Length: %d" % len(body or b""))
        head = b"\r\n".join(lines)
        # aiohttp refuses control characters from clients; all other headers are the router's own.
        if not head.count(b"\r") == head.count(b"\n") == len(lines) - 1:
            raise HttpError("a header holds a line break")
        return head + b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection, one request at a time; also has the callbacks of httptools' parser."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self._reset()

    def _reset(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.reason = ""
        self.headers: list[Header] = []
        self._method = ""
        self._on_head: OnHead | None = None
        self._in_use = False
        self._touched = False
        self._headed = False
        self.is_complete = False
        self._keep = False
        self._surplus = False
        self._error: OSError | None = None
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._started: asyncio.Future[None] | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._touched = True
        if self.is_complete or not self._in_use:
            self.abort()  # unrequested: it would be taken for the answer to the next request
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:  # also the HttpErrors of the callbacks
            self._fail(HttpError(f"the answer is not HTTP: {error}"))
            self.abort()
        if self._buffered > _HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.is_open and not self._in_use:  # idle, and not closed by the router
            self._pool.on_hang_up()
        self.is_open = False
        self._pool.forget(self)
        if not self._headed or self._is_framed():
            self._fail(HttpError("the connection broke", unanswered=not self._touched, sent=True))
        else:
            self._end()  # a body that ends with its connection

    def _is_framed(self) -> bool:
        """Return True if the answer says where it ends and has not ended yet."""
        if self.is_complete:
            return False
        names = {name.lower() for name, _ in self.headers}
        return not self._headed or bool(names & {b"content-length", b"transfer-encoding"})

    # -- httptools -----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_complete:  # a second answer in the same packet
            self._surplus = True

    def on_status(self, status: bytes) -> None:
        if not self.is_complete:
            self.reason += status.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headed:  # else a trailer: no use for it here
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self.is_complete:
            return
        self.status = self.parser.get_status_code()
        if not 100 <= self.status < 600 or self.status == HTTPStatus.SWITCHING_PROTOCOLS:
            raise HttpError(f"the answer has the invalid status {self.status}")
        if self.status < 200:
            return  # 100 Continue and the like: the answer follows
        # httptools leaves this check to its user: it would read a body until the connection ends.
        encodings = [v for name, v in self.headers if name.lower() == b"transfer-encoding"]
        if encodings and [one.strip().lower() for one in encodings] != [b"chunked"]:
            raise HttpError("the only Transfer-Encoding is chunked")
        self._headed = True
        self._keep = self.parser.should_keep_alive() and self._method != "HEAD"
        if self._on_head is not None:
            self._on_head(Response(self))
        if self._method == "HEAD":
            self._end()

    def on_chunk_header(self) -> None:
        # llama-server closes after every chunked answer (llama-server.md, "Connections").
        self._keep = self._keep and self._pool.keeps_streams

    def on_body(self, body: bytes) -> None:
        if self.is_complete:  # body of an unrequested answer, or of an answer to HEAD
            self._surplus = True
            return
        if not self._headed:  # its status would be taken for the answer's
            raise HttpError("an interim answer has a body")
        self._chunks.append(body)
        self._buffered += len(body)
        self._wake()

    def on_message_complete(self) -> None:
        if self.is_complete:
            return
        if self.status < 200:
            self.headers.clear()
            self.reason = ""
            return
        self._end()

    # -- for the pool and the response ---------------------------------------------------------

    async def send(
        self, method: str, head: bytes, body: bytes | None, timeout_s: float, on_head: OnHead | None
    ) -> Response:
        """Write a request; return when the first bytes or the end of the answer's body are in.

        Raises HttpError and TimeoutError.
        """
        if self._transport is None or not self.is_open:
            raise HttpError("the connection is closed", unanswered=True)
        self._method, self._on_head, self._in_use = method, on_head, True
        self._started = self._loop.create_future()
        # One write for head and body saves a packet; a body above 64 KiB is not copied for it.
        if body is not None and len(body) > 64 * 1024:
            self._transport.write(head)
            self._transport.write(body)
        else:
            self._transport.write(head + (body or b""))
        timer = self._loop.call_later(timeout_s, self._fail, TimeoutError())
        try:
            await self._started
        except BaseException:
            self.abort()
            raise
        finally:
            timer.cancel()
        return Response(self)

    async def read(self) -> bytes:
        """Return the bytes since the last call; b"" at the end. Raises HttpError."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.is_complete:
                return b""
            self._waiter = self._loop.create_future()
            await self._waiter
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def finish(self) -> None:
        """Release the connection of a response that is not needed any more."""
        if not self._in_use:
            return
        self._in_use = False
        clean = self.is_complete and not self._chunks and not self._surplus
        if clean and self._keep and self.is_open:
            self._reset()  # now, so that the next request need not wait for it
            self._pool.keep(self)
        else:
            if self.is_complete:
                self._pool.replace()
            self.abort()

    def abort(self) -> None:
        """Close at once; llama-server stops working on an answer that has no reader."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: OSError) -> None:
        if self.is_complete:
            return
        self._error = error
        if self._started is not None and not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # marked as retrieved, also if no task waits any more
        self._wake()

    def _end(self) -> None:
        self.is_complete = True
        self._wake()

    def _wake(self) -> None:
        if self._started is not None and not self._started.done():
            self._started.set_result(None)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
