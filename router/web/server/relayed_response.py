"""A backend's answer as sent to a client: its head made as bytes, once, and sent with the body.

Hop-by-hop headers are dropped, and the body is framed anew: a client may speak another version of
HTTP than the router does to the backend. Why not aiohttp's own response: docs/adr/0009.
"""

from collections.abc import Iterable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from typing import Protocol

from aiohttp import HttpVersion, HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter

from router.base.clock import wall_now
from router.llama.http1 import Header

# Headers of a hop, not of the message (RFC 9110 section 7.6.1), or set anew for the next hop.
HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)


def named_in_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Return the hop-by-hop headers that `Connection` names, in lower case."""
    return frozenset(
        one.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for one in value.split(b",")
    )


class AnswerHead(Protocol):
    """Status and headers of an answer."""

    @property
    def status(self) -> int: ...
    @property
    def reason(self) -> str: ...
    @property
    def headers(self) -> Sequence[Header]: ...


class RelayedAnswer(web.StreamResponse):
    """A relayed answer, as aiohttp's server needs it.

    The head waits for the first write, be it empty: the client wakes up for one packet less.
    """

    def __init__(self, upstream: AnswerHead, own: Mapping[str, str]) -> None:
        """Set up the answer; `own` are the router's headers, names in lower case."""
        super().__init__(status=upstream.status, reason=upstream.reason)
        self._upstream = upstream
        self._own = dict(own)
        self._length: bytes | None = None
        self._writer: AbstractStreamWriter | None = None
        self._head = b""
        self._in_chunks = False
        self._bodiless = False
        self._keeps_open = False
        self._ended = False

    def set_length(self, n_bytes: int) -> None:
        """Set the length of a body that is not the backend's, in bytes; before `prepare`."""
        self._length = b"%d" % n_bytes

    @property
    def prepared(self) -> bool:
        """Return True if the head is made; no other answer is possible then."""
        return self._writer is not None

    @property
    def keep_alive(self) -> bool:
        """Return True if the connection may be used for another request."""
        return self._keeps_open

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        """Make the head. Raises ValueError if one of the router's headers holds a line break."""
        if self._writer is None:
            self._keeps_open = request.keep_alive
            self._head = self._head_for(request.method, request.version)
            self._writer = request.writer
        return self._writer

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send some of the body; wait while the client is slow. Raises ConnectionError."""
        await self._send(bytes(data), last=False)

    async def write_eof(self, data: bytes | bytearray | memoryview = b"") -> None:
        """Send the rest of the body, and end it. Raises ConnectionError."""
        if not self._ended:
            self._ended = True
            await self._send(bytes(data), last=True)

    async def _send(self, data: bytes, *, last: bool) -> None:
        assert self._writer is not None, "prepare comes first"
        if self._bodiless:
            data = b""
        elif self._in_chunks:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data = chunk + b"0\r\n\r\n" if last else chunk
        if self._head:
            data, self._head = self._head + data, b""
        if data:
            await self._writer.write(data)

    def _head_for(self, method: str, version: HttpVersion) -> bytes:
        status = self._upstream.status
        # RFC 9110 section 8.6: a HEAD states the length of a GET; these statuses have none.
        lengthless = status < 200 or status in (204, 304)
        self._bodiless = lengthless or method == "HEAD"
        omitted = HOP_BY_HOP | {b"content-length"} if lengthless else HOP_BY_HOP
        omitted |= named_in_connection(self._upstream.headers)
        names = {name.encode() for name in self._own}
        omitted |= names
        lines = [f"HTTP/{version.major}.{version.minor} {status} {self.reason}".encode("latin-1")]
        for name, value in self._upstream.headers:
            lower = name.lower()
            if lower not in omitted:
                own = self._length if lower == b"content-length" else None
                lines.append(b"%b: %b" % (name, own or value))
                names.add(lower)
        lines += [f"{name}: {value}".encode() for name, value in self._own.items()]
        if not self._bodiless and b"content-length" not in names:
            if version >= HttpVersion11:
                self._in_chunks = True
                lines.append(b"Transfer-Encoding: chunked")
            else:
                self._keeps_open = False
        if b"date" not in names:
            lines.append(b"Date: " + _date(int(wall_now())))
        if version >= HttpVersion11:
            if not self._keeps_open:
                lines.append(b"Connection: close")
        elif self._keeps_open:
            lines.append(b"Connection: keep-alive")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1:
            raise ValueError("a header holds a line break")
        return head + b"\r\n\r\n"


@lru_cache(maxsize=1)
def _date(seconds: int) -> bytes:
    return formatdate(seconds, usegmt=True).encode()
