"""Admission: which requests are accepted, wait, are rejected, and get a slot."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from router.base.errors import ContextTooLongError, DeadlineError, NoBackendError, QueueFullError
from router.base.tokens import head
from router.base.types import (
    Lease,
    MemoryKind,
    Outcome,
    Prompt,
    Reported,
    RequestId,
    SlotId,
    SlotStatus,
    SnapshotId,
)
from router.core.admission import admission
from router.core.model.effects import (
    Dispatch,
    Effect,
    Prefill,
    Reject,
    Restore,
    Save,
    SaveReason,
    StopWork,
)
from router.core.model.policy import PolicyName
from router.core.model.request_queue import QueueLimits
from router.core.model.slots import NO_WORK, NOTHING, Phase
from router.core.model.tuning import TUNING
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    A2,
    B0,
    NS,
    R2,
    R3,
    UNREAD,
    A,
    B,
    R,
    backend,
    leased,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import NOW, arrive, cancel, finish, launched, names, slot
from tests.support.scheduler.driven import Driven

ONE = backend("a", 1)
LONG = run_of(1000)


def rejected(effects: object) -> type[Exception]:
    assert isinstance(effects, list)
    (reject,) = effects
    assert isinstance(reject, Reject)
    return type(reject.error)


# -- arrivals ------------------------------------------------------------------------------------


def test_a_request_goes_at_once_where_a_slot_is_free() -> None:
    s = scheduler(ONE)
    (dispatch,) = arrive(s)

    assert isinstance(dispatch, Dispatch)
    assert dispatch.lease == Lease(A0, 1, R)
    assert dispatch.waited_s == 0.0
    assert slot(s, A0).phase is Phase.RUNNING
    assert s.state.inventory.granted == 1


def test_what_fits_nowhere_is_refused_with_the_longest_context() -> None:
    s = scheduler(backend("a", n_ctx=10), backend("b", n_ctx=20))
    (reject,) = arrive(s, ids=run_of(20))

    assert isinstance(reject, Reject)
    assert isinstance(reject.error, ContextTooLongError)
    assert (reject.error.n_prompt_tokens, reject.error.n_ctx) == (20, 20)


def test_what_fits_into_another_model_only_waits_for_its_own() -> None:
    s = scheduler(backend("a", n_ctx=10))

    assert arrive(s, ids=run_of(20), model="other") == []
    assert len(s.state.queue) == 1


def test_waiter_is_told_that_its_backend_came_back_small() -> None:
    s = scheduler(backend("a", 1, n_ctx=2000), queue=QueueLimits(no_backend_s=10.0))
    arrive(s, "r")
    arrive(s, "r2", ids=LONG)
    s.handle(fact.backend_up(backend("a", 1, n_ctx=100)), NOW)

    assert rejected(s.handle(fact.tick(), NOW + 10)) is ContextTooLongError


def test_request_without_a_free_slot_is_served_in_turn() -> None:
    s = scheduler(ONE)
    arrive(s, "r")
    assert arrive(s, "r2") == []
    assert arrive(s, "r3") == []

    effects = s.handle(fact.finished(R, Outcome.OK, Reported()), NOW + 5)
    dispatch = effects[-1]
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.request, dispatch.waited_s) == (R2, 5.0)


def test_a_client_with_many_prompts_waits_for_itself() -> None:
    """Five prompts of a at once: four are served after the prompt of b, which came last."""
    s = scheduler(ONE)
    for number in range(5):
        arrive(s, f"a{number}", client="a")
    arrive(s, "b", client="b")

    s.handle(fact.finished(RequestId("a0"), Outcome.OK, Reported()), NOW + 5)
    assert list(s.state.inventory.jobs) == ["b"]


MANY = 3 * TUNING.scanned_at_once


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({"model": "m"}, {"model": "other"}),
        ({"slot_hint": 0}, {}),
        ({"whole_backend": True, "model": "m"}, {"model": "other"}),
    ],
    ids=["another model", "another slot", "all slots"],
)
def test_many_who_have_no_room_do_not_stand_before_one_who_has(
    theirs: dict[str, Any], mine: dict[str, Any]
) -> None:
    """Same client for all of them, so that the oldest is first in the queue."""
    s = scheduler(backend("a", 2), backend("b", 1, models=frozenset({"other"})))
    arrive(s, "running", slot_hint=0, model="m")
    for number in range(MANY):
        arrive(s, f"r{number}", **({"model": "m", "slot_hint": 0} | theirs))

    assert names(arrive(s, "mine", **({"model": "m"} | mine))) == ["Dispatch"]
    assert len(s.state.queue) == MANY


def test_long_prompts_for_a_large_slot_do_not_block_short() -> None:
    s = scheduler(backend("a", 1, n_ctx=10_000), backend("b", 1, n_ctx=100))
    for number in range(MANY):
        arrive(s, f"r{number}", LONG)

    assert names(arrive(s, "short")) == ["Dispatch"]


def test_unread_prompts_do_not_block_others_with_tenants() -> None:
    s = scheduler(backend("a", 2), backend("b", 1, models=frozenset({"other"})))
    arrive(s, "theirs", model="m", tenant="x")
    for number in range(MANY):
        arrive(s, f"r{number}", model="m", tenant="x", **UNREAD)

    arrive(s, "mine", model="other", tenant="x")
    assert "mine" in s.state.inventory.jobs


def test_a_backend_that_comes_up_is_filled_step_by_step() -> None:
    s = scheduler()
    for number in range(MANY):
        arrive(s, f"r{number}")
    s.handle(fact.backend_up(backend("a", MANY)), NOW)
    assert len(s.state.queue) > 0
    while s.next_wakeup(NOW) == NOW:
        s.handle(fact.tick(), NOW)

    assert len(s.state.queue) == 0


def test_an_idle_slot_is_found_behind_many_who_wait_by_choice() -> None:
    s = scheduler(backend("a", 3), idle_save_after_s=None)
    arrive(s, "first", run_of(2000))
    for number in range(MANY):
        arrive(s, f"sibling{number}", [*[1] * 2000, number], client=f"c{number}")
    assert len(s.state.queue) == MANY
    assert names(arrive(s, "other", run_of(20, 9), client="z")) == []
    now = NOW
    while (at := s.next_wakeup(now)) is not None and at < NOW + 1.0:
        now = at
        if "Dispatch" in names(s.handle(fact.tick(), now)):
            return
    raise AssertionError("nobody looked")


def test_request_planned_before_a_change_is_planned_again() -> None:
    """Between two scans, the slot of that request became free."""
    n = 40
    s = scheduler(
        backend("a", n + 1),
        policy=PolicyName.PREFER_OWNER,
        idle_save_after_s=None,
        coalesce_above_s=None,
        max_wait_s=1000.0,
    )
    for number in range(n):
        arrive(s, f"own{number}", [number] * 300, client=f"c{number}")
    for number in range(n):
        arrive(s, f"next{number}", [*[number] * 300, 999], client=f"c{number}")
    now = next_tick(s, NOW)[0]
    out = finish(s, "own16", prompt_tokens=300)
    while "Dispatch" not in names(out):
        now, out = next_tick(s, now)
        assert now < NOW + 1.0


def next_tick(s: Driven, now: float) -> tuple[float, list[Effect]]:
    at = s.next_wakeup(now)
    assert at is not None
    return at, s.handle(fact.tick(), at)


def test_unservable_request_is_told_behind_many_waiters() -> None:
    s = scheduler(ONE, queue=QueueLimits(no_backend_s=5.0))
    for number in range(MANY):
        arrive(s, f"r{number}", model="m")
    arrive(s, "lost", model="other")

    assert admission.wakeup(s.state, NOW) <= NOW + 5.0
    assert Reject(RequestId("lost"), ANY_ERROR) in s.handle(fact.tick(), NOW + 5.0)


def test_wait_for_a_slot_does_not_shorten_that_for_a_backend() -> None:
    s = scheduler(ONE, queue=QueueLimits(no_backend_s=10.0))
    arrive(s, "first")
    arrive(s, "waits")
    s.handle(fact.backend_down(A), NOW + 50.0)
    assert s.next_wakeup(NOW + 50.0) == NOW + 60.0
    assert s.handle(fact.tick(), NOW + 59.0) == []
    s.handle(fact.backend_up(ONE), NOW + 59.5)
    assert RequestId("waits") in s.state.inventory.jobs


def test_others_time_is_not_charged_for() -> None:
    s = scheduler(backend("a", 3), idle_save_after_s=None)
    arrive(s, "big", run_of(4000), client="big")
    arrive(s, "small", run_of(1000, 7), client="small")
    served_s = s.state.queue._served_s
    assert served_s["small"] < served_s["big"] / 2


def test_prefill_for_a_waiter_ends_when_it_leaves() -> None:
    s = scheduler(backend("a", 1, memory_kind=MemoryKind.HYBRID), idle_save_after_s=None)
    assert names(arrive(s, "r", run_of(2000))) == ["Prefill"]
    arrive(s, "r2", run_of(2001))
    assert cancel(s, "r") == []
    assert cancel(s, "r2") == [StopWork(R)]


def test_full_queue_rejects_only_what_must_wait() -> None:
    s = scheduler(ONE, queue=QueueLimits(max_requests=0))

    assert names(arrive(s, "r")) == ["Dispatch"]
    assert rejected(arrive(s, "r2")) is QueueFullError


def test_a_router_that_stops_lets_nobody_in() -> None:
    s = scheduler(ONE)
    arrive(s, "r")
    arrive(s, "r2")

    assert rejected(s.handle(fact.stopping(save=False), NOW)) is NoBackendError
    assert rejected(arrive(s, "r3")) is NoBackendError
    assert s.state.inventory.jobs.keys() == {R}


# -- disconnects ---------------------------------------------------------------------------------


def test_a_client_that_leaves_while_waiting_costs_nothing() -> None:
    s = scheduler(ONE)
    arrive(s, "r")
    arrive(s, "r2")

    assert cancel(s, "r2") == []
    assert names(finish(s)) == ["Account"]


def test_a_client_that_leaves_in_a_preparation_stops_it() -> None:
    s = scheduler(ONE)
    assert names(arrive(s, ids=LONG)) == ["Prefill"]

    assert cancel(s) == [StopWork(R)]
    assert slot(s, A0).phase is Phase.PREPARING  # until the step is over


def test_cancel_twice_or_after_the_send_does_nothing() -> None:
    s = scheduler(ONE)
    arrive(s)

    assert cancel(s) == []
    assert cancel(s, "never seen") == []
    assert s.state.inventory.jobs.keys() == {R}


def test_a_prefill_that_others_wait_for_goes_on() -> None:
    s = scheduler(ONE)
    assert arrive(s, "r", LONG) == [Prefill(R, A0, head(LONG, 999))]
    arrive(s, "r2", LONG)

    assert cancel(s, "r") == []


# -- timeouts ------------------------------------------------------------------------------------


def test_whoever_is_overdue_is_told() -> None:
    s = scheduler(ONE, queue=QueueLimits(deadline_s=5.0))
    arrive(s, "r")
    arrive(s, "r2")

    assert s.handle(fact.tick(), NOW + 4.9) == []
    assert rejected(s.handle(fact.tick(), NOW + 5.0)) is DeadlineError


def test_nobody_waits_long_for_a_backend_that_is_not_there() -> None:
    s = scheduler(ONE, queue=QueueLimits(no_backend_s=5.0))
    arrive(s, "r")
    arrive(s, "r2")
    arrive(s, "r3", model="other")
    assert admission.wakeup(s.state, NOW) == NOW + 5.0

    assert s.handle(fact.tick(), NOW + 4.9) == []
    assert s.handle(fact.tick(), NOW + 5.0)[0] == Reject(RequestId("r3"), ANY_ERROR)
    assert admission.wakeup(s.state, NOW + 5.0) > NOW + 10.0


class _AnyError(NoBackendError):
    """Error that is equal to every NoBackendError."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoBackendError)

    __hash__ = NoBackendError.__hash__


