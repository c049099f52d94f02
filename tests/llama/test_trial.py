"""Which fields the server may refuse, and the body in which it judges them."""

from typing import Any

import orjson
import pytest

from router.llama import trial
from router.llama.routes import Shape
from router.llama.wire import parse_request

GOOD: dict[str, Any] = {
    "prompt": "a",
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 1,
    "seed": 7,
    "max_tokens": 100,
    "stream": True,
    "stop": ["x"],
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 5,
    "tools": [],
    "tool_choice": "auto",
    "user": {"any": "thing"},
    "unknown_field": "x",
    "grammar": None,
}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, []),
        ({"temperature": "warm"}, ["temperature"]),
        ({"temperature": float("nan")}, ["temperature"]),
        ({"top_k": True}, ["top_k"]),
        ({"max_tokens": -2}, ["max_tokens"]),
        ({"stop": [1]}, ["stop"]),
        ({"logprobs": False}, ["top_logprobs"]),
        ({"top_logprobs": 50}, ["top_logprobs"]),
        ({"grammar": "root ::= a"}, ["grammar"]),
        ({"tools": [{}], "tool_choice": "required"}, ["tool_choice", "tools"]),
    ],
)
def test_fields_that_may_be_refused(fields: dict[str, Any], found: list[str]) -> None:
    parsed = parse_request(Shape.OAI_COMPLETION, GOOD | fields)
    assert sorted(trial.unproven(parsed)) == found


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {"n_predict": 0, "stream": True, "return_progress": True, "id_slot": 3}),
        ({"max_tokens": "x"}, {"max_tokens": "x", "stream": True, "id_slot": 3}),
        ({"stream": "x", "id_slot": "x"}, {"stream": "x", "n_predict": 0, "id_slot": 3}),
        ({"stream": False, "id_slot": 0}, {"stream": True, "id_slot": 3}),
        ({"return_progress": 7}, {"return_progress": 7}),
    ],
)
def test_a_wrong_field_is_sent_as_it_is(fields: dict[str, Any], sent: dict[str, Any]) -> None:
    body = {"prompt": "a", "grammar": "root ::= a"} | fields
    parsed = parse_request(Shape.COMPLETION, body)
    path, raw = trial.request(parsed, "/completion", orjson.dumps(body), 3)

    made = orjson.loads(raw)
    assert path == "/completion"
    assert made | sent == made
    assert ("n_predict" in made) == ("max_tokens" not in fields)


def test_routes_without_slots_are_tried_as_chats() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "top_k": "x"}
    parsed = parse_request(Shape.MESSAGES, body)
    path, raw = trial.request(parsed, "/v1/messages", orjson.dumps(body), 1)

    assert path == "/v1/chat/completions"
    assert orjson.loads(raw)["top_k"] == "x"
    assert orjson.loads(raw)["id_slot"] == 1


@pytest.mark.parametrize(("stream", "kept"), [(False, False), (True, True)])
def test_what_no_stream_may_have_is_left_out(stream: bool, kept: bool) -> None:
    chat = {"messages": [], "tools": [{}], "logprobs": True, "top_logprobs": 5, "stream": stream}
    parsed = parse_request(Shape.CHAT, chat)
    _, raw = trial.request(parsed, trial.CHAT_PATH, orjson.dumps(chat), 1)

    made = orjson.loads(raw)
    assert (made["logprobs"], made["top_logprobs"]) == ((True, 5) if kept else (None, None))


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_MOST_ACCEPTED", 2)
    accepted = trial.Accepted()
    for digest in (b"1", b"2", b"3"):
        accepted.add(digest)
    assert [digest in accepted for digest in (b"1", b"2", b"3")] == [False, True, True]
