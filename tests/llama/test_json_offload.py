import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.base import decoding
from router.base.decoding import UndecodableError, json_of
from router.base.tokens import PIECE
from router.llama import json_offload


async def test_what_is_long_is_read_in_a_thread() -> None:
    here = threading.get_ident()
    assert await json_offload.read(b"x" * json_offload.LONG_BYTES, threading.get_ident) == here
    assert (
        await json_offload.read(b"x" * (json_offload.LONG_BYTES + 1), threading.get_ident) != here
    )


def outcome(loads: Callable[[bytes], Any], raw: bytes) -> tuple[str, int]:
    """Return the result with types and key order, which `==` ignores; or the error."""
    try:
        return repr(loads(raw)), -1
    except UndecodableError as error:  # the message has the position
        return str(error), -2


# Bodies that are read in pieces, and bodies that differ from them in a character or two.
numbers = st.integers(-1000, 2**66).map(str) | st.sampled_from(["-0", "01", "", " ", "-", "1 2"])
ids = st.lists(numbers, max_size=12).map(",".join)
plain = st.lists(st.integers(0, 99).map(str), min_size=1, max_size=12).map(", ".join)
values = st.one_of(
    plain.map("[{}]".format),
    ids.map("[{}]".format),
    plain.map('"[{}]"'.format),
    plain.map("[[{}]]".format),
    plain.map('{{"prompt": [{}]}}'.format),
    st.sampled_from(["1", '"x"', "[4611686018427387904]", "[4.611686018427388e18]", "null", "[]"]),
)
keys = st.sampled_from(['"prompt"', '"tokens"', '"n"', "n"])
members = st.tuples(keys, values).map(": ".join)
objects = st.lists(members, max_size=4).map(", ".join).map("{{{}}}".format)
texts = st.one_of(objects, values, st.text(alphabet='[]{}",:1 2\t\\', max_size=30))


@settings(max_examples=600, deadline=None)
@given(texts, st.integers(0, 40), st.sampled_from(["", "]", "}", ",", " ", "\ud800"]))
@example('{"prompt": [1,2,3,4,5,6,7,8,9], "prompt": "x"}', 0, "")
@example('{"prompt": "x", "n": 1, "prompt": [1,2,3,4,5,6,7,8,9]}', 0, "")
@example('{"prompt": [1,2,3,4,5,6,7,8,9,]}', 0, "")
@example('{"prompt": [1,2,3,,4,5,6,7,8,9]}', 0, "")
@example('{"n": [4.611686018427387904e18], "prompt": [1,2,3,4,5,6,7,8,9,10,11,12,13,14]}', 0, "")
@example('{"n": [4611686018427387904], "prompt": [1,2,3,4,5,6,7,8,9,10,11,12,13,14]}', 0, "")
def test_the_same_as_in_one_go(text: str, at: int, more: str) -> None:
    """Result, types and key order are equal, or the error and its position."""
    raw = (text[:at] + more + text[at:]).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_offload, "LONG_BYTES", 0)
        patch.setattr(json_offload, "_PIECE_BYTES", 4)
        assert outcome(json_offload.loads, raw) == outcome(json_of, raw)


@pytest.mark.parametrize("shape", ['{"prompt":[%b]}', '{"a":"[1]","prompt":[%b],"stop":["]"]}'])
def test_no_step_reads_much(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    loads = decoding.json_of

    def noted(raw: bytes) -> object:
        sizes.append(len(raw))
        return loads(raw)

    raw = shape.encode() % b", ".join([b"12345"] * 200_000)
    monkeypatch.setattr(json_offload, "json_of", noted)
    found = json_offload.loads(raw)
    monkeypatch.undo()
    assert found == orjson.loads(raw)
    assert max(sizes) < 140_000 < len(raw) < sum(sizes) * 1.1


def test_an_array_that_nobody_needs_is_let_go() -> None:
    """The array is kept if the body will be rewritten (`id_slot`, `cache_prompt`)."""
    ids = [7] * (PIECE + 1)
    body: dict[str, Any] = {"prompt": ids, "n_predict": 1}
    json_offload.forget_ids(body)
    assert (body, ids) == ({"prompt": None, "n_predict": 1}, [])
    for kept in ({"prompt": [1], "id_slot": 0}, {"prompt": [1], "cache_prompt": True}):
        before = dict(kept)
        json_offload.forget_ids(kept)
        assert kept == before


def test_a_number_that_is_there_already_is_not_looked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that sends many such numbers could cause a search of the body for each."""
    asked: list[int] = []

    def drawn(bits: int) -> int:
        asked.append(bits)
        return 7

    monkeypatch.setattr("secrets.randbits", drawn)
    raw = orjson.dumps({"x": [2**62 + 7], "prompt": [1] * json_offload.LONG_BYTES})
    assert json_offload.loads(raw) == orjson.loads(raw)
    assert len(asked) == 1