ANY_ERROR = _AnyError()


def test_patience_with_a_busy_slot_ends() -> None:
    s = scheduler(ONE, max_wait_s=7.0)
    assert admission.wakeup(s.state, NOW) == inf
    arrive(s, "r")
    arrive(s, "r2")

    assert admission.wakeup(s.state, NOW) == NOW + 7.0
    assert admission.wakeup(s.state, NOW + 7.0) == inf


# -- admission -----------------------------------------------------------------------------------


def test_others_pass_who_waits_for_a_busy_slot() -> None:
    s = scheduler(backend("a", 2), policy=PolicyName.CHEAPEST, coalesce_above_s=None)
    arrive(s, "r", LONG)
    assert arrive(s, "r2", run_of(1001)) == []

    assert names(arrive(s, "r3", [7, 8])) == ["Dispatch"]


def test_whole_backend_request_is_not_starved() -> None:
    s = scheduler(backend("a", 2), backend("b", 2))
    arrive(s, "x", [1])
    leased(s.state.inventory.slots[B0], RequestId("y"), NO_WORK)
    assert arrive(s, "r", whole_backend=True) == []

    (dispatch,) = arrive(s, "r2", [2])
    assert isinstance(dispatch, Dispatch)
    assert dispatch.lease.slot == A1  # b, where less is running, is kept for r
    assert arrive(s, "r3", [3]) == []


