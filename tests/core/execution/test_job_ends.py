"""Ends of requests, and what is known of their slots afterwards."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.tokens import EMPTY, head
from router.base.types import (
    NO_TENANT,
    Cost,
    Outcome,
    Prompt,
    Reported,
    RequestProgress,
    SlotId,
    Source,
    Tenant,
)
from router.core.model.effects import Account, AnswerEnd, Prefill, StopWork, WatchSlot
from router.core.model.rates import LinearFit, Rates
from router.core.model.slots import UNKNOWN, Content, Phase, Resident
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    A2,
    R2,
    A,
    R,
    backend,
    request,
    run_of,
    scheduler,
    tokens,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    astray,
    cancel,
    finish,
    held,
    launched,
    names,
    plan_of,
    prefilled,
    quiet,
    running,
    slot,
    stranger,
)
from tests.support.scheduler.driven import Driven

TWO = backend("a", 2)
GONE = Outcome.CLIENT_GONE
# Requests are sent without a prefill by the router, and nothing is saved.
PLAIN: dict[str, Any] = {
    "idle_save_after_s": None,
    "coalesce_above_s": None,
    "reuse_probability": 0.0,
}


# -- successful ends -----------------------------------------------------------------------------


def test_a_good_end_is_accounted_for_and_frees_the_slot() -> None:
    s = running()
    s.explain_admitted()
    plan = s.job_of(R).plan
    assert plan is not None
    request_ = s.job_of(R).request
    assert request_ is not None
    said = Reported(prompt_tokens=3, generated_tokens=2, generated=tokens(7, 8))

    (account,) = s.handle(fact.finished(R, Outcome.OK, said), NOW)

    cost = Cost(computed=3, generated=2)
    ended = AnswerEnd(Outcome.OK, said)
    assert account == Account(request_, A0, plan, ended, 0.0, 0.0, None, cost)
    assert held(s, A0) == tokens(1, 2, 3, 7)
    assert slot(s, A0).phase is Phase.IDLE
    assert (s.state.inventory.jobs, slot(s, A0).last_used) == ({}, NOW)


def test_an_end_teaches_prefill_and_generation() -> None:
    s = running(ids=run_of(20))
    rates = s.state.inventory.backends[A].rates
    finish(s, prompt_tokens=20, cached_tokens=0, prompt_s=2.0, generated_tokens=10, generated_s=1.0)

    assert rates.prefill.n == rates.output_tokens.n == 1


def test_an_end_is_told_once() -> None:
    s = running()
    finish(s)

    assert finish(s) == []
    assert quiet(s) == []


def test_an_end_before_its_beginning_is_nonsense() -> None:
    s = scheduler(backend("a", 1))
    assert names(arrive(s, ids=run_of(1000))) == ["Prefill"]

    assert finish(s) == []
    assert launched(s, 0) == []


# -- failures and disconnects --------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [GONE, Outcome.BACKEND_ERROR, Outcome.REFUSED])
def test_a_slot_that_was_left_in_the_middle_is_watched(outcome: Outcome) -> None:
    s = running()

    # A refusal is a complete answer, so nothing runs.
    left = RequestProgress.ANSWERED if outcome is Outcome.REFUSED else RequestProgress.SENT
    assert finish(s, "r", outcome)[1:] == [WatchSlot(R, A0, left)]
    assert slot(s, A0).phase is Phase.ABANDONED
    assert names(quiet(s, n=2)) == ([] if outcome is Outcome.REFUSED else ["Spent"])
    assert slot(s, A0).content.resident == Resident(tokens(1, 2))
    assert s.state.inventory.jobs == {}


@pytest.mark.parametrize("pinnable", [True, False])
def test_abandoned_stream_ends_soon_unless_unseen(pinnable: bool) -> None:
    s = scheduler(backend("a", 1), idle_save_after_s=None)
    arrive(s, ids=[1], pinnable=pinnable)
    left = RequestProgress.BEGUN if pinnable else RequestProgress.SENT
    assert finish(s, "r", GONE, begun=True)[1:] == [WatchSlot(R, A0, left)]


@pytest.mark.parametrize(
    ("n", "begun", "waits"), [(200, True, True), (200, False, False), (2000, False, True)]
)
def test_who_comes_back_at_once_waits_for_the_slot_that_was_left(
    n: int, begun: bool, waits: bool
) -> None:
    """Abandoned streams end at once; of a plain request the server notices after a second.

    Computing 200 tokens again takes as long.
    """
    s = scheduler(backend("a", 2), **PLAIN)
    s.state.inventory.backends[A].rates = Rates(prefill=LinearFit(2e-3, 0.0))
    arrive(s, ids=run_of(n))
    finish(s, "r", GONE, begun=begun)

    assert (arrive(s, "r2", run_of(n) + tokens(7, 8)) == []) is waits
    if waits:
        chosen = plan_of(quiet(s, n=n + 40)).chosen
        assert (chosen.slot, chosen.reused_tokens) == (A0, n)


def test_nobody_waits_for_a_slot_overdue_for_long() -> None:
    s = scheduler(backend("a", 2), **PLAIN)
    arrive(s, ids=run_of(500))
    finish(s, "r", GONE, begun=True)
    assert arrive(s, "r2", run_of(500) + tokens(7)) == []

    due = s.next_wakeup(NOW)
    assert due is not None
    assert due == pytest.approx(NOW + 2.03)
    assert plan_of(s.handle(fact.tick(), due + 0.001)).chosen.slot == A1


def test_a_slot_of_which_nothing_will_be_known_is_not_waited_for() -> None:
    s = scheduler(backend("a", 2), backend("b", 2), idle_save_after_s=None)
    arrive(s, ids=run_of(1000), pinnable=False)
    prefilled(s)
    finish(s, outcome=GONE)  # before its slot was seen
    assert names(arrive(s, "r2", run_of(1000), pinnable=False)) == ["Prefill"]
    assert s.next_wakeup(NOW) is None


def test_what_is_to_be_wiped_is_not_waited_for() -> None:
    s = scheduler(backend("a", 2), **PLAIN)
    arrive(s, ids=run_of(500), adapted=True)
    finish(s, "r", GONE, begun=True)
    assert plan_of(arrive(s, "r2", run_of(500) + tokens(7))).chosen.slot == A1


def test_the_rest_of_a_long_prefill_is_not_too_long_to_wait_for() -> None:
    """Abandoned prefills end early, and most of the prompt is computed by then."""
    s = scheduler(backend("a", 2, n_ctx=40_000), idle_save_after_s=None)
    s.state.inventory.backends[A].rates = Rates(prefill=LinearFit(2e-3, 0.0))
    arrive(s, ids=run_of(30_000))
    cancel(s)
    back = request("r2", run_of(30_000) + tokens(7))
    assert s.handle(fact.arrived(back), NOW + 25) == []


def test_a_prefill_that_was_left_is_gone_on_from() -> None:
    """Same client returns while the server computes the last batch."""
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    assert names(arrive(s, ids=run_of(2000))) == ["Prefill"]
    assert cancel(s) == [StopWork(R)]

    back = request("r2", run_of(2000) + tokens(7))
    assert s.handle(fact.arrived(back), NOW + 3) == []
    again = s.handle(fact.prefill_failed(R, "the client left", 1200), NOW + 4)
    assert names(again) == ["Spent", "Prefill"]
    assert slot(s, A0).holder == R2
    assert held(s, A0) == run_of(1200)


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.REFUSED, GONE])
def test_what_an_adapter_of_its_own_has_computed_is_wiped(outcome: Outcome) -> None:
    s = running(adapted=True)

    left = RequestProgress.SENT if outcome is GONE else RequestProgress.ANSWERED
    assert finish(s, "r", outcome, prompt_tokens=3)[1:] == [WatchSlot(R, A0, left, wipe=True)]
    assert slot(s, A0).phase is Phase.ABANDONED
    assert arrive(s, "r2", [1, 2, 3], slot_hint=0) == []
    quiet(s, n=None)
    assert slot(s, A0).phase is Phase.RUNNING


def test_several_answers_of_an_adapter_leave_nothing_anywhere() -> None:
    s = running(adapted=True, whole_backend=True)

    assert finish(s)[1:] == [
        WatchSlot(R, A0, RequestProgress.ANSWERED, wipe=True),
        WatchSlot(stranger(A1, 1), A1, RequestProgress.ANSWERED, wipe=True),
    ]
    quiet(s, n=None)
    quiet(s, stranger(A1, 1), None)
    assert [slot(s, which).content.resident for which in (A0, A1)] == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.REFUSED, GONE])
def test_several_answers_end_when_each_slot_was_flushed(outcome: Outcome) -> None:
    """Answers share a state that the server copies with its next batch; a refusal has none."""
    s = running(backend("a", 2, n_stream=2), tasks=2, answers=2)

    effects = [e for e in finish(s, "r", outcome, prompt_tokens=3) if isinstance(e, WatchSlot)]
    assert {e.slot for e in effects} == {A0, A1}
    flushed = outcome is not Outcome.REFUSED
    assert {(e.wipe, e.flush) for e in effects} == {(flushed, flushed)}


def test_several_answers_in_one_stream_copy_nothing() -> None:
    s = running(backend("a", 2, n_stream=1), tasks=2, answers=2)
    assert not any(isinstance(e, WatchSlot) for e in finish(s))


@pytest.mark.parametrize("generated", [2, 3])
def test_an_answer_of_two_tokens_shows_that_the_state_was_copied(generated: int) -> None:
    s = running(backend("a", 2, n_stream=2), tasks=2, answers=2)
    effects = finish(s, prompt_tokens=3, generated_tokens=generated)
    assert any(isinstance(e, WatchSlot) for e in effects) is (generated == 2)


def test_a_list_of_prompts_shares_no_state() -> None:
    s = running(backend("a", 2, n_stream=2), tasks=2)
    assert not any(isinstance(e, WatchSlot) for e in finish(s))


def test_a_slot_that_nobody_can_tell_about_claims_nothing() -> None:
    s = running()
    finish(s, "r", GONE)
    quiet(s, n=None)

    assert slot(s, A0).content.resident == UNKNOWN


def test_who_is_refused_takes_nothing_from_others() -> None:
    """Refusals name no slot; a slot of unchanged length keeps its content."""
    s = astray(holding={A0: tokens(2), A1: tokens(7, 8)})
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Tenant("bob")))
    watched = finish(s, outcome=Outcome.REFUSED)[1:]
    assert watched == [
        WatchSlot(R, A0, RequestProgress.ANSWERED),
        WatchSlot(stranger(A1), A1, RequestProgress.ANSWERED),
    ]
    quiet(s, stranger(A1), 2)

    assert (held(s, A1), slot(s, A1).content.tenant) == (tokens(7, 8), "bob")
    assert slot(s, A1).is_idle


def test_but_a_slot_of_another_length_is_nobodys() -> None:
    s = astray(holding={A1: tokens(7, 8)})
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Tenant("bob")))
    finish(s, outcome=Outcome.REFUSED)
    quiet(s, stranger(A1), 3)

    assert (slot(s, A1).content.resident, slot(s, A1).content.tenant) == (
        Resident(unread=3),
        NO_TENANT,
    )


# -- server-placed requests ------------------------------------------------------------------------


def test_the_gate_opens_when_a_request_is_known_to_run() -> None:
    s = astray()
    assert arrive(s, "r2", [5]) == []

    assert names(launched(s, 0)) == ["Dispatch"]
    assert s.state.inventory.gated == set()
    assert s.job_of(R).slot == A0


def test_a_lease_follows_the_request() -> None:
    s = astray(holding={A0: tokens(1, 1), A1: tokens(2)})
    launched(s, 1)

    assert s.job_of(R).slot == A1
    assert slot(s, A0).phase is Phase.IDLE
    assert held(s, A0) == tokens(1, 1)
    finish(s, prompt_tokens=1, generated=tokens(9, 9))
    assert held(s, A1) == tokens(1, 9)


def test_answer_of_a_moved_request_is_not_read_in_the_old_slot() -> None:
    """Both slots hold the same prompt and equally many answer tokens."""
    s = astray()
    lease = s.job_of(R).own.as_lease()
    slot(s, A0).hold(Content(Resident(tokens(1), 2)))
    launched(s, 1)
    finish(s, prompt_tokens=1, generated_tokens=3)
    s.handle(fact.answer_read(A0, lease.generation, tokens(1), tokens(7, 8)), NOW)

    assert slot(s, A0).content.resident == Resident(tokens(1), 2)


@pytest.mark.parametrize("index", [1, 9])
def test_a_slot_that_is_taken_or_unknown_cannot_be_followed_to(index: int) -> None:
    s = scheduler(TWO, idle_save_after_s=None)
    arrive(s, "r2", [5])  # on a/0
    arrive(s, "r", [1], pinnable=False)
    launched(s, 0 if index == 1 else index)

    assert s.job_of(R).slot == A1


@pytest.mark.parametrize("last", ["r", "r2"])
def test_nothing_is_claimed_where_it_ran_in_a_slot_that_was_left(last: str) -> None:
    """Idle before the router knew, the abandoned slot was the server's choice."""
    s = scheduler(TWO, idle_save_after_s=None)
    arrive(s, "r2", [5])  # on a/0
    arrive(s, "r", [1], pinnable=False)
    finish(s, "r2", Outcome.CLIENT_GONE)
    launched(s, 0)
    if last == "r":
        quiet(s, "r2", 3)
    finish(s, "r", prompt_tokens=1, generated_tokens=3)
    if last == "r2":
        quiet(s, "r2", 3)

    assert held(s, A0) == EMPTY
    assert slot(s, A1).content.resident.may_hold_more


