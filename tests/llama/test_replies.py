"""Reported counts, times and ids are found in the bytes of an answer, on every route."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import BackendError
from router.base.tokens import Tokens, count, head, join, pack
from router.base.types import Reported, Transfer
from router.llama.listings import merge_models
from router.llama.replies import (
    error_message_from,
    field_from,
    ids_from,
    models_from,
    props_from,
    read_reply,
    slots_from,
    tokens_seen,
    transfer_from,
    with_counts,
)
from router.llama.routes import Shape
from tests.conftest import StartServer
from tests.support.servers.llama_server import LlamaServer

Json = dict[str, Any]
N_NEW = 6
MESSAGES = [{"role": "user", "content": "Is it raining in London?"}]
PATHS: dict[Shape, tuple[str, Json]] = {
    Shape.COMPLETION: ("/completion", {"prompt": "The quick brown fox", "n_predict": N_NEW}),
    Shape.OAI_COMPLETION: ("/v1/completions", {"prompt": "The quick", "max_tokens": N_NEW}),
    Shape.CHAT: ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": N_NEW}),
    Shape.MESSAGES: ("/v1/messages", {"messages": MESSAGES, "max_tokens": N_NEW}),
    Shape.RESPONSES: ("/v1/responses", {"input": "Is it raining?", "max_output_tokens": N_NEW}),
}


async def call(server: LlamaServer, path: str, body: Json | None = None) -> bytes:
    async with aiohttp.ClientSession() as session:
        method = "GET" if body is None else "POST"
        async with session.request(method, server.url + path, json=body) as response:
            return await response.read()


async def reply(server: LlamaServer, shape: Shape, stream: bool = False, **fields: Any) -> Reported:
    path, body = PATHS[shape]
    raw = await call(server, path, {"temperature": 0, **body, "stream": stream, **fields})
    return read_reply(shape, stream, raw)


async def held(server: LlamaServer, folder: Path) -> Tokens:
    """Return the tokens of slot 0, from the head of its state file (llama-server.md 1.4)."""
    await call(server, "/slots/0?action=save", {"filename": "head"})
    raw = (folder / "kv" / "head").read_bytes()
    return Tokens(raw[24 : 24 + 4 * struct.unpack_from("<I", raw, 20)[0]])


# --- Completions of a real server -------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "stream", "fields"),
    [
        (Shape.COMPLETION, True, {}),
        (Shape.COMPLETION, True, {"return_progress": True, "timings_per_token": True}),
        (Shape.COMPLETION, False, {"return_tokens": True}),
        (Shape.OAI_COMPLETION, True, {"verbose": True, "return_progress": True}),
        (Shape.OAI_COMPLETION, False, {"verbose": True, "return_tokens": True}),
        (Shape.CHAT, False, {"verbose": True, "return_tokens": True}),
        (Shape.COMPLETION, True, {"grammar": 'root ::= "fox"'}),  # ends by itself
    ],
)
async def test_ids_where_the_answer_carries_them(
    llama_server: StartServer, tmp_path: Path, shape: Shape, stream: bool, fields: Json
) -> None:
    """Prompt and ids equal the slot's tokens, less the last id: it was never computed."""
    server = await llama_server(slots=1)
    said = await reply(server, shape, stream, **fields)
    in_slot = await held(server, tmp_path)

    assert said.generated is not None
    assert said.prompt_tokens is not None
    assert said.generated_tokens == count(said.generated)
    assert join([head(in_slot, said.prompt_tokens), said.generated])[:-4] == in_slot


async def test_ids_that_a_stream_swallows_are_not_made_up(llama_server: StartServer) -> None:
    """Only the last of the three tokens of one character is sent."""
    server = await llama_server(slots=1)
    fields = {"grammar": 'root ::= "日本"'}
    streamed = await reply(server, Shape.COMPLETION, True, **fields)
    whole = await reply(server, Shape.COMPLETION, False, return_tokens=True, **fields)

    assert (streamed.generated, streamed.text) == (None, "日本")
    assert streamed.generated_tokens == whole.generated_tokens == count(whole.generated or pack([]))


# --- Bytes ------------------------------------------------------------------------------------

CHUNKS = [
    b'data: {"index":0,"content":"a","tokens":[5],"tokens_predicted":1,"tokens_evaluated":9}\n\n',
    b'data: {"index":0,"content":"b","tokens":[6],"tokens_predicted":2,"tokens_evaluated":9}\n\n',
    b'data: {"index":0,"content":"","tokens":[],"tokens_predicted":2,"tokens_evaluated":9,'
    b'"timings":{"cache_n":4,"prompt_n":5,"prompt_ms":250.0,"predicted_ms":500}}\n\n',
]
WHOLE = Reported(9, 4, 0.25, 2, 0.5, pack([5, 6]), "ab")


