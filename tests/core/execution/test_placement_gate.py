"""Placement gate: server-placed requests are sent beside others, if none can miss its slot."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from router.base.errors import DeadlineError
from router.base.tokens import head
from router.base.types import (
    KvDir,
    Outcome,
    Prompt,
    Reported,
    RequestId,
    RequestProgress,
    SlotId,
    Tenant,
)
from router.core.execution.job_ends import watch
from router.core.model.effects import Dispatch, Effect, Erase, Prefill, Reject, Restore, Save
from router.core.model.jobs import AtGate
from router.core.model.request_queue import QueueLimits
from router.core.model.slots import NO_WORK, UNKNOWN, Content, Resident
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, A1, A, backend, rates, run_of, scheduler, snapshot
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    begun,
    cancel,
    finish,
    launched,
    prefill_failed,
    prefilled,
    quiet,
    restored,
    slot,
    tick,
)
from tests.support.scheduler.driven import Driven

# At 0.01 s per token (build.rates).
LONG, OTHER, SHORT = run_of(300, 1), run_of(200, 2), run_of(20, 3)
X, Y = Tenant("x"), Tenant("y")


def fresh(n_slots: int = 4, **more: Any) -> Driven:
    given: dict[str, Any] = {"idle_save_after_s": None, "reuse_probability": 0.0}
    kv_dir = None if more.pop("unsaved", False) else KvDir("kv")
    return scheduler(backend("a", n_slots, kv_dir=kv_dir), **(given | more))


def message(s: Driven, name: str = "m", ids: Any = LONG, **more: Any) -> list[str]:
    """Submit a server-placed request, and return its effects as text."""
    return of(arrive(s, name, ids, pinnable=False, **more))


def of(effects: list[Effect]) -> list[str]:
    """Return each effect's kind and request as text."""
    kinds = Prefill | Dispatch | Erase | Reject | Restore | Save
    return [f"{type(e).__name__} {e.request}" for e in effects if isinstance(e, kinds)]


def at_gate() -> Driven:
    """Return a scheduler with one message sent, and another at the placement gate."""
    s = fresh(2, coalesce_above_s=None)
    message(s)
    message(s, "m2", OTHER)
    prefilled(s, "m")
    prefilled(s, "m2")
    return s


def waits(s: Driven, name: str = "m") -> bool:
    job = s.state.request_job(RequestId(name))
    return job is not None and isinstance(job.doing, AtGate)


def erased(s: Driven, where: SlotId, name: str = "m") -> list[Effect]:
    return s.handle(fact.erased(RequestId(name), where), NOW)


def test_others_go_on_beside_a_message_in_preparation() -> None:
    s = fresh()
    assert message(s) == ["Prefill m"]
    assert of(arrive(s, "r", SHORT)) == ["Dispatch r"]
    assert message(s, "m2", run_of(20, 4)) == ["Prefill m2"]
    assert of(prefilled(s, "m2")) == ["Dispatch m2"]
    assert of(launched(s, 2, "m2")) == []
    assert of(prefilled(s, "m")) == ["Dispatch m"]


def test_a_message_goes_beside_a_prompt_in_line() -> None:
    s = fresh()
    arrive(s, "r", LONG)
    assert of(arrive(s, "r2", OTHER)) == []
    assert message(s, ids=SHORT) == ["Prefill m"]
    assert of(prefilled(s, "m")) == ["Dispatch m"]


def test_nothing_new_begins_until_it_is_known_to_run() -> None:
    s = fresh()
    message(s)
    arrive(s, "r", OTHER)  # in the prefill queue
    assert of(prefilled(s, "m")) == ["Dispatch m"]
    assert arrive(s, "r2", SHORT) == []
    assert of(begun(s, "m")) == ["Prefill r"]
    assert of(launched(s, 0, "m")) == ["Dispatch r2"]


def test_one_after_the_other_is_sent() -> None:
    s = fresh(coalesce_above_s=None)
    message(s)
    message(s, "m2", OTHER)
    assert of(prefilled(s, "m")) == ["Dispatch m"]
    assert of(prefilled(s, "m2")) == []
    assert waits(s, "m2")
    assert of(launched(s, 0, "m")) == ["Dispatch m2"]
    assert s.state.inventory.backends[A].gate.waiting == []


def test_a_held_slot_with_as_much_of_the_prompt_is_waited_for() -> None:
    """Otherwise the server could pick that slot, in which its holder runs next."""
    s = fresh(coalesce_above_s=None)
    message(s)
    taken = slot(s, A1)
    taken.hold(Content(Resident(LONG)))
    job = dataclasses.replace(s.job_of(RequestId("m")), id=RequestId("r"), own=taken)
    taken.lease(job, NO_WORK)
    s.state.inventory.jobs[job.id] = job
    assert of(prefilled(s, "m")) == []
    assert waits(s)
    assert of(arrive(s, "r3", SHORT)) == ["Dispatch r3"], "nobody else is kept out"
    assert arrive(s, "r4", LONG) == [], "but who would be in the way"
    taken.hold(Content(Resident()))
    taken.do(replace(taken.work, pending=SHORT))
    assert of(tick(s, 0.0)) == ["Dispatch m"]


def test_what_is_restored_beside_it_may_be_its_prompt() -> None:
    s = fresh(coalesce_above_s=None, snapshots=[snapshot("s", run_of(900))])
    s.state.inventory.backends[A].rates = rates(prefill_s=1.0)
    longer = run_of(800)
    assert of(arrive(s, "r", longer)) == ["Restore r"]
    s.state.inventory.catalog.remove(s.state.inventory.catalog.snapshots()[0][0].id)
    assert message(s) == ["Prefill m"]
    # as if they diverged after the restored tokens
    slot(s, A0).do(replace(slot(s, A0).work, pending=SHORT))
    assert of(prefilled(s, "m")) == []
    assert of(restored(s, 900, "r")) == ["Dispatch r", "Dispatch m"]


