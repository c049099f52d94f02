"""Converted Anthropic and Responses bodies give exactly the tokens that the server sees.

A real server is the judge: its own count for the same body, and the head of the state file that
it saves after the answer (llama-server.md section 1.4).
"""

import struct
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from router.base.decoding import json_of
from router.base.tokens import Tokens, count, pack
from router.llama.bodies.anthropic import (
    anthropic_to_chat,
    dump_like_server,
    normalize_billing_header,
)
from router.llama.replies import field_from, ids_from
from router.llama.routes import Shape
from router.llama.wire import ChatPrompt, parse_completion, parse_request
from tests.support.models.tiny_models import CHAT_TEMPLATE, tiny_model
from tests.support.paths import TEMPLATES
from tests.support.servers.llama_server import LlamaServer

Json = dict[str, Any]
COUNTERS = {
    Shape.MESSAGES: "/v1/messages/count_tokens",
    Shape.RESPONSES: "/v1/responses/input_tokens",
}
PATHS = {Shape.MESSAGES: "/v1/messages", Shape.RESPONSES: "/v1/responses"}


def user(content: Any = "Hello!") -> Json:
    return {"role": "user", "content": content}


def assistant(*blocks: Any) -> Json:
    return {"role": "assistant", "content": list(blocks)}


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def thinking(value: str) -> Json:
    return {"type": "thinking", "thinking": value, "signature": "x"}


def use(name: str, given: Any, call: str = "toolu_1") -> Json:
    return {"type": "tool_use", "id": call, "name": name, "input": given}


def result(content: Any, call: str = "toolu_1") -> Json:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "A city: „Köln“"}, "n": {}},
    "required": ["city"],
}
WEATHER = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch=a5145;You are Claude"
ODD = {"e": 1e15, "s": 1.5e-7, "z": -0.0, "big": 2**63, "u": 'ü"\\\n\x01\x7f', "l": [1, None, True]}

ANTHROPIC: dict[str, Json] = {
    "plain": {"messages": [user()]},
    "system": {"system": "Be brief.", "messages": [user()]},
    "system empty": {"system": "", "messages": [user()]},
    "system null": {"system": None, "messages": [user()]},
    "system number": {"system": 7, "messages": [user()]},
    "system blocks": {
        "system": [
            text("One. ", cache_control={"type": "ephemeral"}),
            {"type": "image"},
            text("Two."),
        ],
        "messages": [user()],
    },
    "billing": {"system": BILLING, "messages": [user()]},
    "billing block": {"system": [text(BILLING), text("\n" + BILLING)], "messages": [user()]},
    "billing short": {"system": BILLING.replace("a5145", "a514"), "messages": [user()]},
    "billing at end": {"system": BILLING.partition(";You")[0], "messages": [user()]},
    "turns": {"messages": [user(), {"role": "assistant", "content": "Hi."}, user("Bye.")]},
    "blocks": {"messages": [user([text("One."), text(""), text("Two.", citations=[])])]},
    "no blocks": {"messages": [user([]), user("x")]},
    "dropped blocks": {"messages": [user([{"type": "document"}, "x", 3, text("y")])]},
    "content missing": {"messages": [user(), {"role": "assistant"}, user("again")]},
    "prefill": {"messages": [user(), assistant(text("Sure, "))]},
    "tools": {"tools": [WEATHER, CLOCK], "messages": [user()]},
    "bare tools": {"tools": [{"name": "x"}, {"name": "y", "type": "z"}], "messages": [user()]},
    "no tools": {"tools": [], "messages": [user()]},
    "tool_choice any": {"tools": [WEATHER], "tool_choice": {"type": "any"}, "messages": [user()]},
    "tool_choice tool": {
        "tools": [WEATHER, CLOCK],
        "tool_choice": {"type": "tool", "name": "clock"},
        "messages": [user()],
    },
    "tool_choice none": {"tools": [WEATHER], "tool_choice": {"type": "none"}, "messages": [user()]},
    "tool turn": {
        "system": "Use tools.",
        "tools": [WEATHER],
        "messages": [
            user(),
            assistant(text("Let me see."), use("get_weather", {"city": "Köln", "n": 1.0})),
            user([result("rain")]),
        ],
    },
    "tool turns": {
        "tools": [WEATHER, CLOCK],
        "messages": [
            user(),
            assistant(use("get_weather", {"city": "A"}), use("clock", None, "toolu_2")),
            user([result([text("sun"), text(" and rain")]), result("12:00", "toolu_2"), text("?")]),
            assistant(use("clock", {}, "toolu_3")),
            user([result(None, "toolu_3")]),
        ],
    },
    "tool arguments": {
        "tools": [CLOCK],
        "messages": [user(), assistant(use("clock", ODD)), user([result([{"type": "x"}])])],
    },
    "thinking": {
        "thinking": {"type": "enabled", "budget_tokens": 64},
        "messages": [
            user(),
            assistant(thinking("Hm. "), thinking("Yes."), text("Hi."), use("clock", {})),
            user([result("now")]),
            assistant(thinking("Only thought.")),
            user("So?"),
        ],
        "tools": [CLOCK],
    },
    "kwargs": {"chat_template_kwargs": {"enable_thinking": False}, "messages": [user()]},
    "others": {
        "messages": [user()],
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
        "temperature": 0.5,
        "reasoning_effort": "high",
        "id_slot": 1,
    },
}


