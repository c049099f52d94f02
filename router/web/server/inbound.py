"""What a request passes between its connection and its route, in this order.

1. `sender`: the address of its client, behind proxies that are trusted.
2. `check_head`: it reads in one way. aiohttp's parser (llhttp) is strict about bytes and lengths;
   refused is what else llama-server's parser accepts, found by a comparison with h11, case by case:
   tests/web/server/test_smuggling.py has the table. Every reader agrees on where a request ends.
3. `check_origin`: its web page may ask. For routers whose clients need no key: a page in a browser
   on this machine reaches addresses that its owner does not. Its own host name may be made to
   resolve to this machine (DNS rebinding), or it may ask another origin, as llama-server allows to
   all. Either way it would use the GPU, and read what others asked.
4. Its key: `web/api/client_keys`.
5. `Bodies`: its body, within limits of size, time, memory and expansion. It is held until its
   answer begins, and costs several times its size: parsed, and as tokens. So the bodies of all
   requests together have a limit. What counts is what came, not what was announced.
"""

import asyncio
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from functools import partial
from hashlib import blake2b
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes, urlsplit

from aiohttp import HttpVersion10, HttpVersion11, web

from router.base.errors import (
    BadRequestError,
    BodiesFullError,
    BodyTooLargeError,
    ClientTooSlowError,
    ExpectationError,
    FramingError,
    OriginError,
    UnknownMethodError,
    UnsupportedMediaTypeError,
)
from router.base.forwarded import sender_of
from router.web.server.call import Call
from router.web.server.content_encodings import ENCODINGS, BrokenEncodingError, Decoding
from router.web.server.settings import Settings

# Methods that llama-server knows. TRACE would send the backend's key back; CONNECT makes a tunnel.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def sender(request: web.BaseRequest, settings: Settings) -> str | None:
    """Return the address of the client, also behind proxies that are trusted."""
    trusted, headers = settings.limits.trusted_proxies, request.headers
    if not trusted:
        return request.remote
    named = [headers.getall(name, []) for name in ("Forwarded", "X-Forwarded-For")]
    return sender_of(request.remote, named[0], named[1], trusted)


def check_head(request: web.BaseRequest) -> None:
    """Refuse an ambiguous head. Raises FramingError and UnknownMethodError.

    1. The version is 1.0 or 1.1: any other frames its messages differently, or is a mistake.
    2. `Transfer-Encoding` is `chunked` and nothing else; HTTP/1.0 does not have it.
    3. The method is known: no reader knows what follows the headers of an unknown one.
    4. Every reader decodes the path to the same bytes. Routes are chosen by `request.path`, and the
       target is forwarded as it came.
    """
    version, headers = request.version, request.headers
    if version not in (HttpVersion11, HttpVersion10):
        raise FramingError("the HTTP version is not supported; use 1.1 or 1.0")
    if "Transfer-Encoding" in headers:
        encodings = headers.getall("Transfer-Encoding")
        if version == HttpVersion10 or [one.strip().lower() for one in encodings] != ["chunked"]:
            raise FramingError("the only supported Transfer-Encoding is chunked, in HTTP/1.1")
    if request.method not in _METHODS:
        raise UnknownMethodError(f"unknown method; use one of {', '.join(sorted(_METHODS))}")
    target = request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path
    if ("%" in target or "#" in target) and not _reads_in_one_way(target, request.path):
        raise FramingError("the path is ambiguous; send plain UTF-8, with %XX where needed")


def _reads_in_one_way(target: str, path: str) -> bool:
    """Return whether llama-server decodes `target` to `path`, too.

    1. cpp-httplib decodes `%uXXXX` as well (httplib.cpp, decode_path_component); aiohttp does not.
    2. cpp-httplib decodes bytes that are no UTF-8; yarl leaves them encoded.
    3. A fragment ends the path for cpp-httplib (parse_request_line); for aiohttp, not before a `?`.
    4. C stops reading at a zero byte.
    """
    raw = target.partition("#")[0].partition("?")[0]
    if _NO_ESCAPE.search(raw):  # (1)
        return False
    decoded = unquote_to_bytes(raw)
    return decoded == path.encode("utf-8", "surrogateescape") and b"\0" not in decoded


# Ends of names that nobody can register in public DNS, or whose owner gives them to devices of its
# customers (AVM, Telekom, Tailscale). Names without a dot, as containers have, are private too.
PRIVATE = (
    *("localhost", "local", "internal", "home.arpa", "svc", "lan", "home", "localdomain"),
    *("intranet", "private", "corp", "fritz.box", "speedport.ip", "ts.net", "mshome.net"),
    *("attlocal.net", "bbox", "station", "dns.podman", "test"),
)
_OF_ANYBODY = "ts.net"  # pages there may be public: anybody can have such a name
# Of programs that show pages of their own; a page from the web has http or https.
_PROGRAMS = frozenset(
    {"app", "file", "tauri", "capacitor", "ionic", "vscode-webview", "vscode-file"}
)
_MOST = 100  # characters of a name that an error repeats