def test_a_tie_with_an_idle_slot_moves_the_lease() -> None:
    s = fresh(coalesce_above_s=None)
    message(s)
    slot(s, A1).hold(Content(Resident(LONG)))
    assert of(prefilled(s, "m")) == ["Dispatch m"]
    launched(s, 1, "m")
    assert s.job_of(RequestId("m")).slot == A1
    assert slot(s, A0).is_idle


def test_two_of_one_prompt_change_places() -> None:
    s = fresh(coalesce_above_s=None, unsaved=True)
    message(s)
    message(s, "m2", head(LONG, 299) + run_of(1, 9))
    assert of(prefilled(s, "m2")) == []
    assert of(prefilled(s, "m")) == ["Dispatch m"]
    assert waits(s, "m2")
    own = s.job_of(RequestId("m")).slot
    theirs = s.job_of(RequestId("m2")).slot
    assert of(launched(s, theirs.index, "m")) == ["Dispatch m2"]
    assert s.job_of(RequestId("m")).slot == theirs
    assert s.job_of(RequestId("m2")).slot == own
    finish(s, "m", prompt_tokens=300, generated_tokens=1)
    launched(s, own.index, "m2")
    finish(s, "m2", prompt_tokens=300, generated_tokens=1)
    assert all(one.is_idle for one in s.state.inventory.slots)


def test_where_the_prefill_failed_nothing_may_be_in_preparation() -> None:
    s = fresh(coalesce_above_s=None)
    message(s)
    assert message(s, "m2", OTHER) == ["Prefill m2"]
    assert of(prefill_failed(s, "m")) == []
    assert waits(s)
    assert arrive(s, "r", SHORT) == [], "or it would wait for ever"
    assert of(prefilled(s, "m2")) == ["Dispatch m2"]
    assert of(launched(s, 1, "m2")) == ["Dispatch m"]
    assert of(launched(s, 0, "m")) == ["Dispatch r"]


def test_where_the_prefill_failed_what_is_left_is_waited_for() -> None:
    s = fresh(2, coalesce_above_s=None)
    arrive(s, "r", OTHER)
    message(s)
    finish(s, "r", Outcome.CLIENT_GONE)
    assert of(prefill_failed(s, "m")) == []
    assert of(quiet(s, "r", 10)) == ["Dispatch m"]


def test_who_leaves_at_the_gate_gives_back_the_slot() -> None:
    s = at_gate()
    assert cancel(s, "m2") == []
    assert slot(s, A1).is_idle
    assert slot(s, A1).content.resident.tokens == head(OTHER, 199)
    assert s.state.inventory.gated == {A}
    assert of(launched(s, 0, "m")) == []


def test_waiter_at_the_gate_is_told_of_a_lost_backend() -> None:
    s = at_gate()
    assert of(s.handle(fact.backend_down(A), NOW)) == ["Reject m2"]
    assert s.state.inventory.backends[A].gate.waiting == []
    assert s.next_wakeup(NOW) is None


def test_nobody_waits_at_the_gate_for_ever() -> None:
    s = fresh(2, coalesce_above_s=None, queue=QueueLimits(deadline_s=5.0))
    message(s)
    message(s, "m2", OTHER)
    prefilled(s, "m")
    prefilled(s, "m2")
    assert s.next_wakeup(NOW) == NOW + 5
    (reject,) = tick(s, 5.0)
    assert isinstance(reject, Reject)
    assert isinstance(reject.error, DeadlineError)
    assert slot(s, A1).is_idle


def test_prefill_time_does_not_count_towards_the_deadline() -> None:
    s = fresh(2, coalesce_above_s=None, queue=QueueLimits(deadline_s=5.0))
    message(s)
    message(s, "m2", OTHER)
    prefilled(s, "m")
    s.handle(fact.prefilled(RequestId("m2"), Reported()), NOW + 4)
    assert waits(s, "m2")
    assert s.next_wakeup(NOW + 4) == NOW + 9


def test_what_ran_unseen_may_be_in_the_slot_of_one_who_waits() -> None:
    s = at_gate()
    assert waits(s, "m2")
    s.job_of(RequestId("m")).resident_at_dispatch = UNKNOWN
    effects = finish(s, "m", prompt_tokens=300, generated_tokens=1)
    assert slot(s, A1).content.resident.may_hold_more
    assert of(effects) == ["Dispatch m2"]


@pytest.mark.parametrize("unknown", [True, False])
def test_what_is_not_known_takes_the_gate_at_the_grant(unknown: bool) -> None:
    s = fresh()
    more = {"prompt": Prompt(unknown="media")} if unknown else {"ids": [1]}
    arrive(s, "r", pinnable=False, **more)
    assert s.state.inventory.gated == {A}
    assert arrive(s, "r2", SHORT) == []


def test_a_stranger_is_not_waited_for() -> None:
    s = fresh(3)
    message(s)
    effects = s.handle(fact.found_busy({A1: slot(s, A1).generation}), NOW)
    assert [e.progress for e in effects] == [RequestProgress.UNSEEN]  # type: ignore[union-attr]
    assert of(prefilled(s, "m")) == ["Dispatch m"]


def test_a_stranger_is_waited_for_where_the_prefill_failed() -> None:
    """Strangers' slots may be idle already and the server's choice, or are being wiped."""
    s = fresh(2)
    message(s)
    watch(s.state, slot(s, A1), wipe=True)
    assert of(prefill_failed(s, "m")) == []
    assert waits(s)
