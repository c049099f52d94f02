"""What clients say about caching, in the fields of three APIs."""

from typing import Any

import pytest

from router.llama.bodies.hints import CacheHints
from router.llama.routes import Shape
from router.llama.wire import parse_request

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def hints(shape: Shape, **body: Any) -> CacheHints:
    return parse_request(shape, body).hints


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("shape", "body", "keep_s"),
    [
        (Shape.MESSAGES, {"messages": said(text("a", **MARK))}, 300),
        (Shape.MESSAGES, {"messages": said(text("a", **HOUR))}, 3600),
        (Shape.MESSAGES, {"messages": said(text("a", **MARK), text("b", **HOUR))}, 3600),
        (Shape.MESSAGES, {"system": [text("a", **MARK)], "messages": said(text("b"))}, 300),
        (Shape.MESSAGES, {"tools": [{"name": "t", **HOUR}], "messages": said(text("b"))}, 3600),
        (Shape.MESSAGES, {**MARK, "messages": said(text("a"))}, 300),
        (Shape.CHAT, {"messages": [{"role": "user", "content": "a", **MARK}]}, 300),
        (Shape.CHAT, {"messages": said(text("a", prompt_cache_breakpoint=True))}, 300),
        (Shape.CHAT, {"messages": said(text("a")), "prompt_cache_retention": "24h"}, 86400),
        (Shape.CHAT, {"messages": said(text("a")), "prompt_cache_options": {"ttl": "30m"}}, 1800),
        (Shape.CHAT, {"messages": said(text("a")), "prompt_cache_retention": "900d"}, 86400),
        (Shape.RESPONSES, {"input": "a", "prompt_cache_retention": "24h"}, 86400),
        # Nothing, or nothing of sense.
        (Shape.CHAT, {"messages": said(text("a")), "prompt_cache_retention": "in_memory"}, 0),
        (Shape.CHAT, {"messages": said(text("a"), None, 7), "prompt_cache_options": []}, 0),
        (Shape.MESSAGES, {"messages": said(text("a", cache_control=None)), "tools": 3}, 0),
        (Shape.MESSAGES, {"messages": said(text("a", cache_control={"ttl": ["1h"]}))}, 300),
    ],
)
def test_time_that_a_prompt_is_wanted(shape: Shape, body: dict[str, Any], keep_s: int) -> None:
    assert hints(shape, **body).keep_s == keep_s


def test_fork_after_a_part_of_a_message() -> None:
    earlier = {"role": "system", "content": "s"}
    body = [earlier, *said(text("document", **MARK), text("question"), text("more"))]

    (fork,) = hints(Shape.CHAT, messages=body).forks
    assert fork == [earlier, *said(text("document", **MARK), text("Z"))]


def test_fork_begins_unlike_what_follows() -> None:
    (fork,) = hints(Shape.CHAT, messages=said(text("a", **MARK), text(" Zebra"))).forks
    assert fork[0]["content"][-1] == text("Q")


def test_a_mark_at_the_end_of_a_message_has_no_fork() -> None:
    """The boundaries of messages are found without it."""
    assert hints(Shape.CHAT, messages=said(text("a"), text("b", **MARK))).forks == ()


def test_forks_are_converted_as_the_server_does() -> None:
    system = [text("always", **MARK), text("today")]
    (fork,) = hints(Shape.MESSAGES, system=system, messages=said(text("b"))).forks
    assert fork[0] == {"role": "system", "content": "alwaysZ"}

    parts = [{"type": "input_text", "text": "a", **MARK}, {"type": "input_text", "text": "b"}]
    (fork,) = hints(Shape.RESPONSES, input=said(*parts)).forks
    assert [part["text"] for part in fork[0]["content"]] == ["a", "Z"]


def test_of_many_marks_the_last_four_count() -> None:
    parts = [text(str(n), **MARK) for n in range(7)]
    forks = hints(Shape.CHAT, messages=said(*parts, text("end"))).forks
    assert [len(fork[0]["content"]) for fork in forks] == [5, 6, 7, 8]


def test_only_the_forks_that_count_are_made() -> None:
    """Each copies all parts before it: of 20,000 that would take minutes and gigabytes."""
    parts = [text("a", **MARK) for _ in range(20_000)]
    forks = hints(Shape.CHAT, messages=said(*parts, text("end"))).forks
    assert len(forks) == 4
