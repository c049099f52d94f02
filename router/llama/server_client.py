"""HTTP client of one server: control calls, and relayed client requests.

The base of the client of a llama-server and of the client of a peer. Raises only BackendError and
its subclasses.
"""

import asyncio
import ssl
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from router.base.errors import (
    BackendError,
    BackendLostError,
    BackendRefusedError,
    BackendTimeoutError,
)
from router.base.types import BackendId
from router.base.urls import UNIX
from router.llama import replies as reply
from router.llama.http1 import Header, HttpError, OnHead, Pool, Response, Target, ignored

_JSON = ((b"Content-Type", b"application/json"),)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds."""

    connect_s: float = 5.0
    control_s: float = 10.0
    action_s: float = 120.0
    first_byte_s: float = 3600.0
    health_s: float = 2.0


class Connections:
    """Connection pools shared by all servers of a kind. Use with `async with`.

    `tls` and `keeps_streams`: as in `Pool`.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, *, keeps_streams: bool = False) -> None:
        self._pools: dict[Target, Pool] = {}
        self._tls, self._keeps_streams = tls, keeps_streams

    async def __aenter__(self) -> "Connections":
        return self

    async def __aexit__(self, *_: object) -> None:
        for pool in self._pools.values():
            await pool.aclose()

    def pool(self, url: str, connect_timeout_s: float) -> Pool:
        """Return the one pool for the host and port of `url`."""
        target = Target.of(url)
        if target not in self._pools:
            self._pools[target] = Pool(
                target, connect_timeout_s, self._tls, keeps_streams=self._keeps_streams
            )
        return self._pools[target]

    async def drop(self, url: str) -> None:
        """Close the pool for the host and port of `url`: it will not be used again."""
        if (pool := self._pools.pop(Target.of(url), None)) is not None:
            await pool.aclose()


class _OurErrors:
    """Context manager that turns timeouts and OS errors into BackendError.

    A class, not a generator, for the same reason as `Relaying`.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TimeoutError):
            raise BackendTimeoutError("the backend did not answer in time") from error
        if isinstance(error, HttpError) and error.sent:
            raise BackendLostError("the backend went down with the request") from error
        if isinstance(error, OSError):
            raise BackendError("the backend cannot be reached") from error


_OUR_ERRORS = _OurErrors()


class RelayedResponse:
    """A backend's response on its way to a client; its headers and first bytes are in."""

    def __init__(self, response: Response) -> None:
        self.status = response.status
        self.reason = response.reason
        self.headers = response.headers
        self._response = response
        self._body: bytes | None = None

    def header(self, name: str) -> str | None:
        """Return the first value of a header, or None; `name` is in lower case."""
        wanted = name.encode()
        for found, value in self.headers:
            if found.lower() == wanted:
                return value.decode("latin-1")
        return None

    @property
    def is_complete(self) -> bool:
        """Return True if the whole response has come: `read` does not wait."""
        return self._body is not None or self._response.is_complete

    def __aiter__(self) -> "RelayedResponse":
        return self

    async def __anext__(self) -> bytes:
        """Return the next bytes. Raises BackendError if the backend breaks off."""
        try:
            return await self._response.__anext__()
        except OSError as error:
            raise BackendError("the backend closed the connection during its answer") from error

    async def read(self) -> bytes:
        """Return the whole body, also when called again. Raises BackendError."""
        if self._body is None:
            try:
                self._body = await self._response.read()
            except OSError as error:
                raise BackendError("the backend closed the connection during its answer") from error
        return self._body


async def _read(response: Response, max_bytes: int | None) -> bytes:
    """Return the whole body. Raises BackendError if it is longer than `max_bytes`.

    `max_bytes` None: no limit.
    """
    if max_bytes is None:
        return await response.read()
    chunks = []
    async for chunk in response:
        chunks.append(chunk)
        max_bytes -= len(chunk)
        if max_bytes < 0:
            raise BackendError("the answer is too long")
    return b"".join(chunks)


