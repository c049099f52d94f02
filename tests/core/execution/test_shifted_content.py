"""Shifted content: KV that a server may have moved is neither reused nor saved."""

from typing import Any

import pytest

from router.base.tokens import join
from router.base.types import Outcome, Reported, RequestProgress
from router.core.model.effects import WatchSlot
from router.core.model.rates import Mean
from router.core.model.slots import UNKNOWN
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, A1, A, R, backend, run_of, scheduler, tokens
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    finish,
    held,
    names,
    plan_of,
    prefilled,
    quiet,
    running,
    slot,
)

# LESS omits some of the tokens in WHOLE, which the slot holds.
WHOLE = join([run_of(100), run_of(500, 7), run_of(500, 8)])
LESS = join([run_of(100), run_of(500, 8)])
SENT_AS_IT_IS: dict[str, Any] = {"coalesce_above_s": None, "idle_save_after_s": None}
WIPED = WatchSlot(R, A0, RequestProgress.ANSWERED, wipe=True)


def moving(cached: int, **more: Any) -> Any:
    """Answer a request that let the server move KV; return the scheduler and the effects."""
    s = scheduler(backend("a", 1), holding={A0: WHOLE}, reuse_probability=0.0, **SENT_AS_IT_IS)
    assert plan_of(arrive(s, ids=LESS, shifts=True, **more)).chosen.reused_tokens == 100
    said: dict[str, Any] = {"prompt_tokens": 600, "generated_tokens": 1, "generated": tokens(9)}
    return s, finish(s, cached_tokens=cached, **said)


def test_what_was_moved_is_wiped() -> None:
    """Wiped before another request or a save uses the slot."""
    s, effects = moving(599)

    assert effects[1:] == [WIPED]
    assert arrive(s, "r2", LESS) == []
    assert names(quiet(s, n=None)) == ["Dispatch"]
    assert slot(s, A0).content.resident == UNKNOWN
    assert slot(s, A0).content.savable


def test_what_was_not_is_kept() -> None:
    s, effects = moving(100)

    assert names(effects) == ["Account"]
    assert held(s, A0) == LESS
    assert slot(s, A0).content.savable


def test_a_client_that_leaves_may_have_left_it() -> None:
    s = scheduler(backend("a", 1), holding={A0: WHOLE}, reuse_probability=0.0, **SENT_AS_IT_IS)
    arrive(s, ids=LESS, shifts=True)

    assert finish(s, outcome=Outcome.CLIENT_GONE, begun=True)[1:] == [
        WatchSlot(R, A0, RequestProgress.BEGUN, wipe=True)
    ]


def test_who_goes_on_and_leaves_has_left_nothing_of_the_kind() -> None:
    """Next turn of a conversation, stopped: the slot held only its beginning."""
    s = scheduler(backend("a", 1), holding={A0: LESS}, reuse_probability=0.0, **SENT_AS_IT_IS)
    arrive(s, ids=join([LESS, run_of(50, 9)]), shifts=True)

    assert finish(s, outcome=Outcome.CLIENT_GONE, begun=True)[1:] == [
        WatchSlot(R, A0, RequestProgress.BEGUN)
    ]


def test_who_was_refused_has_moved_nothing() -> None:
    s = scheduler(backend("a", 1), holding={A0: WHOLE}, reuse_probability=0.0, **SENT_AS_IT_IS)
    arrive(s, ids=LESS, shifts=True)

    assert finish(s, outcome=Outcome.REFUSED)[1:] == [WatchSlot(R, A0, RequestProgress.ANSWERED)]


def test_an_answer_that_went_over_the_end_is_wiped() -> None:
    """Under `--context-shift`, the server drops tokens in the middle and continues."""
    s = running(backend("a", 1, n_ctx=100))

    effects = finish(s, prompt_tokens=3, cached_tokens=0, generated_tokens=98)
    assert effects[1:] == [WIPED]


@pytest.mark.parametrize(
    ("after_s", "more", "wipe"),
    [
        (2.0, {}, True),  # 97 tokens of room, at 80 tokens a second
        (1.0, {}, False),
        (2.0, {"max_new_tokens": 90}, False),
        (2.0, {"max_new_tokens": 98}, True),
    ],
)
def test_abandoned_answer_that_may_have_shifted_is_wiped(
    after_s: float, more: dict[str, Any], wipe: bool
) -> None:
    """Nothing tells how long it was, but its time."""
    s = scheduler(backend("a", 1, n_ctx=100), reuse_probability=0.0, **SENT_AS_IT_IS)
    s.state.inventory.backends[A].rates.output_s_per_token = Mean(0.05)
    arrive(s, **more)

    gone = fact.finished(R, Outcome.CLIENT_GONE, Reported(), None, begun=True)
    effects = s.handle(gone, NOW + after_s)

    assert effects[1:] == [WatchSlot(R, A0, RequestProgress.BEGUN, wipe=wipe)]


@pytest.mark.parametrize("pinnable", [True, False])
def test_a_connection_that_was_lost_may_leave_it_there(pinnable: bool) -> None:
    """Perhaps the server process is the same, so its content is not saved."""
    s = scheduler(backend("a", 2), reuse_probability=0.0, **SENT_AS_IT_IS)
    arrive(s, shifts=True, pinnable=pinnable)
    if not pinnable:
        prefilled(s)

    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.backend_up(backend("a", 2)), NOW)
    assert [slot(s, at).content.savable for at in (A0, A1)] == [False, pinnable]
