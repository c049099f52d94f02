"""Deferral: a request could start, and does not."""

import pytest

from router.base.tokens import Tokens
from router.base.types import BackendId, BackendInfo, Outcome, Prompt, SlotId
from router.core.model.policy import PolicyName
from router.core.planning.planner import decide
from tests.support.scheduler import fact
from tests.support.scheduler.build import A, B, backend, request, run_of, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, launched, names
from tests.support.scheduler.driven import Driven

LONG, OTHER, SHORT = run_of(2000), run_of(2000, 7), run_of(20, 9)


def chosen(s: Driven, ids: Tokens, waited_s: float = 0.0) -> BackendId | None:
    decision = decide(s.state.inventory, request("new", ids=ids), NOW, waited_s)
    return None if decision is None else decision.plan.chosen.slot.backend


def test_last_slot_is_not_for_a_request_that_only_queues() -> None:
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    arrive(s, "first", LONG)

    assert chosen(s, OTHER) is None
    assert chosen(s, SHORT) == A
    assert chosen(s, run_of(1000, 7)) == A  # needs less, so is prefilled first
    assert names(arrive(s, "short", SHORT)) == ["Dispatch"]


def test_another_backend_may_have_it() -> None:
    s = scheduler(backend("a", 2), backend("b", 1), idle_save_after_s=None)
    arrive(s, "first", LONG)
    assert chosen(s, OTHER) == B


def test_the_last_slot_but_one_is_for_anybody() -> None:
    s = scheduler(backend("a", 3), idle_save_after_s=None)
    arrive(s, "first", LONG)
    assert chosen(s, OTHER) == A


def test_nobody_is_passed_by_for_ever() -> None:
    """Requests that came before those in the prefill queue go before them."""
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    arrive(s, "first", LONG)
    assert chosen(s, OTHER, waited_s=1.0) == A


@pytest.mark.parametrize("policy", [PolicyName.STICKY, PolicyName.PREFER_IDLE])
def test_server_placed_is_pinned_where_it_would_wait(policy: PolicyName) -> None:
    """Sticky home: a backend that takes no unpinned requests now."""
    s = scheduler(backend("a", 2), backend("b", 1), policy=policy, idle_save_after_s=None)
    unread = Prompt(unknown="only the server reads it")
    s.state.inventory.sticky["s"] = SlotId(A, 1)
    arrive(s, "first", slot_hint=0, avoid=frozenset({B}))
    finish(s, "first", Outcome.CLIENT_GONE)
    decision = decide(
        s.state.inventory, request("new", prompt=unread, server_picks=True, session="s"), NOW, 0.0
    )

    assert decision is not None
    expected = (A, True) if policy is PolicyName.STICKY else (B, False)
    assert (decision.plan.chosen.slot.backend, decision.request.pinnable) == expected


# -- a backend with volatile slots and a cache of its own ------------------------------------------

EMPTIES = backend("a", 3, keeps_idle_slots=False, kv_dir=None)


def emptied(*infos: BackendInfo) -> Driven:
    """Return a scheduler after another request's start cleared the slot that held LONG."""
    s = scheduler(*infos or (EMPTIES,), idle_save_after_s=None, coalesce_above_s=None)
    for name, ids in (("first", LONG), ("second", run_of(30, 7))):
        arrive(s, name, ids)
        launched(s, 0, name)
        finish(s, name)
    return s


def test_its_cache_knows_no_tenants() -> None:
    s = emptied()
    s.state.inventory.has_tenants = True
    decision = decide(s.state.inventory, request("new", ids=LONG), NOW, 0.0)
    assert decision is not None
    assert decision.request.pinnable


def test_its_cache_is_gone_with_the_process() -> None:
    s = emptied()
    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.backend_up(EMPTIES), NOW)
    decision = decide(s.state.inventory, request("new", ids=LONG), NOW, 0.0)
    assert decision is not None
    assert decision.request.pinnable
