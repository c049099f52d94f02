"""Requests are read as llama-server reads them and forwarded unchanged."""

import struct
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import BadRequestError
from router.base.tokens import Tokens, pack
from router.llama.replies import ids_from
from router.llama.routes import Shape
from router.llama.wire import (
    ChatPrompt,
    InfillPrompt,
    MixedPrompt,
    PromptSource,
    TextPrompt,
    TokenPrompt,
    UnknownPrompt,
    fingerprint,
    parse_body,
    parse_request,
    pin_slot,
    strip_slot,
)
from tests.conftest import StartServer
from tests.support.servers.llama_server import LlamaServer

Json = dict[str, Any]
BOM = b"\xef\xbb\xbf"

numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers
json_values = st.recursive(
    scalars | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
# Names that the code looks for, so that odd types occur in known fields.
NAMES = """prompt messages input content role type system tools n text n_predict max_tokens id_slot
stream output call_id source image_url thinking reasoning prompt_string tool_result tool_use image
function_call_output user assistant message input_image"""
words = st.sampled_from(NAMES.split()) | st.text(max_size=3)
odd_values = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=6),
    max_leaves=24,
)


def source(body: Json, shape: Shape = Shape.COMPLETION) -> PromptSource:
    return parse_request(shape, body).prompt_source


# --- Routes and bodies ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "line 1 column 1"),
        (b'{"a": 1,}', "line 1 column 8"),
        (b'{"a":\n 1', "line 2"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"{}{}", "line 1 column 3"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'"{}"', "not a string"),
        (b"null", "not null"),
        (b"true", "not a boolean"),
        (b"1.5", "not a number"),
        (b"[" * 5000, "not valid JSON"),
    ],
)
def test_unusable_body(raw: bytes, message: str) -> None:
    """The message names the position and contains nothing of the body."""
    with pytest.raises(BadRequestError, match=message):
        parse_body(raw)


@given(odd_values, st.sampled_from(list(Shape)))
def test_no_field_type_is_an_error(value: Any, shape: Shape) -> None:
    """A field of a wrong type raises no error here: the server answers the request."""
    shapes: list[Json] = [
        value if isinstance(value, dict) else {"prompt": value},
        {"messages": value, "input": value, "system": value, "tools": value, "n": value},
        {"messages": [value], "input": [value], "tools": [value], "tool_choice": value},
        {"messages": [{"role": "user", "content": value}], "metadata": value, "thinking": value},
        {"messages": [{"role": "user", "content": [value]}], "n_predict": value, "id_slot": value},
        {"input": [{"role": "user", "content": [value]}], "reasoning": value, "lora": value},
        {"input": [{"role": "assistant", "type": "message", "content": [value]}], "stream": value},
    ]
    for body in shapes:
        parsed = parse_request(shape, body)
        assert parsed.body is body


# --- Prompts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", TextPrompt("Hi")),
        ("", TextPrompt("")),
        ([1, 2, 3], TokenPrompt(pack([1, 2, 3]))),
        (["Hi"], TextPrompt("Hi")),
        ([[1, 2]], TokenPrompt(pack([1, 2]))),
        ([[]], TokenPrompt(pack([]))),
        ([1, "Hi", 2], MixedPrompt((1, "Hi", 2))),
        ([["Hi", 2]], MixedPrompt(("Hi", 2))),
        ({"prompt_string": "Hi"}, TextPrompt("Hi")),
        ([{"prompt_string": "Hi"}], TextPrompt("Hi")),
        ({"prompt_string": ["Hi", "you"]}, MixedPrompt(("Hi", "you"))),
        ({"prompt_string": [1, 2]}, TokenPrompt(pack([1, 2]))),
    ],
)
def test_prompt(prompt: Any, expected: PromptSource) -> None:
    """Prompts are read as by `tokenize_input_prompts`; a batch of one is a single prompt."""
    for shape in (Shape.COMPLETION, Shape.OAI_COMPLETION):
        parsed = parse_request(shape, {"prompt": prompt})
        assert expected == parsed.prompt_source
        assert parsed.tasks == 1


