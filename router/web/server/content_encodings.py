"""Content-Encodings of bodies: decoded a piece at a time, so that a limit can end it.

A piece takes about a millisecond, most of it without the interpreter's lock: decode in a thread.
"""

import sys
import zlib
from collections.abc import Callable, Generator, Iterator

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 256 * 1024
_FED_BYTES = 64 * 1024
_MOST_MEMBERS = 1000  # of gzip, or frames of zstd: each costs a copy of what is fed behind it
_GZIP, _ZLIB, _RAW_DEFLATE = 31, 15, -15  # window bits
_DEFLATED = 8  # the method of a zlib stream, in the low half of its first byte (RFC 1950)


class BrokenEncodingError(ValueError):
    """The bytes are not of their encoding, or end too early."""


def _gzip(raw: bytes) -> Iterator[bytes]:
    at = 0
    for _ in range(_MOST_MEMBERS):
        at = yield from _inflated(raw, at, _GZIP)
        if at == len(raw):
            return
    raise BrokenEncodingError("it has too many parts")


def _deflate(raw: bytes) -> Iterator[bytes]:
    """Yield what is in a zlib stream, or in one without its head, as some clients send it."""
    has_head = bool(raw) and raw[0] & 0x0F == _DEFLATED
    at = yield from _inflated(raw, 0, _ZLIB if has_head else _RAW_DEFLATE)
    if at != len(raw):
        raise BrokenEncodingError("something is behind its end")


def _inflated(raw: bytes, at: int, window_bits: int) -> Generator[bytes, None, int]:
    """Yield the pieces of one stream that begins at `at`; return where it ends."""
    decoder, view = zlib.decompressobj(window_bits), memoryview(raw)
    while not decoder.eof:
        data: bytes | memoryview = view[at : at + _FED_BYTES]
        at += len(data)
        if not data:
            raise BrokenEncodingError("it ends too early")
        while data and not decoder.eof:
            if piece := decoder.decompress(data, PIECE_BYTES):
                yield piece
            data = decoder.unconsumed_tail
    return at - len(decoder.unused_data)


def _zstd(raw: bytes) -> Iterator[bytes]:
    at = 0
    for _ in range(_MOST_MEMBERS):
        decoder, view = zstd.ZstdDecompressor(), memoryview(raw)
        while not decoder.eof:
            data = view[at : at + _FED_BYTES] if decoder.needs_input else b""
            at += len(data)
            if decoder.needs_input and not data:
                raise BrokenEncodingError("it ends too early")
            if piece := decoder.decompress(data, PIECE_BYTES):
                yield piece
        at -= len(decoder.unused_data)
        if at == len(raw):
            return
    raise BrokenEncodingError("it has too many parts")


_DECODERS: dict[str, Callable[[bytes], Iterator[bytes]]] = {
    "gzip": _gzip,
    "deflate": _deflate,
    "zstd": _zstd,
}
ENCODINGS = tuple(_DECODERS)


class Decoding:
    """The decoding of one body. Each call of `piece` may be in another thread."""

    def __init__(self, encoding: str, raw: bytes) -> None:
        self._pieces = _DECODERS[encoding](raw)

    def piece(self) -> bytes:
        """Return the next bytes; none at the end. Blocking. Raises BrokenEncodingError."""
        try:
            return next(self._pieces, b"")
        except (zlib.error, zstd.ZstdError) as error:
            raise BrokenEncodingError(str(error)) from error
