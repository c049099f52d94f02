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
from router.llama.http1 import Header, HttpError, OnHead, Pool, Response, Target

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


def refuse(status: int, payload: bytes) -> None:
    """Raise BackendRefusedError if an answer is an error."""
    if status >= HTTPStatus.BAD_REQUEST:
        message = reply.error_message_from(payload) or f"HTTP {status}"
        raise BackendRefusedError(message, backend_status=status)


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
        # Called when a call about texts or ids fails or takes longer than `health_s`.
        self.on_suspicion: Callable[[], None] = lambda: None
        self.doubted = False  # a call failed or was slow, and no check has passed since.
        self.asking: set[asyncio.Timeout] = set()  # calls and requests that `give_up` ends.
        self._given_up = False  # and no control call has been answered since.
        self._quiet = asyncio.Event()  # set when `relaying` falls to 0
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
        seen: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """Make one control call and return its whole answer. Raises BackendError.

        `headers`: of the body, if there is one. `yields`: `give_up` ends the call. Not for a call
        that changes slots or files: the router must know how such a call ended. `seen` gets the
        parts of the answer as they come.
        """
        if yields and self._given_up:
            raise BackendError("the backend went down")
        sent = list(headers) if body is not None else []
        if self._authorization:
            sent.append(self._authorization)
        chunks, n_bytes = list[bytes](), 0
        with _OUR_ERRORS:
            async with asyncio.timeout(timeout_s) as limit:
                if yields:
                    self.asking.add(limit)
                try:
                    response = await self._pool.request(
                        method, self._prefix + path, sent, body, timeout_s
                    )
                    try:
                        while chunk := await response.chunk():
                            chunks.append(chunk)
                            n_bytes += len(chunk)
                            if max_bytes is not None and n_bytes > max_bytes:
                                raise BackendError("the answer is too long")
                            if seen is not None:
                                seen(chunk)
                    finally:
                        response.close()
                finally:
                    self.asking.discard(limit)
        self._given_up, payload = False, b"".join(chunks)
        refuse(response.status, payload)
        return payload

    def relay(
        self,
        method: str,
        path: str,
        headers: Sequence[Header],
        body: bytes | None,
        *,
        yields: bool = False,
        on_head: OnHead | None = None,
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
        return Relaying(self, asked, yields=yields)

    def give_up(self) -> None:
        """End all unanswered calls that `yields`, because the server does not answer.

        The callers get a BackendError. Later control calls with `yields` get one too, until the
        server has answered another control call.
        """
        self._given_up = True
        while self.asking:
            limit = self.asking.pop()
            if not limit.expired():
                limit.reschedule(0.0)

    def relayed(self) -> None:
        """Count one request of `relaying` as over."""
        self.relaying -= 1
        if not self.relaying:
            self._quiet.set()

    async def until_quiet(self) -> None:
        """Wait until no client's request is with the server."""
        while self.relaying:
            self._quiet.clear()
            await self._quiet.wait()


class Relaying:
    """Context manager of one relayed request.

    A class, not a generator: every client request goes through it.
    """

    def __init__(
        self, client: ServerClient, asked: Coroutine[Any, Any, Response], *, yields: bool
    ) -> None:
        self._client, self._asked, self._yields = client, asked, yields
        self._response: Response | None = None

    async def __aenter__(self) -> Response:
        client, limit = self._client, asyncio.timeout(None)
        client.relaying += 1
        if self._yields:
            client.asking.add(limit)
        try:
            with _OUR_ERRORS:
                async with limit:
                    self._response = await self._asked
        except BaseException as error:
            client.relayed()
            if limit.expired() and isinstance(error, BackendTimeoutError):
                raise BackendLostError("the backend went down with the request") from error
            raise
        finally:
            client.asking.discard(limit)
        return self._response

    async def __aexit__(self, *_: object) -> None:
        self._client.relayed()
        if self._response is not None:
            self._response.close()
