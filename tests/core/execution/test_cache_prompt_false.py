"""`cache_prompt: false`: content that such a request leaves is known, and never saved."""

from math import inf
from typing import Any

import pytest

from router.base.types import Outcome, Reported, RequestId, SlotId, Tenant
from router.core.model.backend import Backend
from router.core.model.effects import Save, SaveReason
from router.core.model.jobs import SlotWatch
from router.core.model.slots import Content
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    NS,
    UNREAD,
    A,
    R,
    backend,
    rates,
    run_of,
    scheduler,
    snapshot,
    tokens,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    finish,
    held,
    launched,
    names,
    plan_of,
    prefilled,
    quiet,
    restored,
    slot,
    stranger,
)
from tests.support.scheduler.driven import Driven, wakeup

LONG, ELSE, LONGER = run_of(1000), run_of(1000, 7), run_of(2000)
SAVE_1 = RequestId("save-1")
ONE = backend("a", 1)
ANSWER: dict[str, Any] = {"generated_tokens": 1, "generated": tokens(9)}


def declined(*infos: Any, ids: Any = LONG, **more: Any) -> Driven:
    """Return a scheduler with an uncached prompt in a/0 that would be worth a snapshot."""
    s = scheduler(*(infos or (ONE,)), **({"coalesce_above_s": None} | more))
    arrive(s, ids=ids, reuse=False)
    if not s.state.inventory.backends[A].info.keeps_idle_slots:
        launched(s, 0)
    effects = finish(s, prompt_tokens=1000, cached_tokens=0, **ANSWER)
    assert names(effects) == ["Account"]
    return s


def saves(s: Driven, where: SlotId = A0) -> bool:
    """Return whether the slot is saved a day later."""
    return s.handle(fact.tick(), NOW + 86400) == [Save(SAVE_1, where, NS, SaveReason.IDLE)]


def test_what_it_leaves_is_known_and_not_saved_in_the_background() -> None:
    s = declined()

    assert held(s, A0) == LONG
    assert wakeup(s.state) == inf
    assert s.handle(fact.tick(), NOW + 86400) == []


def test_nor_where_it_will_not_last() -> None:
    declined(backend("a", 2, keeps_idle_slots=False))


def test_nor_when_another_takes_its_place() -> None:
    s = declined(idle_save_after_s=None)

    effects = arrive(s, "r2", ELSE)
    assert names(effects) == ["Dispatch"]
    price = plan_of(effects).chosen.price
    assert price.loss_s == price.save_s == 0.0


def test_nor_when_all_slots_are_needed() -> None:
    s = declined(backend("a", 2), idle_save_after_s=None)

    assert names(arrive(s, "r2", ELSE, whole_backend=True)) == ["Dispatch"]


def test_nor_when_the_router_stops_or_lets_go_of_the_backend() -> None:
    assert declined().handle(fact.stopping(save=True), NOW) == []
    assert "Save" not in names(declined().handle(fact.draining(A), NOW))


def test_nor_for_a_copy_elsewhere() -> None:
    s = declined(ONE, backend("b", 1), idle_save_after_s=None)
    s.state.inventory.backends[A].rates = rates(prefill_s=1.0)

    effects = arrive(s, "r2", LONGER)
    assert plan_of(effects).chosen.copy_from is None
    assert names(effects) == ["Dispatch"]


def test_another_that_holds_the_same_can_be_copied() -> None:
    s = declined(backend("a", 2), backend("b", 1), idle_save_after_s=None)
    slot(s, A1).hold(Content(slot(s, A0).content.resident))
    s.state.inventory.backends[A].rates = rates(prefill_s=1.0)

    assert arrive(s, "r2", LONGER)[0] == Save(RequestId("r2"), A1, NS, SaveReason.COPY)
    assert slot(s, B0).holder == RequestId("r2")


def test_its_prefill_is_never_shared_or_paused() -> None:
    s = scheduler(ONE, coalesce_above_s=0.0)

    assert names(arrive(s, ids=LONG, reuse=False)) == ["Dispatch"]
    assert arrive(s, "r2", LONGER) == []
    assert names(finish(s, prompt_tokens=1000, **ANSWER)) == ["Account", "Prefill"]


def test_whoever_goes_on_from_it_is_saved_again() -> None:
    s = declined()

    assert plan_of(arrive(s, "r2", LONGER)).chosen.reused_tokens == 1000
    finish(s, "r2", prompt_tokens=2000, cached_tokens=1000, **ANSWER)
    assert held(s, A0) == LONGER
    assert saves(s)


