"""What requests cost, however they end, and when a tenant's next request may begin."""

from typing import Any

import pytest

from router.base.errors import TenantQuotaError
from router.base.types import Caller, Cost, Outcome, Prompt, RequestId
from router.core.model.effects import Account, Effect, Reject, Spent, WatchSlot
from router.core.model.tenancy import Limits
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, backend, scheduler
from tests.support.scheduler.drive import NOW, arrive, cancel, finish, names, quiet, tick
from tests.support.scheduler.driven import Driven

ALICE, BOB = Caller("laptop", "alice"), Caller("desk", "bob")


def limited(n_slots: int = 4, most: int = 300, **more: Any) -> Driven:
    s = scheduler(backend("a", n_slots, **more), idle_save_after_s=None, coalesce_above_s=None)
    s.state.budget.limit({"alice": Limits(tokens_per_day=most)})
    return s


def ask(s: Driven, name: str, n: int = 100, caller: Caller | None = ALICE, **more: Any) -> str:
    """Return what becomes of a request with a prompt of `n` tokens of its own."""
    first = 1000 * sum(name.encode())
    effects = arrive(
        s, name, range(first, first + n), caller=caller, **({"max_new_tokens": 10} | more)
    )
    return " ".join(names(effects))


def refused(effects: list[Effect]) -> list[str]:
    return [
        effect.request
        for effect in effects
        if isinstance(effect, Reject) and isinstance(effect.error, TenantQuotaError)
    ]


def costs(effects: list[Effect]) -> list[Cost]:
    return [effect.cost for effect in effects if isinstance(effect, Account | Spent)]


def test_requests_in_progress_reserve_what_they_may_cost() -> None:
    """Three of 110 tokens are more than 300: a fourth waits though slots are idle."""
    s = limited()
    told = [ask(s, name, caller=ALICE) for name in "abcd"]
    assert told == ["Dispatch", "Dispatch", "Dispatch", ""]
    assert ask(s, "e", caller=BOB) == "Dispatch"


def test_an_answer_without_a_limit_reserves_the_context() -> None:
    s = limited(most=5000)
    assert [ask(s, name, max_new_tokens=None) for name in "ab"] == ["Dispatch", ""]
    effects = finish(s, "a", prompt_tokens=100, cached_tokens=0, generated_tokens=7)
    assert "Dispatch" in names(effects)


def test_a_prompt_that_is_not_read_reserves_its_bytes() -> None:
    s = limited()
    unread = Prompt(unknown="not a completion")
    more: Any = {"prompt": unread, "body_bytes": 300, "max_new_tokens": 0, "pinnable": False}
    assert ask(s, "a", **more).startswith("Dispatch")
    assert ask(s, "b") == ""


def test_who_waits_is_refused_when_the_tokens_are_used() -> None:
    s = limited(n_slots=1, most=100)
    for name, caller in (("a", ALICE), ("b", ALICE), ("c", BOB), ("d", ALICE)):
        ask(s, name, caller=caller)
    effects = finish(s, "a", prompt_tokens=100, cached_tokens=0, generated_tokens=7)
    assert refused(effects) == ["b", "d"]
    assert [e.request.id for e in effects if isinstance(e, Account)] == ["a"]
    assert "Save" in names(effects)  # the slot is c's
    assert refused(arrive(s, "late", caller=ALICE)) == ["late"]


@pytest.mark.parametrize(
    ("reported", "begun", "cost"),
    [
        ({"prompt_tokens": 100, "cached_tokens": 40, "generated_tokens": 7}, True, Cost(40, 60, 7)),
        ({"generated_tokens": 7}, True, Cost(0, 100, 7)),
        ({}, False, Cost()),
    ],
)
def test_cost_is_reported_or_as_far_as_sure(
    reported: dict[str, Any], begun: bool, cost: Cost
) -> None:
    s = limited()
    ask(s, "a")
    outcome = Outcome.OK if begun else Outcome.CLIENT_GONE
    assert costs(finish(s, "a", outcome, begun=begun, **reported)) == [cost]


@pytest.mark.parametrize(
    ("begun", "held", "cost"),
    [
        (False, 0, []),  # it never ran
        (False, 64, [Cost(computed=64)]),
        (False, 103, [Cost(computed=100, generated=3)]),
        (True, 103, [Cost(generated=3)]),
        (False, None, [Cost(computed=100)]),
    ],
)
def test_what_is_computed_for_nobody_counts(
    begun: bool, held: int | None, cost: list[Cost]
) -> None:
    s = limited()
    ask(s, "a")
    finish(s, "a", Outcome.CLIENT_GONE, begun=begun)
    assert costs(quiet(s, "a", held)) == cost


@pytest.mark.parametrize(("ran", "cost"), [(False, []), (True, [Cost(computed=100, generated=1)])])
def test_a_slot_as_long_as_before_is_asked_whether_it_ran(ran: bool, cost: list[Cost]) -> None:
    s = limited(n_slots=1, most=10_000, kv_dir=None)
    ask(s, "a", n=101)
    finish(s, "a", prompt_tokens=101, cached_tokens=0, generated_tokens=1)
    ask(s, "b")
    finish(s, "b", Outcome.CLIENT_GONE)
    assert costs(s.handle(fact.quiet(RequestId("b"), 101, ran=ran), NOW)) == cost