def test_a_backend_that_somebody_else_uses_is_not_kept() -> None:
    """Clients outside the router may use the backend for hours."""
    s = scheduler(backend("a", 2))
    s.handle(fact.found_busy({A0: slot(s, A0).generation}), NOW)
    assert arrive(s, "r", prompt=Prompt(unknown="media"), pinnable=False) == []

    assert names(arrive(s, "r2", [2])) == ["Dispatch"]


def test_an_idle_backend_is_not_kept_for_who_waits_at_home() -> None:
    """Regression: an unpinned `sticky` request waited for a/0, and kept b idle meanwhile."""
    s = scheduler(ONE, backend("b", 1), policy=PolicyName.STICKY)
    arrive(s, "r", session="x")
    assert arrive(s, "r2", session="x", pinnable=False) == []

    assert names(arrive(s, "r3", session="y")) == ["Dispatch"]


def test_a_whole_backend_is_leased_whole() -> None:
    s = scheduler(backend("a", 3))
    arrive(s, whole_backend=True)

    assert [one.id for one in s.job_of(R).others] == [A1, A2]
    assert s.state.inventory.gated == {A}


def test_a_snapshot_is_in_use_from_the_grant_on() -> None:
    used = snapshot("s", run_of(900))
    s = scheduler(ONE, snapshots=[used], holding={A0: run_of(1000, 7)})

    assert arrive(s, ids=LONG) == [Save(R, A0, NS, SaveReason.DISPLACED)]
    assert s.job_of(R).using == used.id
    assert s.state.inventory.catalog.snapshots() == [(used, 2, 1)]


