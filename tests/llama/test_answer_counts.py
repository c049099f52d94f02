"""Counts in answers: the router's own prefill is not cached, and no other byte differs."""

import pytest

from router.base.types import OwnPrefill
from router.llama.answer_counts import AnswerCounts
from router.llama.routes import Shape

# 90 tokens in 0.5 s, computed by the router; the server then calls 100 of 101 cached.
OWN = OwnPrefill(90, 0.5)
TIMINGS = (
    b'"timings":{"cache_n":100,"prompt_n":1,"prompt_ms":10.5,"prompt_per_token_ms":10.5,'
    b'"prompt_per_second":95.2,"predicted_n":3,"predicted_ms":1e-05}'
)
TRUE_TIMINGS = (
    b'"timings":{"cache_n":10,"prompt_n":91,"prompt_ms":510.5,"prompt_per_token_ms":'
    + repr(510.5 / 91).encode()
    + b',"prompt_per_second":'
    + repr(91000 / 510.5).encode()
    + b',"predicted_n":3,"predicted_ms":1e-05}'
)
PROGRESS = b'"prompt_progress":{"total":101,"cache":100,"processed":101,"time_ms":12}'
TRUE_PROGRESS = b'"prompt_progress":{"total":101,"cache":10,"processed":101,"time_ms":512}'
# Text of an answer that looks like a count.
LOOKALIKE = rb'"content":"\"cache_n\":100,\"cached_tokens\": 100, \\\"input_tokens\":1"'
LINES = [
    (Shape.COMPLETION, b'{%b,"tokens_cached":104,%b}' % (LOOKALIKE, TIMINGS), TRUE_TIMINGS),
    (
        Shape.COMPLETION,
        b'{"timings/cache_n":100,"timings/prompt_n":1,"cache_n_":100}',
        b'"timings/cache_n":10,"timings/prompt_n":91,"cache_n_":100',
    ),
    (Shape.INFILL, b'{"timings/prompt_n":1}', b'"timings/prompt_n":91'),
    (Shape.CHAT, b"{%b,%b}" % (PROGRESS, TIMINGS), b"%b,%b" % (TRUE_PROGRESS, TRUE_TIMINGS)),
    (
        Shape.CHAT,
        b'{"usage":{"prompt_tokens":101,"prompt_tokens_details":{"cached_tokens":100}}}',
        b'{"usage":{"prompt_tokens":101,"prompt_tokens_details":{"cached_tokens":10}}}',
    ),
    (
        Shape.RESPONSES,
        b'{"usage":{"input_tokens":101,"input_tokens_details":{"cached_tokens":100}}}',
        b'{"usage":{"input_tokens":101,"input_tokens_details":{"cached_tokens":10}}}',
    ),
    (
        Shape.MESSAGES,
        b'{%b,"usage":{"cache_read_input_tokens":100,"input_tokens":1,"output_tokens":0}}'
        % LOOKALIKE,
        b'"usage":{"cache_read_input_tokens":10,"input_tokens":91,"output_tokens":0}',
    ),
]


@pytest.mark.parametrize(("shape", "line", "part"), LINES)
def test_what_the_router_computed_is_not_cached(shape: Shape, line: bytes, part: bytes) -> None:
    told = AnswerCounts(shape, OWN).whole(line)

    assert part in told
    assert (LOOKALIKE in told) is (LOOKALIKE in line)


def test_arguments_of_a_tool_are_no_counts() -> None:
    tool = b'"content":[{"type":"tool_use","input":{"input_tokens":5,"cache":3,"usage":{}}}]'
    usage = b'"usage":{"cache_read_input_tokens":%d,"input_tokens":%d}'
    line = b"{%b,%b}"

    told = AnswerCounts(Shape.MESSAGES, OWN).whole(line % (tool, usage % (100, 1)))

    assert told == line % (tool, usage % (10, 91))


def test_a_tool_of_a_stream_is_no_usage() -> None:
    line = b'data: {"type":"content_block_start","input":{"input_tokens":5}}\n'

    assert AnswerCounts(Shape.MESSAGES, OWN).part(line) == line


def test_the_rest_of_an_answer_stays_as_it_is() -> None:
    line = b'{ "a" : 1.50, %b, "b":[1 ,2], "prompt":"\\u00e9" }\n' % TIMINGS

    told = AnswerCounts(Shape.COMPLETION, OWN).whole(line)

    assert told == line.replace(TIMINGS, TRUE_TIMINGS)


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_a_stream_is_corrected_however_it_is_cut(size: int) -> None:
    def stream(timings: bytes) -> bytes:
        events = [b'{"choices":[{"delta":{%b}}]}' % LOOKALIKE, b"{%b}" % timings, b"[DONE]"]
        return b": a comment\n\n" + b"".join(b"data: %b\n\n" % event for event in events) + b"end"

    came, counts = stream(TIMINGS), AnswerCounts(Shape.CHAT, OWN)
    parts = [counts.part(came[at : at + size]) for at in range(0, len(came), size)]

    assert b"".join(parts) + counts.rest() == stream(TRUE_TIMINGS)


def test_each_event_is_corrected_by_its_own_counts() -> None:
    """The server lost a part of the own prefill: no more than it calls cached was computed."""
    line = b'data: {"timings":{"cache_n":%d,"prompt_n":%d}}\n'
    counts = AnswerCounts(Shape.COMPLETION, OWN)

    told = counts.part(line % (100, 1) + line % (40, 61))

    assert told == line % (10, 91) + line % (0, 101)
