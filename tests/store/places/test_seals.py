"""`router.store.places.seals`: what leaves this host is encrypted, and cannot be exchanged."""

import os

import pytest

from router.base.errors import KvFileError
from router.store.blobs.buffer import Buffer
from router.store.places.seals import PIECE, Sealed

SIZES = [0, 1, 100, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5]


def sealed(raw: bytes, name: str = "blobs/a", key: bytes = b"key") -> bytearray:
    return bytearray(Sealed(key).seal(name, memoryview(raw), Buffer()))


def opened(
    content: bytes | bytearray, size: int, name: str = "blobs/a", key: bytes = b"key"
) -> bytes:
    into = bytearray(size)
    Sealed(key).open(name, memoryview(content), memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_is_opened(size: int) -> None:
    raw = os.urandom(size)
    content = sealed(raw)

    assert len(content) == Sealed(b"key").sealed_bytes(size)
    assert opened(content, size) == raw
    assert size < 16 or raw[:16] not in content


def test_the_same_bytes_are_never_sealed_the_same() -> None:
    assert sealed(b"x" * 100) != sealed(b"x" * 100)


@pytest.mark.parametrize("at", [0, 15, 16, 40, -1, PIECE + 40])
def test_a_flipped_bit_is_noticed(at: int) -> None:
    raw = os.urandom(PIECE + 100)
    content = sealed(raw)
    content[at] ^= 1
    with pytest.raises(KvFileError, match="damaged"):
        opened(content, len(raw))


def test_it_opens_under_its_name_and_key_only() -> None:
    content = sealed(b"x" * 100)
    for options in ({"name": "blobs/b"}, {"key": b"other"}):
        with pytest.raises(KvFileError, match="another key"):
            opened(content, 100, **options)


def test_pieces_cannot_be_cut_off_or_exchanged() -> None:
    raw = os.urandom(3 * PIECE)
    content, one = sealed(raw), PIECE + 16
    with pytest.raises(KvFileError, match="damaged"):
        opened(content[: 16 + 2 * one], 2 * PIECE)
    with pytest.raises(KvFileError, match="size"):
        opened(content[:-1], len(raw))
    first, second = content[16 : 16 + one], content[16 + one : 16 + 2 * one]
    with pytest.raises(KvFileError, match="damaged"):
        opened(content[:16] + second + first + content[16 + 2 * one :], len(raw))
