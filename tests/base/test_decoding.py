"""Bytes that this process did not make: each failure is one error, and any depth is written."""

from collections.abc import Callable
from contextlib import suppress

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base import decoding
from router.base.decoding import UndecodableError, json_bytes, json_decoder, json_of, text_of
from router.base.types import Source
from router.core.model.plan import Quote
from router.hosts.messages import Hello, QuoteAsk, QuoteReply
from router.llama.bodies.anthropic import dump_like_server
from router.store.manifests import Manifest

Decode = Callable[[bytes], object]
JSON: list[type] = [Hello]
MSGPACK: list[type] = [QuoteAsk, QuoteReply, Manifest]
DECODERS: list[Decode] = [
    *map(json_decoder, JSON),
    *map(decoding.msgpack_decoder, MSGPACK),
    json_of,
    text_of,
]
ENTRY = QuoteReply(Quote(1.5, 0.25, 700, Source.SNAPSHOT))
HOSTILE = (b"[" * 100_000, b'{"name":"\xff', b"\x91" * 100_000, b'{"a":' * 5000, b"\xc1", b"")


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: repr(raw[:12]))
@pytest.mark.parametrize("decode", DECODERS)
def test_hostile_bytes(decode: Decode, raw: bytes) -> None:
    with suppress(UndecodableError):
        decode(raw)


@given(st.binary())
def test_any_bytes(raw: bytes) -> None:
    for decode in DECODERS:
        with suppress(UndecodableError):
            decode(raw)


def test_each_flipped_bit() -> None:
    kept = msgspec.msgpack.encode(ENTRY)
    decode = decoding.msgpack_decoder(QuoteReply)
    for at in range(8 * len(kept)):
        flipped = bytearray(kept)
        flipped[at // 8] ^= 1 << at % 8
        with suppress(UndecodableError):
            decode(bytes(flipped))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_deep_values_are_written_as_orjson_writes_flat_ones(value: object) -> None:
    assert decoding.written(value, orjson.dumps) == orjson.dumps(value) == json_bytes(value)


@pytest.mark.parametrize("opening", ['{"a":', "[", '[{"a":['])
def test_what_is_read_can_be_written(opening: str) -> None:
    """orjson reads 1,024 levels and writes 254."""
    closing = opening.translate({ord("{"): "}", ord("["): "]"})[::-1]
    closing = "".join(one for one in closing if one in "]}")
    n = 1000 // len(closing)
    raw = (opening * n + "1" + closing * n).encode()
    value = json_of(raw)
    assert json_bytes(value) == raw
    assert dump_like_server(value) == raw.decode()
    with pytest.raises(TypeError):
        orjson.dumps(value)
    assert json_bytes({"x": [value], "y": 1}).endswith(b'],"y":1}')