def item(role: str, content: Any, **more: Any) -> Json:
    return {"role": role, "content": content, **more}


def said(*parts: Any, **more: Any) -> Json:
    return item("assistant", list(parts), type="message", **more)


def out(value: str) -> Json:
    return {"type": "output_text", "text": value, "annotations": []}


def call(name: str, arguments: str, call_id: str = "call_1") -> Json:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def answer(output: Any, call_id: str = "call_1") -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def reason(value: str) -> Json:
    return {"type": "reasoning", "summary": [], "content": [{"type": "x", "text": value}]}


FUNCTION = {"type": "function", "name": "get_weather", "description": "W", "parameters": SCHEMA}
LOOSE = {"type": "function", "name": "clock", "parameters": {"type": "object"}, "strict": False}
INPUT = {"type": "input_text", "text": "Hello!"}

RESPONSES: dict[str, Json] = {
    "text": {"input": "Hello!"},
    "instructions": {"instructions": "Be brief.", "input": "Hello!"},
    "instructions null": {"instructions": None, "input": "Hello!"},
    "items": {"input": [item("user", "One."), item("user", [INPUT, INPUT], type="message")]},
    "roles": {"input": [item("system", "S"), item("developer", "D"), item("user", [INPUT])]},
    "no parts": {"input": [item("user", []), item("user", "x")]},
    "said": {"input": [item("user", "a"), said(out("b"), status="completed", id="m")]},
    "said twice": {"input": [item("user", "a"), said(out("b")), said(out("c")), item("user", "d")]},
    "said as text": {
        "input": [item("user", "a"), item("assistant", "b", type="message"), item("user", "c")]
    },
    "said without content": {
        "input": [item("user", "a"), {"role": "assistant", "type": "message"}, item("user", "c")]
    },
    "tools": {"input": "x", "tools": [FUNCTION, LOOSE, {"type": "web_search"}]},
    "no function tools": {"input": "x", "tools": [{"type": "web_search"}, 3]},
    "tool_choice": {"input": "x", "tools": [LOOSE], "tool_choice": "required"},
    "call": {
        "tools": [FUNCTION],
        "input": [item("user", "a"), call("get_weather", '{"city": "Köln"}'), answer("rain")],
    },
    "call after text": {
        "input": [
            item("user", "a"),
            said(out("Let me see.")),
            call("get_weather", '{ "city":"A"}'),
            call("clock", "{}", "call_2"),
            answer([INPUT, INPUT]),
            answer("12", "call_2"),
        ]
    },
    "text after call": {
        "input": [item("user", "a"), call("clock", "{}"), said(out("b")), answer("12")]
    },
    "reasoning": {"input": [item("user", "a"), reason("Hm."), said(out("b")), item("user", "c")]},
    "reasoning and call": {
        "tools": [LOOSE],
        "input": [item("user", "a"), reason("Hm."), call("clock", "{}"), answer("12")],
    },
    "reasoning after text": {
        "input": [item("user", "a"), said(out("b")), reason("Hm."), item("user", "c")]
    },
    "effort": {"input": "x", "reasoning": {"effort": "high", "summary": "auto"}},
    "effort none": {"input": "x", "reasoning": {"effort": "none"}},
    "reasoning null": {"input": "x", "reasoning": None},
    "others": {
        "input": "x",
        "previous_response_id": None,
        "text": {"format": {"type": "json_object"}},
        "parallel_tool_calls": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "store": False,
    },
}


CORPORA = {Shape.MESSAGES: ANTHROPIC, Shape.RESPONSES: RESPONSES}


async def post(server: LlamaServer, path: str, raw: bytes) -> tuple[int, bytes]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url + path, data=raw) as response,
    ):
        return response.status, await response.read()


async def ask(server: LlamaServer, path: str, raw: bytes) -> bytes:
    status, payload = await post(server, path, raw)
    assert status == 200, (path, payload)
    return payload


async def predicted_tokens(server: LlamaServer, shape: Shape, body: Json) -> Tokens:
    source = parse_request(shape, body).prompt_source
    assert isinstance(source, ChatPrompt), source
    told = await ask(server, "/apply-template", orjson.dumps(source.body))
    rendered = field_from(told, "", "prompt", str)
    asked = {"content": rendered, "add_special": True, "parse_special": True}
    return pack(ids_from(await ask(server, "/tokenize", orjson.dumps(asked))))


async def slot_tokens(server: LlamaServer, folder: Path) -> Tokens:
    """Return the tokens of slot 0, from the head of its state file."""
    await ask(server, "/slots/0?action=save", b'{"filename": "head"}')
    raw = (folder / "head").read_bytes()
    marker, version, n = struct.unpack_from("<iII", raw, 12)
    assert (marker, version) == (-1, 1)
    return Tokens(raw[24 : 24 + 4 * n])