class ServerClient:
    """Calls to one server, and the requests of clients that are relayed to it."""

    def __init__(
        self,
        backend: BackendId,
        url: str,
        connections: Connections,
        timeouts: Timeouts,
        api_key: str | None = None,
    ) -> None:
        self.id = backend
        self.url = url
        self.relaying = 0  # client requests that are at the server now.
        self.doubted = False  # a call failed or was slow, and no check has passed since.
        self._unanswered: set[Relaying] = set()  # requests that `give_up` ends.
        self._asking: set[asyncio.Timeout] = set()  # control calls that `give_up` ends.
        self._given_up = False  # and no control call has been answered since.
        self._quiet: asyncio.Event | None = None  # set when `relaying` falls to 0
        # Of all its routes (`--api-prefix`).
        self._prefix = "" if url.startswith(UNIX) else urlsplit(url).path
        self._pool = connections.pool(url, timeouts.connect_s)
        self._timeouts = timeouts
        self._authorization = (b"Authorization", f"Bearer {api_key}".encode()) if api_key else None

    def limit(self, timeouts: Timeouts) -> None:
        """Set other timeouts, for calls that begin from now on."""
        self._timeouts = timeouts
        self._pool.connect_timeout_s = timeouts.connect_s

    def tell_hang_ups(self, told: Callable[[], None]) -> None:
        """Call `told` when the server closes an idle connection early, as when its process ends.

        The pool keeps an idle connection for about the time between two checks of the monitor.
        """
        self._pool.on_hang_up = told

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout_s: float,
        max_bytes: int | None = None,
        *,
        yields: bool = False,
        headers: Sequence[Header] = _JSON,
    ) -> bytes:
        """Make one control call and return its whole answer. Raises BackendError.

        `headers`: of the body, if there is one. `yields`: `give_up` ends the call. Not for a call
        that changes slots or files: the router must know how such a call ended.
        """
        if yields and self._given_up:
            raise BackendError("the backend went down")
        sent = list(headers) if body is not None else []
        if self._authorization:
            sent.append(self._authorization)
        with _OUR_ERRORS:
            async with asyncio.timeout(timeout_s) as limit:
                if yields:
                    self._asking.add(limit)
                try:
                    response = await self._pool.request(
                        method, self._prefix + path, sent, body, timeout_s
                    )
                    try:
                        payload = await _read(response, max_bytes)
                    finally:
                        response.close()
                finally:
                    self._asking.discard(limit)
        self._given_up = False
        if response.status >= HTTPStatus.BAD_REQUEST:
            message = reply.error_message_from(payload) or f"HTTP {response.status}"
            raise BackendRefusedError(message, backend_status=response.status)
        return payload

    def relay(
        self,
        method: str,
        path: str,
        headers: Sequence[Header],
        body: bytes | None,
        *,
        yields: bool = False,
        on_head: OnHead = ignored,
    ) -> "Relaying":
        """Send a client's request. `async with` gives the response with headers and first bytes.

        `path` is raw, query included. Entering raises BackendError. On exit the connection is
        closed unless the response was read to its end. `yields`: `give_up` ends the request.
        `on_head` gets status and headers before there is a first byte.
        """
        if self._authorization:
            kept = [header for header in headers if header[0].lower() != b"authorization"]
            headers = [*kept, self._authorization]
        timeout_s = self._timeouts.first_byte_s
        asked = self._pool.request(method, self._prefix + path, headers, body, timeout_s, on_head)
        return Relaying(self, asked, self._unanswered if yields else set())

    def give_up(self) -> None:
        """End all unanswered calls that `yields`, because the server does not answer.

        The callers get a BackendError. Later control calls with `yields` get one too, until the
        server has answered another control call.
        """
        self._given_up = True
        for relaying in tuple(self._unanswered):
            relaying.give_up()
        while self._asking:
            limit = self._asking.pop()
            if not limit.expired():
                limit.reschedule(0.0)

    def relayed(self) -> None:
        """Count one request of `relaying` as over."""
        self.relaying -= 1
        if self._quiet is not None and not self.relaying:
            self._quiet.set()
            self._quiet = None

    async def until_quiet(self) -> None:
        """Wait until no client's request is with the server."""
        while self.relaying:
            if self._quiet is None:
                self._quiet = asyncio.Event()
            await self._quiet.wait()


class Relaying:
    """Context manager of one relayed request.

    A class, not a generator: every client request goes through it.
    """

    def __init__(
        self,
        client: ServerClient,
        asked: Coroutine[Any, Any, Response],
        unanswered: "set[Relaying]",
    ) -> None:
        self._client = client
        self._asked = asked
        self._unanswered = unanswered
        self._task: asyncio.Task[Any] | None = None
        self._given_up = False
        self._response: Response | None = None

    def give_up(self) -> None:
        """Wait no longer for the first byte."""
        if self._task is not None and not self._given_up:
            self._given_up = True
            self._task.cancel()

    async def __aenter__(self) -> RelayedResponse:
        self._client.relaying += 1
        self._task = asyncio.current_task()
        self._unanswered.add(self)
        try:
            with _OUR_ERRORS:
                self._response = await self._asked
        except BaseException as error:
            self._client.relayed()
            if isinstance(error, asyncio.CancelledError) and self._is_ours():
                raise BackendLostError("the backend went down with the request") from error
            raise
        finally:
            self._unanswered.discard(self)
        return RelayedResponse(self._response)

    def _is_ours(self) -> bool:
        """Return True if only `give_up` cancelled the task.

        The client may have disconnected at the same moment.
        """
        return self._given_up and self._task is not None and self._task.uncancel() == 0

    async def __aexit__(self, *_: object) -> None:
        self._client.relayed()
        if self._response is not None:
            self._response.close()