def test_only_so_many_homes_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TUNING", replace(TUNING, sticky_keys=2))
    s = scheduler(backend("a", 3), policy=PolicyName.STICKY)
    for n in range(3):
        arrive(s, f"r{n}", [n], session=f"s{n}")

    assert list(s.state.inventory.sticky.values()) == [SlotId(A, 1), SlotId(A, 2)]


def test_homes_are_of_no_interest_to_other_policies() -> None:
    s = scheduler(backend("a", 3))
    arrive(s, "r", [1], session="s")
    assert not s.state.inventory.sticky


def test_a_request_that_failed_elsewhere_avoids_that_backend() -> None:
    s = scheduler(ONE, backend("b", 1), snapshots=[snapshot("s", run_of(900))])
    (restore,) = arrive(s, ids=LONG, avoid=frozenset({A}))

    assert restore == Restore(R, B0, snapshot("s", run_of(900)))
    assert s.job_of(R).slot == B0
    assert B in s.state.inventory.up


# -- a model without KV --------------------------------------------------------------------------

EMBEDDER = backend("a", 2, generates=False, kv_dir=None)


def test_where_slots_hold_nothing_embeddings_go_side_by_side() -> None:
    """Embeddings: one per slot, without polls, and no tenant's tokens are in the way."""
    s = scheduler(EMBEDDER)
    sent = [*arrive(s, **UNREAD, tenant="x"), *arrive(s, "r2", **UNREAD, tenant="y")]
    assert [isinstance(one, Dispatch) and one.confirm for one in sent] == [False, False]
    assert arrive(s, "r3", **UNREAD, tenant="y") == []

    (dispatch,) = finish(s)[1:]
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.request, dispatch.lease.slot) == (R3, A0)
    finish(s, "r3")
    assert slot(s, A0).content.resident == NOTHING
    assert not s.state.inventory.gated


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE, Outcome.REFUSED, Outcome.BACKEND_ERROR])
@pytest.mark.parametrize("adapted", [False, True])
def test_where_slots_hold_nothing_nobody_waits_for_what_was_left(
    outcome: Outcome, adapted: bool
) -> None:
    """Nothing is wiped either: a model without KV refuses each attempt."""
    s = scheduler(EMBEDDER)
    arrive(s, **UNREAD, adapted=adapted)
    assert names(finish(s, outcome=outcome)) == ["Account"]
    assert slot(s, A0).phase is Phase.IDLE
    assert not s.state.inventory.jobs


def test_where_slots_hold_nothing_ours_may_run_in_any() -> None:
    """Work in a slot that the router considers idle is not a stranger's."""
    s = scheduler(EMBEDDER)
    arrive(s, **UNREAD)
    assert s.handle(fact.found_busy({A1: slot(s, A1).generation}), NOW) == []
    statuses = tuple(SlotStatus(i, True, 5, 4096, adapted=True) for i in range(2))
    assert s.handle(fact.backend_up(EMBEDDER, statuses), NOW) == []
    assert [slot(s, A0).phase, slot(s, A1).phase] == [Phase.IDLE, Phase.IDLE]
    assert slot(s, A0).content.resident == NOTHING


