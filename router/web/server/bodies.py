"""Bodies of requests: read within limits of size, time, memory and expansion.

A body is held until its answer begins, and costs several times its size: parsed, and as tokens. So
the bodies of all requests together have a limit. What counts is what came, not what was announced.
"""

import asyncio
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b

from aiohttp import HttpVersion11, web

from router.base.errors import (
    BadRequestError,
    BodiesFullError,
    BodyTooLargeError,
    ClientTooSlowError,
    ExpectationError,
    UnsupportedMediaTypeError,
)
from router.web.server.call import Call
from router.web.server.content_encodings import ENCODINGS, BrokenEncodingError, Decoding
from router.web.server.settings import Settings

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
            raise unsupported()
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
        limit_s = self._settings.body_timeout_s
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
        only = min(left, self._settings.max_body_bytes) if of_client == held else 0
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
        limit = self._settings.max_body_bytes
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


def unsupported() -> UnsupportedMediaTypeError:
    """Return the error for a body in an encoding that is not decoded."""
    known = ", ".join(ENCODINGS)
    return UnsupportedMediaTypeError(
        f"the Content-Encoding of the body is not supported; use one of {known}, or none"
    )


def expects(request: web.BaseRequest) -> bool:
    """Return True if the client waits for a 100 Continue. Raises ExpectationError."""
    if "Expect" not in request.headers or request.version < HttpVersion11:
        return False
    if request.headers["Expect"].lower() != "100-continue":
        raise ExpectationError("the only supported Expect header is 100-continue")
    return True