def test_waiter_goes_on_from_a_request_over_unseen() -> None:
    """Reported as two events, slot and end would give r2 the other slot."""
    s = astray(holding={A0: tokens(2), A1: tokens(3)})
    assert arrive(s, "r2", [1, 5], pinnable=False) == []

    effects = finish(s, index=1, prompt_tokens=1, generated=tokens(5, 6))
    assert plan_of(effects).chosen.slot == A1
    assert held(s, A0) == tokens(2)


def test_unseen_ended_request_puts_idle_slots_in_doubt() -> None:
    """Regression: the leased slot was believed to hold the prompt."""
    s = astray(holding={A0: tokens(2), A1: tokens(1, 5)})
    finish(s, prompt_tokens=1, cached_tokens=0, generated_tokens=5)

    assert slot(s, A0).content.resident == Resident(EMPTY, may_hold_more=True)
    assert slot(s, A1).content.resident == Resident(tokens(1), may_hold_more=True)


def test_what_was_prepared_for_it_is_there_wherever_it_ran() -> None:
    s = scheduler(TWO, idle_save_after_s=None)
    assert arrive(s, ids=[1, 2, 3], pinnable=False) == [Prefill(R, A0, tokens(1, 2))]
    prefilled(s)
    finish(s, prompt_tokens=3, cached_tokens=2, generated_tokens=5)

    assert held(s, A0) == tokens(1, 2)


