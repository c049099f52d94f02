"""Compressed bodies: what is in them, piece by piece, and what is wrong with them."""

import gzip
import os
import sys
import zlib
from collections.abc import Callable

import pytest

from router.web.server.content_encodings import PIECE_BYTES, BrokenEncodingError, Decoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


Pack = Callable[[bytes], bytes]
PACKS: list[tuple[str, Pack]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
]
packed = pytest.mark.parametrize(("encoding", "pack"), PACKS, ids=["gzip", "zlib", "raw", "zstd"])
CONTENTS = {
    "nothing": b"",
    "a word": b"word",
    "letters": b"a" * 3_000_000,
    "random": os.urandom(700_000),
}


def decoded(encoding: str, raw: bytes) -> list[bytes]:
    decoding, pieces = Decoding(encoding, raw), list[bytes]()
    while piece := decoding.piece():
        pieces.append(piece)
    return pieces


@packed
@pytest.mark.parametrize("data", CONTENTS.values(), ids=CONTENTS)
def test_what_was_packed_comes_out(encoding: str, pack: Pack, data: bytes) -> None:
    pieces = decoded(encoding, pack(data))
    assert b"".join(pieces) == data
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)


@packed
def test_a_cut_body_is_broken(encoding: str, pack: Pack) -> None:
    whole = pack(b"some words, and some more words")
    for end in range(len(whole)):
        with pytest.raises(BrokenEncodingError):
            decoded(encoding, whole[:end])


@packed
def test_what_is_behind_the_end_is_broken(encoding: str, pack: Pack) -> None:
    with pytest.raises(BrokenEncodingError):
        decoded(encoding, pack(b"words") + b"more")


@pytest.mark.parametrize(("encoding", "pack"), [PACKS[0], PACKS[3]], ids=["gzip", "zstd"])
def test_several_parts_are_one_body(encoding: str, pack: Pack) -> None:
    data = os.urandom(100_000)
    assert b"".join(decoded(encoding, pack(b"a") + pack(data) + pack(b"") + pack(b"c"))) == (
        b"a" + data + b"c"
    )
    with pytest.raises(BrokenEncodingError, match="too many parts"):
        decoded(encoding, pack(b"") * 1001)