@pytest.mark.parametrize(
    "prompt",
    [
        *(None, 3, True, [], {}, [-1], ["a", -1], [2**31]),
        *([[1, None]], [[True]], [["a", "b"]], [1, "a", None], [1, 2.5]),
        *({"prompt_string": 3}, {"prompt_string": ["a", 2.5]}),
        {"prompt_string": "a", "multimodal_data": ["AA=="]},
    ],
)
def test_unknown_prompt(prompt: Any) -> None:
    parsed = parse_request(Shape.COMPLETION, {"prompt": prompt})
    assert isinstance(parsed.prompt_source, UnknownPrompt)
    assert parsed.tasks == 1


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [{"prompt_string": "a"}, "b"]])
def test_a_batch_has_a_task_for_each_prompt(prompt: Any) -> None:
    """A batch is an array without numbers; the server chooses the slots of its prompts."""
    parsed = parse_request(Shape.COMPLETION, {"prompt": prompt})
    assert parsed.tasks == 2
    assert isinstance(parsed.prompt_source, UnknownPrompt)


INFILL: Json = {"input_prefix": "a", "input_suffix": "b"}


def test_an_infill_body_is_read_in_parts() -> None:
    assert source(INFILL, Shape.INFILL) == InfillPrompt("a", "b")
    more = {"prompt": "c", "input_extra": [{"text": "t"}, {"text": "u", "filename": "f"}]}
    extra = (("tmp", "t"), ("f", "u"))
    assert source(INFILL | more, Shape.INFILL) == InfillPrompt("a", "b", "c", extra)


@pytest.mark.parametrize(
    "body",
    [
        {"input_prefix": "a"},
        {"input_suffix": "a"},
        INFILL | {"input_extra": "x"},
        INFILL | {"input_extra": None},
        INFILL | {"input_extra": ["x"]},
        INFILL | {"input_extra": [{"filename": "f"}]},
        INFILL | {"input_extra": [{"text": "t", "filename": 1}]},
    ],
)
def test_infill_body_that_the_server_refuses_is_refused_here(body: Json) -> None:
    found = source(body, Shape.INFILL)
    assert isinstance(found, UnknownPrompt)
    assert not found.legal


@pytest.mark.parametrize("prompt", [None, 5, [1], ["a"], {}])
def test_an_infill_prompt_of_another_type_counts_as_empty(prompt: object) -> None:
    assert source(INFILL | {"prompt": prompt}, Shape.INFILL) == InfillPrompt("a", "b")


def test_an_infill_body_with_ids_is_left_to_the_server() -> None:
    found = source(INFILL | {"input_prefix": [1, 2]}, Shape.INFILL)
    assert isinstance(found, UnknownPrompt)
    assert found.legal


PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("part", "payload"),
    [
        ({"type": "image_url", "image_url": {"url": PNG, "detail": "low"}}, "iVBORw0KGgo="),
        ({"type": "image_url", "image_url": {"url": "http://e.org/a"}}, "http://e.org/a"),
        ({"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}, "UklGRg=="),
        ({"type": "input_audio", "input_audio": {"data": 3, "url": "UklGRg=="}}, "UklGRg=="),
        ({"type": "input_video", "input_video": {"url": "http://e.org/v"}}, "http://e.org/v"),
        ({"type": "video_url", "video_url": {"url": "http://e.org/v"}}, "http://e.org/v"),
    ],
)
def test_media_keeps_its_place_but_not_its_payload(part: Json, payload: str) -> None:
    text = {"type": "text", "text": "What is this?"}
    body: Json = {"messages": [{"role": "user", "content": [text, part, text]}]}
    before = orjson.dumps(body)
    parsed = source(body, Shape.CHAT)

    assert isinstance(parsed, ChatPrompt)
    assert parsed.media == (fingerprint(payload),)
    content = parsed.body["messages"][0]["content"]
    assert [content[0], content[2]] == [text, text]
    assert content[1]["type"] == part["type"]
    assert payload.encode() not in orjson.dumps(parsed.body)
    assert before == orjson.dumps(body)


def test_media_of_converted_bodies_in_order_of_appearance() -> None:
    """A picture has the same fingerprint on every route."""
    anthropic = {"type": "base64", "media_type": "image/png", "data": "QQ=="}
    image = {"type": "image", "source": anthropic}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [image]}
    url = {"type": "image", "source": {"type": "url", "url": "http://e.org"}}
    messages = source({"messages": [{"role": "user", "content": [url, result]}]}, Shape.MESSAGES)
    given = [{"type": "input_image", "image_url": "data:image/png;base64,QQ=="}]
    responses = source({"input": [{"role": "user", "content": given}]}, Shape.RESPONSES)

    assert isinstance(messages, ChatPrompt)
    assert isinstance(responses, ChatPrompt)
    assert messages.media == (fingerprint("http://e.org"), fingerprint("QQ=="))
    assert responses.media == (fingerprint("QQ=="),)


