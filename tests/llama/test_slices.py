"""Answers in slices: which can be, what each slice asks for, and the merged answer."""

import json
from typing import Any

import pytest

from router.base.tokens import pack
from router.llama.routes import Shape
from router.llama.slices import NotSlicedError, SlicedAnswer, can_be_sliced
from router.llama.wire import ParsedRequest, parse_request

Json = dict[str, Any]
USER = {"role": "user", "content": "Tell me."}
CHAT: Json = {"messages": [USER], "max_tokens": 500, "temperature": 0.7}
TEXT: Json = {"prompt": "Once", "max_tokens": 500}
IDS = pack([1, 2, 3])


def parsed(body: Json, shape: Shape = Shape.CHAT) -> ParsedRequest:
    return parse_request(shape, body)


def timings(n: int, *, prompt_n: int = 1, cached: int = 2) -> Json:
    ms = n * 10.0
    return {"prompt_n": prompt_n, "cache_n": cached, "predicted_n": n, "predicted_ms": ms}


def chat(text: str, n: int, end: str = "length", *, prompt_n: int = 1, **message: Any) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n}
    choice = {
        "index": 0,
        "finish_reason": end,
        "message": {"role": "assistant", "content": text, **message},
    }
    told = timings(n, prompt_n=prompt_n)
    return json.dumps({"choices": [choice], "usage": usage, "timings": told}).encode()


def native(text: str, ids: list[int], stop: str = "limit", **more: Any) -> bytes:
    settings = {"n_predict": len(ids), "temperature": 0.7}
    body = {
        "content": text,
        "tokens": ids,
        "stop_type": stop,
        "tokens_predicted": len(ids),
        "tokens_evaluated": 3,
        "prompt": "Once",
        "generation_settings": settings,
        "timings": timings(len(ids)),
    }
    return json.dumps(body | more).encode()


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"temperature": 0, "seed": 1},
        {"stop": []},
        {"tools": None},
        {"service_tier": "flex", "user": "me"},
    ],
)
def test_plain_answers_can_be_sliced(more: Json) -> None:
    assert can_be_sliced(parsed(CHAT | more))
    assert can_be_sliced(parsed(TEXT | more, Shape.COMPLETION))
    assert can_be_sliced(parsed({**TEXT, **more, "prompt": [1, 2]}, Shape.OAI_COMPLETION))


@pytest.mark.parametrize(
    "more",
    [
        {"stream": True},
        {"stop": ["\n"]},
        {"seed": 1},
        {"tools": [{"type": "function"}]},
        {"grammar": "root ::= [a-z]"},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"mirostat": 2},
        {"n": 2},
        {"max_tokens": "5"},
        {"max_tokens": 0},
        {"max_tokens": True},
        {"n_predict": 2**40},
        {"cache_prompt": False},
        {"a field of a newer server": 1},
        {"messages": [USER, {"role": "assistant", "content": "Well,"}]},
        {"messages": []},
    ],
)
def test_what_slices_would_change_is_generated_as_one(more: Json) -> None:
    assert not can_be_sliced(parsed(CHAT | more))


@pytest.mark.parametrize("shape", [Shape.INFILL, Shape.MESSAGES, Shape.RESPONSES])
def test_other_routes_are_generated_as_one(shape: Shape) -> None:
    body = {**CHAT, "input": "Tell me.", "input_prefix": "a", "input_suffix": "b"}
    assert not can_be_sliced(parsed(body, shape))


def test_chat_goes_on_from_its_text() -> None:
    sliced = SlicedAnswer(parsed(CHAT), IDS)
    request, raw = sliced.next()
    assert json.loads(raw) == {"messages": [USER], "temperature": 0.7, "n_predict": 48}
    assert request.max_new_tokens == 48
    assert not sliced.add(chat("", 48, reasoning_content="Hm"))
    assert not sliced.add(chat("Well", 50, reasoning_content="Hm."))
    assert sliced.so_far().body == {
        "messages": [USER, {"role": "assistant", "content": "Well", "reasoning_content": "Hm."}],
        "temperature": 0.7,
        "n_predict": 402,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert sliced.add(chat("Well, yes.", 5, "stop", reasoning_content="Hm."))
    whole = json.loads(sliced.whole())
    assert whole["choices"][0]["message"]["content"] == "Well, yes."
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 103, "total_tokens": 106}
    assert whole["timings"]["predicted_n"] == 103
    assert whole["timings"]["predicted_ms"] == pytest.approx(1030)


def test_completion_goes_on_from_its_ids() -> None:
    sliced = SlicedAnswer(parsed(TEXT, Shape.COMPLETION), IDS)
    sliced.next()
    assert not sliced.add(native(" upon", [7] * 48))
    sliced.begin()
    body = json.loads(sliced.next()[1])
    assert (body["prompt"], body["return_tokens"]) == ([1, 2, 3, *[7] * 48], True)
    assert sliced.add(native(" a time", [8, 9], "eos"))
    whole = json.loads(sliced.whole())
    assert (whole["content"], whole["tokens_predicted"], whole["stop_type"]) == (
        " upon a time",
        50,
        "eos",
    )
    assert whole["generation_settings"]["n_predict"] == 500
    assert json.loads(sliced.granted())["content"] == " a time"
    assert (sliced.n_tokens, sliced.n_granted) == (50, 2)