@pytest.mark.parametrize(
    ("answers", "held", "ran", "generated"),
    [
        (4, (130, 0, 0, 0), True, 4 * 30),  # the server has emptied the slots of the others
        (4, (0, 0, 130, 0), True, 4 * 30),
        (4, (130, 130, 130, 130), False, 0),  # what they held before
        (1, (40, 35, 25, 27), True, 15 + 10 + 2),  # four prompts of 25 tokens
    ],
)
def test_several_answers_for_nobody_count_as_slots_show(
    answers: int, held: tuple[int, ...], ran: bool, generated: int
) -> None:
    """Else a client that leaves early has as many tokens as it likes."""
    s = limited(most=10_000)
    assert ask(s, "a", tasks=4, answers=answers, max_new_tokens=None) == "Dispatch"
    watched = [e for e in finish(s, "a", Outcome.CLIENT_GONE) if isinstance(e, WatchSlot)]
    assert [one.slot.index for one in watched] == [0, 1, 2, 3]
    told = [
        cost
        for one, n in zip(watched, held, strict=True)
        for cost in costs(s.handle(fact.quiet(one.request, n, ran=ran), NOW))
    ]
    assert sum(one.generated for one in told) == generated
    assert sum(one.computed for one in told) == 100


def test_reused_tokens_are_reserved_at_their_price() -> None:
    s = limited()
    ask(s, "a")
    finish(s, "a", prompt_tokens=100, cached_tokens=0, generated_tokens=1)
    again: Any = {"prompt": Prompt(s.state.inventory.slots[A0].content.resident.tokens)}
    s.state.budget.limit({"alice": Limits(tokens_per_day=105, reused=1.0)})
    assert [ask(s, name, **again) for name in "bc"] == ["Dispatch", ""]


def test_a_watched_slot_holds_nothing_up_that_is_paid() -> None:
    """An answered request whose slot is being emptied has cost what it cost."""
    s = limited(most=400)
    ask(s, "a", adapted=True)
    finish(s, "a", prompt_tokens=100, cached_tokens=0, generated_tokens=1)
    assert [ask(s, name) for name in "bc"] == ["Dispatch", "Dispatch"]


def test_where_no_slot_shows_it_the_whole_prompt_counts() -> None:
    """The server chooses slots by itself, and may have computed all of it."""
    s = limited(keeps_idle_slots=False)
    ask(s, "a")
    effects = finish(s, "a", Outcome.CLIENT_GONE)
    assert costs(effects) == [Cost(), Cost(computed=100)] or costs(effects) == [
        Cost(computed=100),
        Cost(),
    ]


def test_the_queue_is_looked_at_when_a_window_ends() -> None:
    s = limited(n_slots=2, most=100)
    assert [ask(s, name) for name in "ab"] == ["Dispatch", ""]
    at = s.next_wakeup(NOW)
    assert at is not None
    assert at <= NOW + 60


def test_a_lower_limit_refuses_who_waits() -> None:
    s = limited(n_slots=2, most=300)
    s.state.budget.costs_of_day = lambda _: {"alice": Cost(computed=60)}
    assert [ask(s, name, n=290) for name in "ab"] == ["Dispatch", ""]
    s.state.budget.limit({"alice": Limits(tokens_per_day=50)})
    assert refused(tick(s, 1.0)) == ["b"]


def test_a_slot_that_is_emptied_shows_what_it_held() -> None:
    s = limited()
    ask(s, "a", adapted=True)
    finish(s, "a", Outcome.CLIENT_GONE)
    effects = s.handle(fact.quiet(RequestId("a"), 64, wiped=True), NOW)
    assert costs(effects) == [Cost(computed=64)]


def test_a_refused_request_costs_nothing() -> None:
    s = limited()
    ask(s, "a")
    finish(s, "a", Outcome.REFUSED, begun=True)
    assert costs(quiet(s, "a", 0)) == []
    assert s.state.budget.left("alice") == 300


def test_a_prefill_that_is_left_counts() -> None:
    """The prefill's result so far stays in the slot, and nobody would pay for it."""
    s = scheduler(backend("a", 1), idle_save_after_s=None, coalesce_above_s=0.0)
    s.state.budget.limit({"alice": Limits(tokens_per_day=300)})
    assert ask(s, "a") == "Prefill"
    cancel(s, "a")
    effects = s.handle(fact.prefill_failed(RequestId("a"), "the client disconnected", 64), NOW)
    assert costs(effects) == [Cost(computed=64)]
    assert s.state.budget.left("alice") == 236


def test_reserved_tokens_are_free_again_at_the_end() -> None:
    s = limited(n_slots=2, most=150)
    assert [ask(s, name) for name in "ab"] == ["Dispatch", "Dispatch"]
    finish(s, "a", prompt_tokens=100, cached_tokens=100, generated_tokens=1)
    tick(s, 1.0)
    assert s.state.budget.left("alice") == 149