def test_media_without_payload_is_left_to_the_server() -> None:
    part = {"type": "image_url", "image_url": {"url": 3}}
    body: Json = {"messages": [{"role": "user", "content": [part]}]}
    assert source(body, Shape.CHAT) == ChatPrompt(body)


# --- Fields -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"n_predict": 5, "max_completion_tokens": 4, "max_tokens": 3}, 5),
        ({"max_completion_tokens": 4, "max_tokens": 3}, 4),
        ({"n_predict": None, "max_tokens": 3}, 3),
        ({"max_tokens": 2.9}, 2),
        ({"n_predict": -1, "max_tokens": 3}, None),
        ({"max_tokens": "3"}, None),
        ({"max_tokens": 2**40}, None),
        ({"n_predict": 0}, 0),
    ],
)
def test_max_new_tokens(fields: Json, expected: int | None) -> None:
    assert expected == parse_request(Shape.CHAT, {"messages": [], **fields}).max_new_tokens


def test_fields_of_converted_bodies() -> None:
    """/v1/messages forwards almost no field, /v1/responses forwards every field."""
    fields = {"id_slot": 1, "n": 2, "n_predict": 7, "cache_prompt": False, "lora": [{"id": 0}]}
    fields |= {"n_cache_reuse": 8}
    messages = parse_request(Shape.MESSAGES, {"messages": [], **fields})
    responses = parse_request(Shape.RESPONSES, {"input": "x", "max_output_tokens": 9, **fields})

    assert (messages.slot_hint, messages.pinnable, messages.max_new_tokens) == (None, False, 4096)
    assert (messages.tasks, messages.cache_prompt, messages.lora) == (1, True, False)
    assert (messages.shifts, responses.shifts) == (False, True)
    assert (responses.slot_hint, responses.pinnable, responses.max_new_tokens) == (1, True, 7)
    assert (responses.tasks, responses.cache_prompt, responses.lora) == (2, False, True)


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"model": "a"}, "model", "a"),
        ({"model": 3}, "model", None),
        ({"stream": True}, "stream", True),
        ({"stream": 1}, "stream", False),
        ({"id_slot": -1}, "slot_hint", None),
        ({"id_slot": "1"}, "slot_hint", None),
        ({"id_slot": 0}, "slot_hint", 0),
        ({}, "shifts", False),
        ({"n_cache_reuse": 0}, "shifts", False),
        ({"n_cache_reuse": 0.9}, "shifts", False),
        ({"n_cache_reuse": 1.9}, "shifts", True),
        ({"n_cache_reuse": True}, "shifts", True),
        ({"n_cache_reuse": None}, "shifts", True),  # null: the server's own setting
        ({"n": 1}, "tasks", 1),
        ({"n_cmpl": 1, "n": 2}, "tasks", 1),
        ({"n_cmpl": None, "n": 2}, "tasks", 2),
        ({"cache_prompt": None}, "cache_prompt", True),
        ({"lora": []}, "lora", False),
        ({"response_fields": ["content"]}, "counts_asked", ["content", "timings"]),
        ({"response_fields": ["content", 1]}, "counts_asked", None),  # ignored: no strings
    ],
)
def test_field(fields: Json, attribute: str, expected: object) -> None:
    parsed = parse_request(Shape.COMPLETION, {"prompt": "x", **fields})
    assert expected == getattr(parsed, attribute)