def test_prefill_for_an_uncached_request_is_saved_for_waiters() -> None:
    s = declined(idle_save_after_s=None)
    s.state.inventory.policy = scheduler(coalesce_above_s=0.0).state.inventory.policy
    assert names(arrive(s, "r2", ELSE)) == ["Prefill"]
    arrive(s, "r3", run_of(1500, 7))

    (save,) = prefilled(s, "r2", prompt_tokens=999)
    assert save == Save(RequestId("r2"), A0, NS, SaveReason.SHARED)
    assert slot(s, A0).content.savable


def test_what_is_restored_is_no_longer_what_it_left() -> None:
    s = declined(snapshots=[snapshot("s", run_of(900, 7))])

    assert names(arrive(s, "r2", ELSE)) == ["Restore"]
    restored(s, 900, "r2")
    assert slot(s, A0).content.savable


@pytest.mark.parametrize("failed", [True, False])
def test_nor_what_is_erased(failed: bool) -> None:
    s = declined()
    assert names(arrive(s, "r2", ELSE, tenant=Tenant("x"))) == ["Erase"]

    name = RequestId("r2")
    s.handle(fact.erase_failed(name, A0, "no") if failed else fact.erased(name, A0), NOW)
    assert slot(s, A0).content.savable is not failed


# -- other ends ----------------------------------------------------------------------------------


def test_a_client_that_left_leaves_nothing_to_save() -> None:
    s = scheduler(ONE)
    arrive(s, ids=LONG, reuse=False)
    finish(s, outcome=Outcome.CLIENT_GONE)

    assert names(quiet(s, n=800)) == ["Spent"]
    assert held(s, A0) == run_of(800)
    assert s.handle(fact.tick(), NOW + 86400) == []


def test_a_client_that_left_on_the_way_to_any_slot() -> None:
    """Content of any slot where the request may have run is not saved."""
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    arrive(s, **UNREAD)
    finish(s, outcome=Outcome.CLIENT_GONE)

    quiet(s, n=800)
    quiet(s, stranger(A1, slot(s, A1).generation - 1), n=800)
    assert [len(slot(s, at).content.resident) for at in (A0, A1)] == [800, 800]
    assert s.handle(fact.stopping(save=True), NOW) == []


def test_a_slot_that_was_watched_may_be_the_one() -> None:
    s = scheduler(backend("a", 2), coalesce_above_s=None)
    arrive(s, ids=LONG)
    arrive(s, "r2", reuse=False, pinnable=False)
    finish(s, outcome=Outcome.CLIENT_GONE)
    finish(s, "r2", prompt_tokens=3, **ANSWER)

    quiet(s, n=800)
    assert not slot(s, A0).content.savable


def test_where_it_did_not_run_nothing_changes() -> None:
    s = scheduler(backend("a", 2), holding={A0: LONG}, idle_save_after_s=None)
    slot(s, A0).last_used = NOW
    assert plan_of(arrive(s, **UNREAD)).chosen.slot == A1
    launched(s, 0)
    finish(s)

    assert [slot(s, at).content.savable for at in (A0, A1)] == [False, True]


@pytest.mark.parametrize("pinnable", [True, False])
def test_a_connection_that_was_lost_leaves_it_where_it_was(pinnable: bool) -> None:
    s = scheduler(backend("a", 2))
    arrive(s, reuse=False, pinnable=pinnable)

    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.backend_up(backend("a", 3)), NOW)
    assert [one.content.savable for one in s.state.inventory.slots] == [False, pinnable, True]


def test_slots_that_come_back_are_still_declined() -> None:
    there = Backend(backend("a", 2))
    there.attach(2)
    there.slots[1].hold(Content(savable=False))

    there.attach(3)
    assert [one.content.savable for one in there.slots] == [True, False, True]


def test_a_doubted_watch_keeps_no_other_slot_from_being_saved() -> None:
    """The request was pinned: what it left is in its own slot, whatever ran there later."""
    s = scheduler(backend("a", 3), coalesce_above_s=None)
    arrive(s, reuse=False)
    s.handle(fact.finished(R, Outcome.CLIENT_GONE, Reported()), NOW)
    watch = s.state.inventory.jobs[R]
    assert isinstance(watch, SlotWatch)
    watch.doubt()
    own = watch.slot

    s.handle(fact.backend_down(A), NOW)

    assert [found.id for found in s.state.inventory.slots if not found.content.savable] == [own]
