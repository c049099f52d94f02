"""Resident updates: a slot's tokens are claimed only if they are certain."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.base.tokens import EMPTY, pack
from router.base.types import Prompt, Reported, Request
from router.core.execution.resident_updates import (
    after_answer,
    after_either,
    after_finish,
    after_prefill,
    after_quiet,
    is_exact,
)
from router.core.model.slots import NOTHING, UNKNOWN, Resident
from tests.base.test_tokens import naive_common_prefix
from tests.support.scheduler.build import prompt_of, request, run_of, tokens

PROMPT = prompt_of([1, 2, 3])
NO_CLAIM = [Prompt(unknown="media"), Prompt(tokens(1, -5), n_media=1)]
few = st.lists(st.integers(0, 1), max_size=6)


def test_the_last_token_of_an_answer_is_not_in_the_slot() -> None:
    reported = Reported(prompt_tokens=3, generated_tokens=3, generated=tokens(7, 8, 9))

    assert after_finish(PROMPT, reported).tokens == tokens(1, 2, 3, 7, 8)
    assert after_finish(PROMPT, Reported(generated=EMPTY)).tokens == tokens(1, 2, 3)


def test_an_answer_of_known_length_is_there_unread() -> None:
    held = after_finish(PROMPT, Reported(generated_tokens=3))

    assert (held.tokens, held.unread) == (PROMPT.tokens, 2)
    assert after_finish(PROMPT, Reported()) == Resident(PROMPT.tokens, 0, (0,), may_hold_more=True)


@pytest.mark.parametrize("prompt", NO_CLAIM)
def test_nothing_is_claimed_of_what_cannot_be_known(prompt: Prompt) -> None:
    assert after_finish(prompt, Reported()) == UNKNOWN
    assert after_quiet(UNKNOWN, prompt, 5) == UNKNOWN
    assert after_either(Resident(tokens(1)), prompt) == UNKNOWN


PICTURE = Prompt(tokens(1, 2, -5, *range(3, 13)), n_media=1)  # of 13 ids


def test_a_prompt_with_media_is_known_with_its_ids() -> None:
    """Regression: only the text before was, so the next turn was computed in another slot."""
    found = after_finish(PICTURE, Reported(29, generated_tokens=5))
    assert found == Resident(PICTURE.tokens, 4, (9,))
    assert after_finish(PICTURE, Reported(29)).may_hold_more
    assert after_finish(PICTURE, Reported(3)) == UNKNOWN


def test_checkpoints_behind_media_are_off_by_their_length() -> None:
    before = Resident(PICTURE.tokens, 0, (5, 9))
    reused = Reported(29, cached_tokens=22, generated_tokens=2)  # six ids: the picture has 17
    assert after_finish(PICTURE, reused, before).checkpoints == (5, 9)


def test_where_the_length_counts_the_text_before_media_is_known() -> None:
    """Slots that share cells: else there would seem to be room for what does not fit."""
    prompt = Prompt(tokens(1, 2, -5, 3), n_media=1)
    reported = Reported(20, generated_tokens=5)
    assert after_finish(prompt, reported, by_length=True) == Resident(tokens(1, 2), 22)


def test_another_prompt_count_claims_nothing() -> None:
    assert after_finish(PROMPT, Reported(prompt_tokens=4)) == UNKNOWN


def test_checkpoints_are_the_kept_and_one_before_the_end() -> None:
    prompt = Prompt(run_of(10), boundaries=(4, 9))
    before = Resident(run_of(5), 0, (1, 3))

    assert after_finish(prompt, Reported(10, 2), before).checkpoints == (1, 6)
    assert after_finish(prompt, Reported(10, 5), before).checkpoints == (1, 3, 6)
    assert after_finish(PROMPT, Reported()).checkpoints == (0,)


def test_checkpoints_do_not_repeat_and_are_limited() -> None:
    again = Reported(10, 9)
    once = after_finish(Prompt(run_of(10)), again)
    assert after_finish(Prompt(run_of(10)), again, once).checkpoints == once.checkpoints == (6,)

    held = NOTHING
    for turn in range(1, 100):
        held = after_finish(Prompt(run_of(10 * turn)), Reported(10 * turn, 10 * turn - 10), held)
    assert held.checkpoints == tuple(10 * turn - 4 for turn in range(92, 100))


def test_a_prefill_leaves_a_checkpoint_too() -> None:
    before = Resident(run_of(5), 0, (1, 3))

    assert after_prefill(before, run_of(10), Reported(10, 2)) == Resident(run_of(10), 0, (1, 6))


@pytest.mark.parametrize("answer", [tokens(7, 8), tokens(7, 8, 9)])
def test_answer_is_believed_if_its_length_agrees(answer: bytes) -> None:
    left = Resident(PROMPT.tokens, 2, (1,))

    read = after_answer(left, PROMPT.tokens, pack([7, 8] + [9] * (len(answer) // 4 - 2)))

    assert read == Resident(tokens(1, 2, 3, 7, 8), 0, (1,))


def test_an_answer_of_another_length_or_prompt_is_not_believed() -> None:
    left = Resident(PROMPT.tokens, 2)

    assert after_answer(left, PROMPT.tokens, tokens(7)) == left
    assert after_answer(left, PROMPT.tokens, tokens(7, 8, 9, 9)) == left
    assert after_answer(left, tokens(1, 2), tokens(7, 8)) == left


def test_answer_does_not_end_the_doubt_of_a_longer_slot() -> None:
    """Its length would be taken for known, and another request's tokens for the slot's."""
    counted = Resident(PROMPT.tokens, may_hold_more=True)

    assert after_answer(counted, PROMPT.tokens, tokens(7)) == counted
    assert after_answer(UNKNOWN, EMPTY, tokens(7)) == UNKNOWN


def test_a_slot_of_unknown_length_claims_nothing() -> None:
    assert after_quiet(Resident(tokens(1, 2)), PROMPT, None) == UNKNOWN


def test_a_prompt_that_was_cut_off_is_held_in_part() -> None:
    assert after_quiet(NOTHING, PROMPT, 2) == Resident(tokens(1, 2))
    assert after_quiet(NOTHING, PROMPT, 5) == Resident(tokens(1, 2, 3), 2)


def test_an_unchanged_length_may_be_either_of_two_contents() -> None:
    """Regression: all of `[9]*5` was claimed; the prompt and two answer tokens are as long."""
    assert after_quiet(Resident(run_of(5, 9)), PROMPT, 5) == Resident(EMPTY, 5)
    assert after_quiet(Resident(tokens(1, 2, 9)), PROMPT, 3) == Resident(tokens(1, 2), 1)
    assert after_quiet(Resident(tokens(1, 2)), PROMPT, 2) == Resident(tokens(1, 2))
    assert after_quiet(Resident(tokens(1, 9), 1), PROMPT, 3) == Resident(tokens(1), 2)


def test_a_slot_of_unknown_length_may_not_have_changed_at_all() -> None:
    """Regression: unknown content (after a batch) was treated as a length of zero."""
    assert after_quiet(UNKNOWN, PROMPT, 2) == Resident(EMPTY, 2)
    assert after_quiet(Resident(tokens(1), may_hold_more=True), PROMPT, 3) == Resident(tokens(1), 2)


def test_a_request_that_had_begun_to_answer_did_run() -> None:
    """Regression: the prompt was computed in a slot of unknown content, and nothing was claimed."""
    assert after_quiet(UNKNOWN, PROMPT, 5, begun=True) == Resident(tokens(1, 2, 3), 2)
    assert after_quiet(UNKNOWN, PROMPT, 2, begun=True) == Resident(tokens(1, 2))
    assert after_quiet(Resident(run_of(5, 9)), PROMPT, 5, begun=True).tokens == PROMPT.tokens


@given(before=few, unread=few, prompt=few, answer=few, computed=st.integers(0, 6))
def test_after_quiet_is_right_whether_the_request_ran_or_not(
    before: list[int], unread: list[int], prompt: list[int], answer: list[int], computed: int
) -> None:
    """Both causes of the seen length are possible: the request ran here, or it did not."""
    ran = prompt[:computed] + (answer if computed >= len(prompt) else [])
    for truth in (before + unread, ran):
        claim = after_quiet(Resident(pack(before), len(unread)), prompt_of(prompt), len(truth))

        assert pack(truth).startswith(claim.tokens)
        assert len(claim) == len(truth)


@given(before=few, prompt=few, answer=few)
def test_after_either_is_right_in_both_cases(
    before: list[int], prompt: list[int], answer: list[int]
) -> None:
    claim = after_either(Resident(pack(before)), prompt_of(prompt))

    assert len(claim) == naive_common_prefix(before, prompt)
    assert pack(before).startswith(claim.tokens)
    assert pack(prompt + answer).startswith(claim.tokens)


# -- are the claimed tokens exact? ----------------------------------------------------------------

PINNED = request(ids=[1, 2, 3, 4])
SHIFTS = replace(PINNED, shifts=True)
UNREAD = replace(SHIFTS, prompt=Prompt(unknown="why"))
LONGER = Resident(tokens(1, 2, 9))


@pytest.mark.parametrize(
    ("asked", "before", "said", "exact"),
    [
        pytest.param(PINNED, LONGER, {"cached_tokens": 4}, True, id="nobody let it"),
        pytest.param(SHIFTS, LONGER, {"cached_tokens": 2}, True, id="no more than is common"),
        pytest.param(SHIFTS, LONGER, {"cached_tokens": 3}, False, id="more than is common"),
        pytest.param(SHIFTS, LONGER, {}, False, id="the client left"),
        pytest.param(SHIFTS, Resident(tokens(1, 2)), {}, True, id="nothing else was there"),
        pytest.param(SHIFTS, NOTHING, {}, True, id="nothing was there"),
        pytest.param(SHIFTS, Resident(tokens(1), 5), {}, False, id="nobody has read it"),
        pytest.param(SHIFTS, UNKNOWN, {}, False, id="anything may have been there"),
        pytest.param(UNREAD, NOTHING, {}, False, id="it may be in another slot"),
        pytest.param(UNREAD, NOTHING, {"cached_tokens": 0}, True, id="all was computed"),
        pytest.param(replace(SHIFTS, pinnable=False), NOTHING, {}, False, id="not pinned"),
        pytest.param(replace(SHIFTS, whole_backend=True), NOTHING, {}, False, id="several"),
        pytest.param(
            replace(SHIFTS, prompt=Prompt(tokens(1, -2), n_media=1)),
            LONGER,
            {"cached_tokens": 300},
            True,
            id="a picture",
        ),
        pytest.param(
            PINNED, NOTHING, {"prompt_tokens": 4, "generated_tokens": 6}, True, id="it is full"
        ),
        pytest.param(
            PINNED, NOTHING, {"prompt_tokens": 4, "generated_tokens": 7}, False, id="over the end"
        ),
    ],
)
def test_what_is_left_may_not_be_what_a_prefill_gives(
    asked: Request, before: Resident, said: dict[str, Any], exact: bool
) -> None:
    """Inexact if the server was allowed to shift KV, or shifted it at the context's end."""
    assert is_exact(asked, before, Reported(**said), 10, pinned=asked.takes_one_slot) is exact