# --- Pinning ----------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text() | st.just("id_slot"), json_values, max_size=5),
    st.integers(0, 999),
    st.sampled_from([b"", BOM, b" \n\t", BOM + b"\r\n"]),
    st.booleans(),
)
def test_pinned_body_says_the_same(body: Json, slot: int, before: bytes, indent: bool) -> None:
    """Pinning changes only `id_slot`; stripping removes only `id_slot`."""
    raw = before + orjson.dumps(body, option=orjson.OPT_INDENT_2 if indent else 0) + b"\n"
    parsed = parse_body(raw)
    pinned = pin_slot(raw, parsed, slot)

    assert parse_body(pinned) == {**parsed, "id_slot": slot}
    parsed.pop("id_slot", None)
    assert parse_body(strip_slot(raw, parse_body(raw))) == parsed


def test_pinning_changes_no_other_byte() -> None:
    """Numbers and escapes stay, even where a serializer would write them differently."""
    raw = b'\xef\xbb\xbf { "a" : 1E5, "b": "\\u0041", "a": 10000000000000000000000 }'
    pinned = pin_slot(raw, parse_body(raw), 3)

    assert pinned == raw.replace(b"{", b'{"id_slot":3,', 1)
    assert strip_slot(raw, parse_body(raw)) is raw
    assert pin_slot(b" { } ", {}, 0) == b' {"id_slot":0 } '
    escaped = b'{"id\\u005fslot": 7, "a": "{"}'
    assert parse_body(pin_slot(escaped, parse_body(escaped), 1)) == {"id_slot": 1, "a": "{"}


# --- Against a real server --------------------------------------------------------------------


async def post(server: LlamaServer, path: str, raw: bytes) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=raw) as response,
    ):
        return response.status, await response.read()


async def slot_tokens(server: LlamaServer, folder: Path) -> Tokens:
    status, _ = await post(server, "/slots/0?action=save", b'{"filename": "head"}')
    assert status == 200
    raw = (folder / "head").read_bytes()
    n = struct.unpack_from("<I", raw, 20)[0]
    return Tokens(raw[24 : 24 + 4 * n])


@pytest.mark.parametrize(
    "prompt",
    [
        *("Hello, world!", ["The quick brown fox"], [40, 41, 42], [[50, 51]]),
        [60, "Hi <|im_end|>", 61],
        ["Hi", 61],
        {"prompt_string": ["Hi", "you", 61]},
    ],
)
async def test_prompt_source_gives_the_slot_s_tokens(
    llama_server: StartServer, tmp_path: Path, prompt: Any
) -> None:
    """`gemma3` adds a BOS, which shows where special tokens are added."""
    server = await llama_server("gemma3", slots=1)
    given_source = source({"prompt": prompt})
    match given_source:
        case TokenPrompt(tokens):
            predicted = tokens
        case TextPrompt(content) | MixedPrompt(content):
            body = {"content": content, "add_special": True, "parse_special": True}
            _, payload = await post(server, "/tokenize", orjson.dumps(body))
            predicted = pack(ids_from(payload))
        case _:
            pytest.fail(f"{given_source}")
    status, _ = await post(server, "/completion", orjson.dumps({"prompt": prompt, "n_predict": 1}))

    assert status == 200
    assert predicted == await slot_tokens(server, tmp_path / "kv")


async def test_limits_are_read_as_the_server_reads_them(llama_server: StartServer) -> None:
    server = await llama_server()
    for fields in (
        {"n_predict": 5, "max_completion_tokens": 4, "max_tokens": 3},
        {"max_completion_tokens": 4, "max_tokens": 3},
        {"n_predict": None, "max_tokens": 3},
        {"max_tokens": 2.9},
    ):
        body = {"prompt": "Hi", "ignore_eos": True, **fields}
        raw = pin_slot(orjson.dumps(body), body, 1)
        answer = orjson.loads((await post(server, "/completion", raw))[1])

        assert answer["id_slot"] == 1
        expected = parse_request(Shape.COMPLETION, body).max_new_tokens
        assert expected == answer["tokens_predicted"]