def model_with_template(template: str, folder: Path) -> Path:
    """Write the tiny model with another chat template in its metadata.

    A comment pads the template, so that the rest of the file stays aligned (to 32 bytes).
    """
    raw = tiny_model("llama").path.read_bytes()
    old = CHAT_TEMPLATE.encode()
    new = (TEMPLATES / template).read_bytes()
    new += b"{#-" + b" " * ((len(old) - len(new) - len(b"{#--#}")) % 32) + b"-#}"
    string = struct.Struct("<Q")
    path = folder / "model.gguf"
    path.write_bytes(raw.replace(string.pack(len(old)) + old, string.pack(len(new)) + new))
    return path


@pytest.mark.parametrize("template", ["everything.jinja", "Qwen-Qwen3-0.6B.jinja"])
@pytest.mark.parametrize("shape", CORPORA, ids=lambda shape: shape.value)
async def test_prompt_is_known_to_the_token(
    server_argv: list[str], tmp_path: Path, shape: Shape, template: str
) -> None:
    """One generated token leaves exactly the prompt in the slot (llama-server.md section 2.3)."""
    model = model_with_template(template, tmp_path)
    wrong = []
    async with LlamaServer(model, kv_dir=tmp_path / "kv", argv=server_argv) as server:
        for name, case in CORPORA[shape].items():
            body = {**case, "max_tokens" if shape is Shape.MESSAGES else "n_predict": 1}
            raw = orjson.dumps(body)
            predicted = await predicted_tokens(server, shape, body)
            assert orjson.dumps(body) == raw, "the conversion changed the client's body"
            counted = orjson.loads(await ask(server, COUNTERS[shape], raw))["input_tokens"]
            # Noise is no valid tool call: the answer may be an error, but the prompt is computed.
            await post(server, PATHS[shape], raw)
            held = await slot_tokens(server, tmp_path / "kv")
            if (counted, held) != (count(predicted), predicted):
                wrong.append(name)

    assert wrong == []


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (1e15, "1e+15"),
        (1.25e15, "1.25e+15"),
        (-1234567890123456.5, "-1.2345678901234565e+15"),
        (1e16, "1e+16"),
        (999999999999999.0, "999999999999999.0"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (5e-324, "5e-324"),
        (-0.0, "-0.0"),
        (2**64 - 1, "18446744073709551615"),
        ({"ä": ["\x01\n\x7f", True, None, {}]}, '{"ä":["\\u0001\\n\x7f",true,null,{}]}'),
    ],
)
def test_arguments_are_written_as_the_server_writes_them(value: object, written: str) -> None:
    """The expected texts are from nlohmann's serializer, which writes `tool_use.input`."""
    assert written == dump_like_server(value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (BILLING, BILLING.replace("a5145", "fffff")),
        (BILLING.replace("a5145", "äöx"), BILLING.replace("a5145", "fffff")),  # 5 bytes, not 3
        (" " + BILLING, " " + BILLING),
        ("x-anthropic-billing-header: none", "x-anthropic-billing-header: none"),
    ],
)
def test_billing_stamp(given: str, expected: str) -> None:
    """Only a prompt that begins with the header is changed, and only its first stamp."""
    assert expected == normalize_billing_header(given)


def test_stamp_of_a_chat_is_replaced_as_on_messages() -> None:
    """Regression: of 1,569 tokens 1,532 were computed for each request of a converter."""
    fixed = BILLING.replace("a5145", "fffff")
    for content, expected in ((BILLING, fixed), ([text(BILLING)], [text(fixed)])):
        body = {"messages": [{"role": "system", "content": content}, user()], "n": 1}
        parsed, sent = parse_completion(Shape.CHAT, orjson.dumps(body))
        wanted = body | {"messages": [{"role": "system", "content": expected}, user()]}
        assert orjson.loads(sent) == wanted
        assert parsed.body["messages"] == wanted["messages"]


@pytest.mark.parametrize(
    "message", [user(BILLING), {"role": "system", "content": " " + BILLING}, {"role": "system"}, 3]
)
def test_body_without_a_stamp_in_front_is_sent_as_it_came(message: object) -> None:
    raw = orjson.dumps({"messages": [message, user(BILLING)]})
    assert parse_completion(Shape.CHAT, raw)[1] is raw


@pytest.mark.parametrize("depth", [300, 480, 900])
def test_deep_arguments_of_a_tool(depth: int) -> None:
    """orjson reads 1,024 levels; Python's own recursion ends earlier."""
    deep = json_of(b'{"a":' * depth + b"1" + b"}" * depth)
    chat = anthropic_to_chat({"messages": [user(), assistant(use("clock", deep))]})

    (call,) = chat["messages"][1]["tool_calls"]
    assert call["function"]["arguments"] == '{"a":' * depth + "1" + "}" * depth
