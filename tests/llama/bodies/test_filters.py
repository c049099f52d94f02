"""Filters: fields set, stripped and given, and a model by another name."""

from typing import Any

import orjson
import pytest

from router.llama.bodies.filters import RequestFilter, filtered
from router.llama.routes import Shape
from router.llama.wire import parse_completion

FILTERS = {
    "precise": RequestFilter("qwen", frozenset({"seed"}), {"top_k": 20}, {"temperature": 0}),
    "qwen": RequestFilter(set={"temperature": 1}),
}


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({"model": "precise"}, {"model": "qwen", "top_k": 20, "temperature": 0}),
        ({"model": "precise", "top_k": 5}, {"model": "qwen", "top_k": 5, "temperature": 0}),
        ({"model": "precise", "temperature": 1, "seed": 3, "x": 1}, None),
        ({"model": "qwen", "seed": 3}, {"model": "qwen", "seed": 3, "temperature": 1}),
    ],
)
def test_fields_of_a_filter(body: dict[str, Any], sent: dict[str, Any] | None) -> None:
    before = dict(body)
    expected = {"model": "qwen", "top_k": 20, "temperature": 0, "x": 1} if sent is None else sent
    assert filtered(body, FILTERS) == expected
    assert body == before


@pytest.mark.parametrize("body", [{}, {"model": "other"}, {"model": 3}, {"model": ["qwen"]}])
def test_other_requests_are_left_alone(body: dict[str, Any]) -> None:
    assert filtered(body, FILTERS) is None
    raw = orjson.dumps(body | {"prompt": "x"})
    assert parse_completion(Shape.COMPLETION, raw, FILTERS)[1] is raw


def test_what_is_parsed_is_what_is_sent() -> None:
    raw = b'{"model": "precise", "prompt": "x", "n_predict": 3}'
    parsed, sent = parse_completion(Shape.COMPLETION, raw, FILTERS)
    assert orjson.loads(sent) == parsed.body
    assert (parsed.model, parsed.max_new_tokens) == ("qwen", 3)
