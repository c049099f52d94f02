"""Tests of `differs_in_earnest`: which answers count as the same."""

import dataclasses
import math
from collections.abc import Callable

import pytest

from tests.support.conversations.conversing import differs_in_earnest
from tests.support.servers.running_router import Answer, Json

LIKELY, RIVAL, UNLIKELY = 0.52, 0.48, 0.01


def token(id: int, *, share: float = LIKELY, **rivals: float) -> Json:
    """Return one entry of `completion_probabilities`; `rivals` as `_5=0.4`."""
    shares = {id: share} | {int(name[1:]): value for name, value in rivals.items()}
    top = [{"id": rival, "logprob": math.log(value)} for rival, value in shares.items()]
    return {"id": id, "logprob": math.log(share), "top_logprobs": top}


def plain(*tokens: Json) -> Answer:
    return Answer(200, {}, b"", {"stop": True, "completion_probabilities": list(tokens)})


def stream(*tokens: Json) -> Answer:
    events: list[Json] = [{"stop": False, "completion_probabilities": [one]} for one in tokens]
    return Answer(200, {}, b"", {}, [*events, {"stop": True}])


WHOLE = [token(1), token(2), token(3)]


@pytest.mark.parametrize("one", [plain, stream])
@pytest.mark.parametrize("two", [plain, stream])
def test_the_same_tokens_are_the_same(
    one: Callable[..., Answer], two: Callable[..., Answer]
) -> None:
    assert differs_in_earnest(one(*WHOLE), two(*WHOLE)) == ""


def test_a_token_that_was_hardly_preferred_and_what_follows() -> None:
    close = plain(token(1), token(2, _5=RIVAL), token(3))
    assert differs_in_earnest(close, plain(token(1), token(5, _2=RIVAL))) == ""


def test_another_token() -> None:
    other = plain(token(1), token(5, _2=UNLIKELY), token(3))
    assert "token 1" in differs_in_earnest(other, plain(*WHOLE))


def test_the_same_token_much_less_likely() -> None:
    assert "token 0" in differs_in_earnest(plain(token(1, share=RIVAL / 2)), plain(token(1)))


@pytest.mark.parametrize("n", [0, 1, 2])
def test_an_answer_that_is_too_short(n: int) -> None:
    """Shorter answers differ, even if they say that they have ended."""
    for short in (plain(*WHOLE[:n]), stream(*WHOLE[:n])):
        assert differs_in_earnest(short, plain(*WHOLE)) == f"{n} tokens against 3"
        assert differs_in_earnest(plain(*WHOLE), short) == f"3 tokens against {n}"


def test_two_that_say_nothing() -> None:
    assert differs_in_earnest(plain(), stream()) == "0 tokens against 0"


def test_one_without_an_end() -> None:
    """Answers without an end differ, even with all tokens or after a difference within rounding."""
    whole, close = stream(*WHOLE), stream(token(1, _5=RIVAL), token(2))
    for answer in (
        dataclasses.replace(whole, events=whole.events[:-1]),
        dataclasses.replace(close, events=close.events[:-1]),
        dataclasses.replace(plain(*WHOLE), json={}),
        Answer(200, {}, b"", {}),
        Answer(503, {}, b"", {"error": {"code": 503}}),
    ):
        assert "the first has no end" in differs_in_earnest(answer, plain(token(5, _1=RIVAL)))
        assert "the second has no end" in differs_in_earnest(plain(*WHOLE), answer)