def check_origin(request: web.BaseRequest, settings: Settings, *, loads: bool = False) -> None:
    """Raise OriginError for a request of a page that is not allowed to make it.

    `loads`: even a look has an effect. A page may look without an Origin, as an image does.
    """
    if settings.needs_key:
        return
    if loads and request.headers.get("Sec-Fetch-Site") == "cross-site":
        raise OriginError("pages of another site may not load a model without keys")
    host = request.headers.get("Host")
    if host is not None and not _may_be_host(host, settings.browser_hosts):
        raise OriginError(
            f"the name {host[:_MOST]!r} in the Host header is not allowed without keys; list it in"
            " browsers.hosts, or set up auth.keys"
        )
    origin = request.headers.get("Origin")
    if origin is not None and not _may_ask(origin, host, settings.browser_origins):
        raise OriginError(
            f"pages of the origin {origin[:_MOST]!r} are not allowed without keys; list it in"
            " browsers.origins, or set up auth.keys"
        )


def _may_be_host(host: str, listed: frozenset[str]) -> bool:
    name = _name_of(host)
    if name is None:
        return False
    return _is_address(name) or _is_private(name) or _is_listed(name, listed)


def _may_ask(origin: str, host: str | None, listed: frozenset[str]) -> bool:
    scheme, _, rest = origin.partition("://")
    if scheme in _PROGRAMS or _is_listed(origin, listed):
        return True
    name = _name_of(rest)
    if scheme not in ("http", "https") or name is None:
        return False  # also "null": a page in a frame without an origin
    if rest.lower() == (host or "").lower():
        return True
    if _is_address(name):
        return ip_address(name).is_private
    return _is_private(name) and not name.endswith(f".{_OF_ANYBODY}")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_private(name: str) -> bool:
    """Return whether no stranger can make a name resolve to this machine."""
    return "." not in name or any(f".{name}".endswith(f".{end}") for end in PRIVATE)


def _is_listed(name: str, listed: frozenset[str]) -> bool:
    """Return whether a name or an origin is listed, or fits a pattern: `*`, `*.example.org`."""
    return name in listed or any("*" in one and fnmatchcase(name, one) for one in listed)


def _name_of(host: str) -> str | None:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return None if name is None else name.rstrip(".")


def expects(request: web.BaseRequest) -> bool:
    """Return True if the client waits for a 100 Continue. Raises ExpectationError."""
    if "Expect" not in request.headers or request.version < HttpVersion11:
        return False
    if request.headers["Expect"].lower() != "100-continue":
        raise ExpectationError("the only supported Expect header is 100-continue")
    return True


_NOT_ENCODED = frozenset({"", "identity"})
# A compressed body may expand so many times: prompts do 3 to 10 times, text of one letter 1,000.
_MOST_EXPANDED = 30
_SMALL = 1024 * 1024  # bytes; a smaller body may expand more, and is held until its answer ends
# Of the memory for bodies: what is kept for operators and other hosts, half of it for operators
# alone. Chosen.
_KEPT_SHARE = 4
DIGEST_BYTES = 16
_SAMPLE = 64 * 1024  # bytes of either end of a large body


def _nothing() -> None: ...


def body_digest(raw: bytes) -> bytes:
    """Return a digest of a body; of a large one its length and its ends count."""
    if len(raw) <= 2 * _SAMPLE:
        return blake2b(raw, digest_size=DIGEST_BYTES).digest()
    sample = b"%d" % len(raw) + raw[:_SAMPLE] + raw[-_SAMPLE:]
    return blake2b(sample, digest_size=DIGEST_BYTES).digest()