def test_half_a_character_is_generated_again() -> None:
    sliced = SlicedAnswer(parsed(TEXT, Shape.COMPLETION), IDS)
    sliced.next()
    sliced.add(native("a\ufffd", [7] * 46 + [200, 201]))
    assert sliced.last_ids() == [7, 7, 7, 200, 201]
    sliced.take_back(2, "\ufffd")
    assert json.loads(sliced.whole())["content"] == "a"
    with pytest.raises(NotSlicedError):
        sliced.take_back(1, "b")
    assert (sliced.n_tokens, sliced.n_granted) == (46, 46)
    assert json.loads(sliced.next()[1])["prompt"][-1] == 7


def test_slices_are_longer_where_more_is_computed_again() -> None:
    """So that less than 3 % is, after the first time."""
    sliced = SlicedAnswer(parsed({"messages": [USER]}), IDS)
    sliced.next()
    sliced.add(chat("a", 48))
    assert json.loads(sliced.next()[1])["n_predict"] == 50  # half a second at 10 ms
    sliced.add(chat("ab", 50, prompt_n=70))
    assert json.loads(sliced.next()[1])["n_predict"] == 2800
    sliced.begin()  # in another slot the prompt is no loss of slices
    sliced.add(chat("abc", 100, prompt_n=900))
    assert json.loads(sliced.next()[1])["n_predict"] == 50


def test_limit_is_that_of_all_slices() -> None:
    sliced = SlicedAnswer(parsed(CHAT | {"max_tokens": 60}), IDS)
    sliced.next()
    assert not sliced.add(chat("a", 48))
    assert json.loads(sliced.next()[1])["n_predict"] == 12
    assert sliced.add(chat("ab", 12))


def test_slice_that_fills_the_context_is_the_last() -> None:
    sliced = SlicedAnswer(parsed({"messages": [USER]}), IDS)
    sliced.next()
    assert sliced.add(chat("a", 30))


@pytest.mark.parametrize(
    "answer",
    [
        b"no JSON",
        b"[]",
        b"{}",
        chat("Another text", 48),
        chat("Well, then", 90),
        chat("Well, then", 0),
        chat("Well, then", 40, tool_calls=[{"id": "x"}]),
    ],
)
def test_slices_that_do_not_fit_together_are_refused(answer: bytes) -> None:
    sliced = SlicedAnswer(parsed(CHAT), IDS)
    sliced.next()
    sliced.add(chat("Well", 48))
    sliced.next()
    with pytest.raises(NotSlicedError):
        sliced.add(answer)


@pytest.mark.parametrize("ids", [[7] * 47, ["7"] * 48, [7] * 49])
def test_completion_with_other_ids_is_refused(ids: list[Any]) -> None:
    sliced = SlicedAnswer(parsed(TEXT, Shape.COMPLETION), IDS)
    sliced.next()
    with pytest.raises(NotSlicedError):
        sliced.add(native("a", ids, timings=timings(48)))


def test_chat_without_new_text_is_not_asked_again_for_ever() -> None:
    sliced = SlicedAnswer(parsed({"messages": [USER]}), IDS)
    sliced.next()
    with pytest.raises(NotSlicedError):
        sliced.add(chat("", 48))


def test_half_a_character_of_a_chat_is_no_text() -> None:
    sliced = SlicedAnswer(parsed(CHAT), IDS)
    sliced.next()
    sliced.add(chat("a\ufffd", 48))
    assert sliced.so_far().body["messages"][-1]["content"] == "a"


def test_full_context_is_left_to_the_server() -> None:
    """It may shift the context, and go on."""
    sliced = SlicedAnswer(parsed({"messages": [USER]}), IDS, n_ctx=52)
    sliced.next()
    with pytest.raises(NotSlicedError):
        sliced.add(chat("a", 48))


def test_slice_that_is_refused_leaves_no_trace() -> None:
    sliced = SlicedAnswer(parsed(TEXT, Shape.COMPLETION), IDS)
    sliced.next()
    sliced.add(native("a", [7] * 48))
    sliced.next()
    with pytest.raises(NotSlicedError):
        sliced.add(native("b", [7] * 40, timings=timings(48)))
    assert json.loads(sliced.granted())["content"] == "a"
    assert sliced.n_tokens == 48


def test_first_slice_sends_the_text_of_the_client() -> None:
    sliced = SlicedAnswer(parsed(TEXT, Shape.COMPLETION), IDS)
    assert json.loads(sliced.next()[1])["prompt"] == "Once"