def test_a_prompt_is_too_long_for_those_that_are_meant() -> None:
    """Backends without KV do not count; a failed one may be back before the deadline."""
    ids = run_of(200)
    infos = backend("a", 1, n_ctx=100), backend("b", 1, n_ctx=400, generates=False)
    (reject,) = arrive(scheduler(*infos), ids=ids, avoid=frozenset({B}))
    assert isinstance(reject, Reject)
    assert isinstance(reject.error, ContextTooLongError)
    infos = backend("a", 1, n_ctx=100), backend("b", 1, n_ctx=400)
    assert arrive(scheduler(*infos), ids=ids, avoid=frozenset({B})) == []


def test_several_answers_take_all_slots_even_empty_ones() -> None:
    s = scheduler(EMBEDDER)
    arrive(s, **UNREAD)
    assert arrive(s, "r2", **UNREAD, whole_backend=True) == []
    assert names(finish(s)) == ["Account", "Dispatch"]
    assert arrive(s, "r3", **UNREAD) == []


def test_of_equal_slots_the_longest_unused_is_taken() -> None:
    """Same choice as the server, which picks the slot itself."""
    s = scheduler(backend("a", 3), idle_save_after_s=None)
    for which, used in ((A0, 3.0), (A1, 1.0), (A2, 2.0)):
        slot(s, which).last_used = used
    (dispatch,) = arrive(s, **UNREAD)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.lease.slot == A1


# -- requests that the server places better --------------------------------------------------------


def unread(name: str, **more: Any) -> fact.Fact:
    return fact.arrived(
        request(name, (), prompt=Prompt(unknown="infill"), server_picks=True, **more)
    )


def test_server_picks_the_slot_of_an_unread_prompt() -> None:
    s = scheduler(backend("a", 4), idle_save_after_s=None)
    (dispatch,) = s.handle(unread("r"), NOW)
    assert isinstance(dispatch, Dispatch)
    assert (dispatch.pin, dispatch.confirm) == (False, True)


def test_it_is_pinned_beside_a_slot_that_was_left() -> None:
    """Editors send a new request with each key press."""
    s = scheduler(backend("a", 4), idle_save_after_s=None)
    s.handle(unread("r"), NOW)
    launched(s, 0)
    finish(s, "r", Outcome.CLIENT_GONE)
    (dispatch,) = s.handle(unread("r2"), NOW)
    assert isinstance(dispatch, Dispatch)
    assert dispatch.pin


def test_it_is_pinned_beside_a_long_prefill_and_keeps_nobody_out() -> None:
    s = scheduler(backend("a", 4), idle_save_after_s=None)
    assert names(arrive(s, "r", run_of(9000), client="x")) == ["Prefill"]
    assert names(s.handle(unread("r2", client="y"), NOW)) == ["Dispatch"]
    assert names(arrive(s, "r3", (7, 2, 3), client="z")) == ["Dispatch"]


def test_slot_free_before_the_tick_serves_a_late_request() -> None:
    """The deadline has passed by less than it takes to notice, and a slot is free."""
    s = scheduler(ONE, queue=QueueLimits(deadline_s=5.0))
    arrive(s, "r")
    arrive(s, "r2")

    s.handle(fact.finished(RequestId("r"), Outcome.OK, Reported()), NOW + 5.001)

    assert "r2" in s.state.inventory.jobs


# -- what waiting requests begin with --------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_waiting_request_begins_with_is_not_evicted(waits: bool) -> None:
    s = scheduler(ONE)
    s.handle(fact.snapshots_found((snapshot("s", LONG, size=100),)), NOW)
    catalog = s.state.inventory.catalog
    catalog.limits = replace(catalog.limits, max_bytes=250, protected_share=1.0)
    arrive(s, ids=run_of(5, 7))
    if waits:
        arrive(s, "r2", ids=LONG + run_of(5, 2))
    for number in range(2):
        made = snapshot(f"new{number}", run_of(900, 10 + number), size=100)
        catalog.add(made, MemoryKind.FULL, 50.0)
    assert (SnapshotId("s") in catalog) is waits

    s.handle(fact.tick(), NOW + TUNING.queued_prefix_kept_s + 1)
    catalog.add(snapshot("last", run_of(900, 99), size=100), MemoryKind.FULL, 50.0)
    assert catalog.protection.total_bytes == 0