def test_unseen_abandoned_request_keeps_idle_slots_unused() -> None:
    """Regression: requests were sent to a slot that was believed idle and still ran."""
    s = astray()
    effects = finish(s, "r", GONE)

    assert effects[1:] == [WatchSlot(R, A0, RequestProgress.SENT), WatchSlot(stranger(A1), A1)]
    assert arrive(s, "r2", [5]) == []
    quiet(s, n=1)
    assert slot(s, A0).content.resident == Resident(unread=1)


def test_a_slot_that_was_still_watched_is_in_doubt_too() -> None:
    s = scheduler(TWO, idle_save_after_s=None)
    arrive(s, "r", [1], pinnable=False)
    arrive(s, "x", [5])
    launched(s, 0)  # x moves to a/1
    finish(s, "x", GONE)
    s.job_of(R).slot_confirmed = False  # as if r had been sent after x was abandoned
    finish(s, "r", prompt_tokens=1)

    quiet(s, "x", n=1)
    assert slot(s, A1).content.resident == Resident(unread=1)


# -- requests for a whole backend ----------------------------------------------------------------


def test_after_a_batch_nothing_is_known_of_any_slot() -> None:
    s = running(TWO, whole_backend=True, pinnable=False)
    launched(s, 1, others={0})
    finish(s, prompt_tokens=3)

    assert [x.content.resident for x in s.state.inventory.slots] == [UNKNOWN, UNKNOWN]


