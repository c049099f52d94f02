"""Volatile slots: content that became idle while another request was prepared."""

from typing import Any

import pytest

from router.base.types import MemoryKind, Outcome, Reported, RequestProgress, SnapshotId
from router.core.model import events as ev
from router.core.model.effects import Save, SaveReason, WatchSlot
from router.core.model.slots import UNKNOWN, Phase
from router.core.scheduler import Scheduler
from tests.support.scheduler.build import A0, NS, R2, R3, R, backend, run_of, scheduler, snapshot
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    begun,
    cancel,
    finish,
    held,
    launched,
    n_held,
    names,
    prefilled,
    quiet,
    restored,
    save_failed,
    saved,
    slot,
    stranger,
)

LONG, ELSE = run_of(1000), run_of(1000, 7)
DONE: dict[str, Any] = {"prompt_tokens": 1000, "generated_tokens": 1}
GONE = Outcome.CLIENT_GONE
IDLE = SaveReason.IDLE


def beside(**more: Any) -> Scheduler:
    """Return a scheduler with R on a/0, which will leave content that is worth a save."""
    info = backend("a", 3, keeps_idle_slots=False)
    s = scheduler(info, **({"coalesce_above_s": None, "idle_save_after_s": None} | more))
    arrive(s, "r", LONG)
    if more.get("coalesce_above_s") is not None:
        prefilled(s, "r")
    launched(s, 0)
    return s


def restoring(**more: Any) -> Scheduler:
    """Return `beside`, with a snapshot being restored for R2 into another slot."""
    s = beside(snapshots=[snapshot("s", run_of(900, 7))], **more)
    assert names(arrive(s, "r2", ELSE)) == ["Restore"]
    return s


# -- before a start ------------------------------------------------------------------------------


def test_what_came_free_meanwhile_is_saved_before_the_start() -> None:
    """Regression: the start cleared the slot unsaved."""
    s = restoring()
    assert names(finish(s, "r", **DONE)) == ["Account"]

    assert restored(s, 900, "r2") == [Save(R2, A0, NS, IDLE)]
    assert names(saved(s, snapshot("x", LONG), A0, "r2")) == ["Dispatch"]
    assert SnapshotId("x") in s.state.fleet.catalog
    assert slot(s, A0).phase is Phase.IDLE
    assert slot(s, A0).resident == UNKNOWN


def test_a_save_that_fails_holds_up_nobody() -> None:
    s = restoring()
    finish(s, "r", **DONE)
    restored(s, 900, "r2")

    assert names(save_failed(s, A0, "r2")) == ["Dispatch"]


def test_what_is_not_worth_it_is_not_saved() -> None:
    s = restoring(reuse_probability=0.0)
    finish(s, "r", **DONE)

    assert names(restored(s, 900, "r2")) == ["Dispatch"]


def test_nor_is_anything_by_a_router_that_stops_and_was_told_not_to() -> None:
    s = restoring()
    finish(s, "r", **DONE)
    s.handle(ev.Stopping(save=False), NOW)

    assert names(restored(s, 900, "r2")) == ["Dispatch"]


def test_the_slot_is_back_if_the_client_leaves_during_the_save() -> None:
    s = restoring()
    finish(s, "r", **DONE)
    restored(s, 900, "r2")
    cancel(s, "r2")
    saved(s, snapshot("x", LONG), A0, "r2")

    assert held(s, A0) == LONG
    assert not s.state.jobs


# -- a prefill of the router is a start -----------------------------------------------------------


def prefilling() -> Scheduler:
    """Return a scheduler that prefills R2's prompt; R ended after that prefill was sent."""
    s = beside(coalesce_above_s=1.0)
    begun(s)
    assert names(arrive(s, "r2", ELSE)) == ["Prefill"]
    finish(s, "r", **DONE)
    return s


@pytest.mark.parametrize(("n", "after"), [(1000, "Save"), (0, "Dispatch")])
def test_what_came_free_during_a_prefill_is_looked_at_before_the_start(n: int, after: str) -> None:
    """Regression: the slot was believed empty, but the prefill had started long before."""
    s = prefilling()

    assert prefilled(s, "r2") == [WatchSlot(R2, A0, RequestProgress.ANSWERED)]
    assert names(quiet(s, "r2", n)) == [after]