class Bodies:
    """Reads bodies, and counts the bytes that are held for each client."""

    def __init__(self, settings: Settings) -> None:
        """Set up without bodies."""
        self._settings = settings
        self._held: Counter[str | None] = Counter()
        self.held_bytes = 0
        # One thread, in which bodies take turns: many at once leave the other cores to others.
        self._decoder = ThreadPoolExecutor(1, "decode")

    async def read(self, call: Call) -> None:
        """Set `raw` of a call to its decoded body. Raises RouterError. `release` it at its end."""
        request = call.http
        if not request.can_read_body:
            return
        encoding = ", ".join(request.headers.getall("Content-Encoding", ())).strip().lower()
        if encoding not in _NOT_ENCODED and encoding not in ENCODINGS:
            raise UnsupportedMediaTypeError(
                "the Content-Encoding of the body is not supported; use one of"
                f" {', '.join(ENCODINGS)}, or none"
            )
        if (length := _length(request)) is not None:
            self._check_size(length)
        if expects(request):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        call.let_go = partial(self._let_go, call)
        call.raw = await self._arrived(call)
        if encoding not in _NOT_ENCODED:
            call.raw = await self._decoded(call, encoding)

    async def _arrived(self, call: Call) -> bytes:
        if call.http.content.is_eof():  # the whole body has come: nothing to wait for
            return await self._whole(call)
        limit_s = self._settings.limits.body_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._whole(call)
        except TimeoutError as error:
            raise ClientTooSlowError(
                f"the body did not arrive within {limit_s:g} s (limits.body_timeout)"
            ) from error

    def _let_go(self, call: Call) -> None:
        """Let go of a large body whose answer has begun: it is not sent again."""
        several = call.parsed is not None and call.parsed.tasks > 1  # their answer names prompts
        if call.held_bytes > _SMALL and not several:
            call.raw = body_digest(call.raw)
            if call.parsed is not None:
                call.parsed = call.parsed.without_prompt()
            self.release(call)

    def release(self, call: Call) -> None:
        """Stop counting the body of a call."""
        call.let_go = _nothing  # else the call and its body would be a cycle
        if not call.held_bytes:
            return
        client, held = _owner(call), call.held_bytes
        call.held_bytes = 0
        self.held_bytes -= held
        self._held[client] -= held
        if self._held[client] <= 0:
            del self._held[client]

    def _take(self, call: Call, size: int) -> None:
        """Count a body as one of `size` bytes, or raise BodiesFullError.

        A client may hold half of what others leave free, so there is always room for one more. A
        part is kept for other hosts, whose clients cannot fill that of operators.
        """
        client, held = _owner(call), call.held_bytes
        more, most = size - held, self._settings.body_memory_bytes
        if more <= 0:
            return
        if not call.is_trusted:
            most -= most // (_KEPT_SHARE if call.hop is None else 2 * _KEPT_SHARE)
        of_client = self._held[client]
        left = most - (self.held_bytes - of_client)
        # A client's only body may be as large as a body may be.
        only = min(left, self._settings.limits.max_body_bytes) if of_client == held else 0
        if of_client + more > max(left // 2, only):
            raise BodiesFullError(
                f"the bodies of requests in progress take {self.held_bytes} bytes, {of_client} of"
                f" them from this client, and this one {size}; a client may take half of what"
                f" others leave of {most} (limits.body_memory)"
            )
        call.held_bytes = size
        self.held_bytes += more
        self._held[client] += more

    async def _whole(self, call: Call) -> bytes:
        """Return the body as it was sent."""
        chunks: list[bytes] = []
        size = 0
        try:
            while chunk := await call.http.content.readany():
                chunks.append(chunk)
                size += len(chunk)
                self._check_size(size)
                self._take(call, size)
        except web.RequestPayloadError as error:
            raise BadRequestError("the body cannot be read: its chunks are broken") from error
        return b"".join(chunks)

    async def _decoded(self, call: Call, encoding: str) -> bytes:
        """Return the decoded body. Decoded in a thread: others do not wait for it."""
        decoding, pieces, size = Decoding(encoding, call.raw), list[bytes](), 0
        most = max(_SMALL, len(call.raw) * _MOST_EXPANDED)
        try:
            loop = asyncio.get_running_loop()
            while piece := await loop.run_in_executor(self._decoder, decoding.piece):
                pieces.append(piece)
                size += len(piece)
                self._check_size(size)
                if size > most:
                    raise BodyTooLargeError(
                        f"the body expands more than {_MOST_EXPANDED} times; send it uncompressed"
                    )
                self._take(call, size)
        except BrokenEncodingError as error:
            raise BadRequestError(
                f"the body cannot be read: its Content-Encoding is broken: {error}"
            ) from error
        return b"".join(pieces)

    def _check_size(self, size: int) -> None:
        limit = self._settings.limits.max_body_bytes
        if size > limit:
            raise BodyTooLargeError(f"the body is larger than {limit} bytes (limits.max_body)")


def _owner(call: Call) -> str | None:
    """Return whose body it is: a tenant's or an address's. A key that nobody checks names none."""
    if call.hop is not None:
        return call.hop.client
    return call.sender if call.caller is None else call.fair_to


def _length(request: web.BaseRequest) -> int | None:
    """Return `Content-Length`, which may have more leading zeros than `int` takes; None: none."""
    told = request.headers.get("Content-Length")
    return None if told is None else int(told.lstrip("0")[:20] or 0)