def test_a_batch_on_a_backend_of_one_slot_is_a_batch() -> None:
    """Regression: the batch was treated as a plain request that leaves its prompt."""
    s = running(backend("a", 1), whole_backend=True)
    finish(s, prompt_tokens=3)

    assert slot(s, A0).content.resident == UNKNOWN


def test_after_a_batch_that_was_left_all_slots_are_watched() -> None:
    """Regression: only the first slot was watched; the others were leased while running."""
    s = running(backend("a", 3), whole_backend=True, prompt=Prompt(unknown="batch"))
    effects = finish(s, "r", GONE)

    strangers = [s.state.inventory.slots[x].holder for x in (A1, A2)]
    assert effects[1:] == [
        WatchSlot(R, A0, RequestProgress.SENT),
        WatchSlot(stranger(A1, 1), A1),
        WatchSlot(stranger(A2, 1), A2),
    ]
    assert strangers == [stranger(A1, 1), stranger(A2, 1)]


def test_slots_that_several_tasks_leave_idle_stay_as_they_were() -> None:
    """Two tasks on a backend of four: which slots the server took is seen once they run."""
    s = scheduler(backend("a", 4, kv_dir=None), idle_save_after_s=None, coalesce_above_s=None)
    for index in range(4):
        arrive(s, f"c{index}", [index + 1] * 40, slot_hint=index)
        finish(s, f"c{index}", prompt_tokens=40, generated_tokens=1)
    arrive(s, "r", [9] * 40, tasks=2)
    assert arrive(s, "other", [1] * 41) == []

    effects = launched(s, 3, others={1})
    assert plan_of(effects).chosen.slot == A0
    assert held(s, A2) == tokens(*[3] * 40)
    finish(s, prompt_tokens=40)
    found = [slot(s, SlotId(A, index)).content.resident for index in (1, 2, 3)]
    assert (found[0], found[2]) == (UNKNOWN, UNKNOWN)
    assert found[1].tokens == tokens(*[3] * 40)