def native(chunks: list[bytes] | bytes, **options: Any) -> Reported:
    return read_reply(Shape.COMPLETION, True, chunks, **options)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw,
        lambda raw: raw.replace(b"\n", b"\r\n"),
        lambda raw: raw.replace(b"\n", b"\r"),
        lambda raw: b":\n\n" + raw.replace(b"\n\n", b"\n\n: ping\n\n") + b"data: [DONE]\n\n",
        lambda raw: raw.replace(b"data: ", b"data:"),
        lambda raw: raw.replace(b"data: ", b"id: 7\nevent: x\ndata: "),
        lambda raw: raw.replace(b'"tokens"', b'\ndata: "tokens"'),  # an event in two lines
        lambda raw: raw[:-2],
        lambda raw: raw + b'data: {"error":{"code":500,"message":"x","type":"server_error"}}\n\n',
        lambda raw: raw + b'data: {"index":0,"content":"c","tok',
    ],
)
def test_event_stream(change: Callable[[bytes], bytes]) -> None:
    assert native(change(b"".join(CHUNKS))) == WHOLE


@given(st.integers(0, sum(map(len, CHUNKS))))
def test_cut_anywhere(end: int) -> None:
    """A cut answer reports what its whole events say, however it is split into chunks."""
    raw = b"".join(CHUNKS)[:end]
    said = native(raw)
    n_whole = len(
        [chunk for i, chunk in enumerate(CHUNKS) if len(b"".join(CHUNKS[: i + 1])) <= end]
    )

    assert said.text in {None, "a", "ab"}
    assert said.generated_tokens in {n_whole or None, min(n_whole + 1, 2)}
    assert said == native([raw[:7], raw[7:40], raw[40:]])


def test_missing_middle() -> None:
    """The totals of the last event stand; the generated tokens are unknown."""
    raw = b"".join(CHUNKS)
    said = native([raw[:30], raw[120:]], complete=False)
    assert said == Reported(9, 4, 0.25, 2, 0.5)


@pytest.mark.parametrize("encoding", ["gzip", "br", "x"])
def test_encoded_bytes_are_not_looked_at(encoding: str) -> None:
    assert native(CHUNKS, content_encoding=encoding) == Reported()
    assert native(CHUNKS, content_encoding="identity") == WHOLE


def test_missing_timings() -> None:
    said = native(CHUNKS[:2])
    assert said == Reported(prompt_tokens=9, generated_tokens=2, generated=pack([5, 6]), text="ab")


CALL = [{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]
REASONING_ITEM = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "b"}]}


@pytest.mark.parametrize(
    ("shape", "events"),
    [
        (Shape.CHAT, [{"choices": [{"message": {"content": "a", "reasoning_content": "b"}}]}]),
        (Shape.CHAT, [{"choices": [{"message": {"content": None, "tool_calls": CALL}}]}]),
        (Shape.CHAT, [{"choices": [{"delta": {"reasoning_content": "b"}}]}]),
        (
            Shape.CHAT,
            [
                {"choices": [{"delta": {"content": "a"}}]},
                {"choices": [{"delta": {"tool_calls": CALL}}]},
            ],
        ),
        (
            Shape.MESSAGES,
            [
                {
                    "type": "message",
                    "content": [
                        {"type": "thinking", "thinking": "b"},
                        {"type": "text", "text": "a"},
                    ],
                }
            ],
        ),
        (Shape.MESSAGES, [{"type": "content_block_start", "content_block": {"type": "tool_use"}}]),
        (Shape.MESSAGES, [{"type": "content_block_delta", "delta": {"type": "thinking_delta"}}]),
        (Shape.RESPONSES, [{"object": "response", "output": [REASONING_ITEM]}]),
        (
            Shape.RESPONSES,
            [
                {"type": "response.output_text.delta", "delta": "a"},
                {"type": "response.output_item.added", "item": {"type": "function_call"}},
            ],
        ),
    ],
)
def test_text_that_cannot_be_rebuilt_is_none(shape: Shape, events: list[Json]) -> None:
    """Templates write reasoning and calls in their own ways, which the answer does not show."""
    raw = b"".join(b"data: " + orjson.dumps(event) + b"\n\n" for event in events)
    assert read_reply(shape, True, raw).text is None
    if len(events) == 1:
        assert read_reply(shape, False, orjson.dumps(events[0])).text is None