def test_also_if_the_client_left_meanwhile() -> None:
    s = prefilling()
    cancel(s, "r2")

    assert prefilled(s, "r2") == [WatchSlot(R2, A0, RequestProgress.ANSWERED)]
    assert names(quiet(s, "r2", 1000)) == ["Save"]


# -- between the dispatch of a request and its start ---------------------------------------------


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("n", [1000, 0])
def test_what_came_free_behind_a_gate_was_emptied_or_not(seen: bool, n: int) -> None:
    """Known by a poll only: either r's end or r2's start was first."""
    s = beside()
    arrive(s, "r2", [5])
    name = stranger(A0, slot(s, A0).generation)
    finish(s, "r", **DONE)
    effects = launched(s, 1, "r2") if seen else finish(s, "r2", **DONE)

    assert WatchSlot(name, A0, RequestProgress.ANSWERED) in effects
    effects = quiet(s, name, n)
    assert names(effects) == (["Save"] if n else [])
    assert (held(s, A0) == LONG) == bool(n)


def test_nothing_is_claimed_if_the_start_may_come_yet() -> None:
    s = beside()
    arrive(s, "r2", [5])
    finish(s, "r", **DONE)
    finish(s, "r2", GONE)

    assert slot(s, A0).resident == UNKNOWN


# -- abandoned slots -----------------------------------------------------------------------------


def left(**more: Any) -> Scheduler:
    """Return a scheduler in which R was just abandoned in the middle of its answer."""
    s = beside(**more)
    s.handle(ev.Finished(R, GONE, Reported(), begun=True), NOW)
    return s


def test_a_start_waits_a_moment_for_a_slot_that_was_just_left() -> None:
    """Regression: the start cleared the slot before its content could be known."""
    s = left()
    assert arrive(s, "r2", ELSE) == []

    (save,) = quiet(s, "r", 1000)
    assert isinstance(save, Save)
    assert names(saved(s, snapshot("x", LONG), A0, save.request)) == ["Dispatch"]


def test_no_longer_than_it_is_worth() -> None:
    s = left()
    arrive(s, "r2", ELSE)
    at = s.next_wakeup(NOW)

    assert at is not None
    assert NOW < at < NOW + 0.1
    assert names(s.handle(ev.Tick(), at)) == ["Dispatch"]


def test_not_at_all_for_what_costs_nothing_to_lose() -> None:
    s = left()
    s.state.fleet.catalog.add(snapshot("s", LONG), MemoryKind.FULL, 1.0)

    assert names(arrive(s, "r2", ELSE)) == ["Dispatch"]


def test_nor_if_another_backend_is_free() -> None:
    s = left()
    other = backend("b", 1)
    s.handle(ev.BackendUp(other, ()), NOW)

    assert names(arrive(s, "r3", ELSE)) == ["Dispatch"]
    assert s.state.jobs[R3].slot.backend == other.id


def test_a_start_does_not_wait_for_what_its_server_has_yet_to_notice() -> None:
    """Abandoned plain requests run until the server notices, so their slots are not cleared."""
    s = beside()
    finish(s, "r", Outcome.CLIENT_GONE)
    assert names(arrive(s, "r3", ELSE)) == ["Dispatch"]


def test_a_slot_that_was_to_be_looked_at_is_not_believed_if_the_client_leaves() -> None:
    s = scheduler(
        backend("a", 4, keeps_idle_slots=False), coalesce_above_s=15.0, idle_save_after_s=None
    )
    for name, prompt, index in (("r", run_of(1000), 0), ("q", run_of(1000, 3), 1)):
        arrive(s, name, prompt)
        launched(s, index, name)
    assert names(arrive(s, "r2", run_of(2000, 7))) == ["Prefill"]
    for name in ("r", "q"):
        finish(s, name, **DONE)
    assert names(prefilled(s, "r2")) == ["WatchSlot"]
    cancel(s, "r2")

    assert names(quiet(s, "r2", 0)) == ["WatchSlot"]
    (save,) = quiet(s, "r2", 0)  # of its own prefill
    assert isinstance(save, Save)
    assert n_held(s, save.slot) == 1999
    assert slot(s, A0).resident == UNKNOWN