def test_a_slot_that_came_free_meanwhile_may_be_taken() -> None:
    """Another answer ends between the grant and the tasks' start: the server takes its slot."""
    s = scheduler(backend("a", 3, kv_dir=None), idle_save_after_s=None, coalesce_above_s=None)
    arrive(s, "other", [1] * 40, slot_hint=0)
    arrive(s, "r", [9] * 40, tasks=2)
    finish(s, "other", prompt_tokens=40, generated_tokens=1)
    launched(s, 0, others={1})
    assert slot(s, A0).phase is Phase.RUNNING
    assert slot(s, A2).is_idle
    finish(s, prompt_tokens=40)
    assert slot(s, A0).content.resident == UNKNOWN


def test_the_gate_stays_closed_where_a_taken_slot_is_in_use() -> None:
    s = scheduler(backend("a", 3, kv_dir=None), idle_save_after_s=None, coalesce_above_s=None)
    arrive(s, "other", [1] * 40, slot_hint=0)
    arrive(s, "r", [9] * 40, tasks=2)
    launched(s, 0, others={1})
    assert s.state.inventory.gated == {A}
    assert slot(s, A2).phase is Phase.RUNNING
    finish(s, prompt_tokens=40)
    assert not s.state.inventory.gated


def test_sums_of_several_tasks_outgrow_no_slot() -> None:
    s = running(backend("a", 2, n_ctx=100), tasks=2)
    effects = finish(s, prompt_tokens=190, generated_tokens=20)
    assert not any(isinstance(e, WatchSlot) for e in effects)


def test_several_tasks_wait_for_as_many_slots() -> None:
    s = scheduler(backend("a", 3, kv_dir=None), idle_save_after_s=None, coalesce_above_s=None)
    arrive(s, "one", [1] * 40)
    arrive(s, "two", [2] * 40)
    assert arrive(s, tasks=2) == []
    assert names(finish(s, "one", prompt_tokens=40)) == ["Account", "Dispatch"]


def test_tasks_that_were_left_are_watched_where_they_run() -> None:
    s = scheduler(backend("a", 4), idle_save_after_s=None)
    arrive(s, tasks=2, prompt=Prompt(unknown="batch"))
    launched(s, 1, others={2})
    effects = finish(s, "r", GONE)

    assert {e.slot for e in effects if isinstance(e, WatchSlot)} == {A1, A2}
    assert slot(s, A0).is_idle


# -- answers -------------------------------------------------------------------------------------


def answered() -> tuple[Driven, int]:
    s = running()
    generation = s.job_of(R).own.generation
    finish(s, prompt_tokens=3, generated_tokens=3)
    return s, generation


def read(s: Driven, generation: int, where: SlotId = A0) -> Resident:
    s.handle(fact.answer_read(where, generation, tokens(1, 2, 3), tokens(7, 8)), NOW)
    return slot(s, A0).content.resident


def test_an_answer_that_was_read_is_known() -> None:
    s, generation = answered()

    assert read(s, generation).tokens == tokens(1, 2, 3, 7, 8)


def test_an_answer_is_of_no_use_once_the_slot_is_taken_or_gone() -> None:
    s, generation = answered()
    assert read(s, generation, SlotId(A, 9)).unread == 2
    assert read(s, generation + 1).unread == 2
    assert plan_of(arrive(s, "r2", [1, 2, 3, 4])).chosen.source is Source.RESIDENT
    assert read(s, generation).unread == 2
    assert head(held(s, A0), 3) == tokens(1, 2, 3)


def test_reuse_is_accounted_at_the_rate_of_its_end() -> None:
    """0.01 s per token (build.rates); rates learned from this end apply later."""
    s = running(ids=run_of(20))
    (account, *_) = finish(s, prompt_tokens=20, cached_tokens=4, prompt_s=100.0)

    assert isinstance(account, Account)
    assert account.avoided_s == pytest.approx(0.04)