NAMES = """index content tokens tokens_predicted timings cache_n prompt_n prompt_ms prompt_progress
usage input_tokens prompt_tokens choices message delta type response output item content_block
message_start response.completed response.output_item.added object __verbose text total error"""
words = st.sampled_from(NAMES.split()) | st.text(max_size=2)
odd_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | words
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=6),
    max_leaves=24,
)


@given(st.sampled_from(Shape), st.booleans(), st.lists(odd_values, max_size=4), st.binary())
def test_never_raises(shape: Shape, stream: bool, events: list[Any], noise: bytes) -> None:
    lines = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events]
    for raw in (b"".join(lines), noise, b"".join(lines) + noise, *map(orjson.dumps, events)):
        assert isinstance(read_reply(shape, stream, raw), Reported)
        assert read_reply(shape, stream, raw, complete=False).text is None


# --- Control calls ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read", "payload", "message"),
    [
        (props_from, b"<html>", "GET /props is malformed: total_slots is not an integer"),
        (props_from, {"total_slots": True}, "total_slots is not an integer"),
        (props_from, {"role": "router", "model_path": "none"}, "role is router"),
        (props_from, {"total_slots": 1}, "default_generation_settings/n_ctx is not an integer"),
        (models_from, b"{}", "data is not an array"),
        (models_from, {"data": [{"id": "a"}]}, "data/0/meta/n_vocab is not an integer"),
        (models_from, {"data": [{}]}, "GET /v1/models is malformed: id is not a string"),
        (slots_from, {"error": {}}, "it is not an array"),
        (slots_from, [{"id": 0, "n_ctx": 1}], "is_processing is not a boolean"),
        (slots_from, [3], "id is not an integer"),
        (ids_from, {"tokens": ["a"]}, "no token id"),
        (ids_from, {"tokens": [2**31]}, "no token id"),
        (lambda told: field_from(told, "", "prompt", str), {"prompt": 3}, "prompt is not a string"),
    ],
)  # fmt: skip
def test_malformed_control_answer(
    read: Callable[[object], object], payload: object, message: str
) -> None:
    with pytest.raises(BackendError, match=message):
        read(payload)


def test_transfer() -> None:
    answer = {"n_saved": 3, "n_written": 40, "timings": {"save_ms": 5}}
    assert transfer_from(answer, "save") == Transfer(3, 40, 0.005)
    with pytest.raises(BackendError, match="a slot restore is malformed: n_restored"):
        transfer_from(answer, "restore")
    assert error_message_from(b"nonsense") == error_message_from(b"[]") == ""


def test_each_model_is_listed_once() -> None:
    """As the first server that has it lists it."""
    first = {"data": [{"id": "m", "n": 1}], "models": [{"name": "m"}]}
    second = {"data": [{"id": "m", "n": 2}, {"id": "n"}, {}], "models": [{"name": "n"}]}

    merged = merge_models([orjson.dumps(first), orjson.dumps(second)])

    assert merged["data"] == [{"id": "m", "n": 1}, {"id": "n"}, {}]
    assert merged["models"] == [{"name": "m"}, {"name": "n"}]


def test_tokens_of_a_stream_that_broke_off_are_counted() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    first = b'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}\n\n'
    whole = [first, *[event] * 40, b'data: {"choi']
    assert tokens_seen(whole, sum(map(len, whole))) in (40, 41)
    assert tokens_seen([event] * 10, 40 * len(event)) == 40  # its middle was not kept
    assert tokens_seen([], 0) == 0
    assert tokens_seen([b'{"error":{}}'], 12) == 0


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        (b'..."timings":{"cache_n":40,"prompt_n":60,"predicted_n":900}}', (100, 40, 900)),
        (b'..."usage":{"completion_tokens":7,"prompt_tokens":9}}', (9, 0, 7)),
        (b'"tokens_predicted":12,"tokens_evaluated":5', (None, None, 12)),
        (rb'"content":"\"predicted_n\":5"', (None, None, None)),  # in a text
    ],
)
def test_counts_at_the_end_of_an_answer_that_is_not_read_whole(
    ends: bytes, told: tuple[int | None, int | None, int | None]
) -> None:
    found = with_counts(Reported(), [b"{...", ends])
    assert (found.prompt_tokens, found.cached_tokens, found.generated_tokens) == told
