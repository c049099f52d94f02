"""Idle saves: saves that delay no request."""

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from router.base.types import (
    MemoryKind,
    Outcome,
    Prompt,
    RequestId,
    SlotId,
    SlotStatus,
    SnapshotId,
    Tenant,
)
from router.core.model.effects import Delete, Save, SaveReason, WatchSlot
from router.core.model.policy import PolicyName
from router.core.model.slots import Resident
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    NS,
    OTHER_NS,
    A,
    B,
    backend,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    cancel,
    finish,
    names,
    prefill_failed,
    prefilled,
    quiet,
    slot,
)
from tests.support.scheduler.driven import wakeup

LONG = run_of(1000)
SAVE_1, SAVE_2 = RequestId("save-1"), RequestId("save-2")
IDLE = SaveReason.IDLE


def test_slot_on_a_disk_is_saved_late_while_another_is_free() -> None:
    disk = replace(backend("a", 3), on_disk=True)
    s = scheduler(disk, holding={A0: LONG}, idle_save_after_s=0.5, saves_late=True)
    slot(s, A0).last_used = NOW
    assert wakeup(s.state) == NOW + 120
    slot(s, A1).hold(replace(slot(s, A0).content, resident=Resident(run_of(900, 7))))
    slot(s, A1).last_used = NOW + 1
    assert wakeup(s.state) == NOW + 0.5, "the next newcomer needs a slot"


@pytest.mark.parametrize(("went_on_after_s", "due_s"), [(0.1, 0.5), (3, 6), (60, 120), (999, 600)])
def test_slot_on_a_disk_waits_for_the_next_turn(went_on_after_s: float, due_s: float) -> None:
    disk = replace(backend("a", 1), on_disk=True)
    s = scheduler(disk, holding={A0: LONG}, idle_save_after_s=0.5, saves_late=True)
    slot(s, A0).hold(replace(slot(s, A0).content, returned_after_s=went_on_after_s))
    slot(s, A0).last_used = NOW
    assert wakeup(s.state) == NOW + due_s


def test_time_of_a_return_is_learned_from_the_slot() -> None:
    s = scheduler(backend("a", 1), holding={A0: LONG})
    slot(s, A0).last_used = NOW - 7
    arrive(s, "x", run_of(1010))
    finish(s, "x")
    assert slot(s, A0).content.returned_after_s == 7
    arrive(s, "y", run_of(50, 5))
    assert slot(s, A0).content.returned_after_s == 0


def test_an_idle_slot_is_saved_after_a_while() -> None:
    s = scheduler(backend("a", 1), holding={A0: LONG}, idle_save_after_s=0.5)
    slot(s, A0).last_used = NOW
    assert s.handle(fact.tick(), NOW + 0.4) == []
    assert wakeup(s.state) == s.next_wakeup(NOW) == NOW + 0.5
    assert s.handle(fact.tick(), NOW + 0.5) == [Save(SAVE_1, A0, NS, IDLE)]
    assert wakeup(s.state) == inf


def test_one_after_the_other_on_a_backend_and_each_once() -> None:
    s = scheduler(backend("a", 2), holding={A0: LONG, A1: run_of(1000, 7)})

    assert s.handle(fact.tick(), NOW) == [Save(SAVE_1, A0, NS, IDLE)]
    done = fact.saved(SAVE_1, A0, snapshot("s", LONG), 0.001)
    assert s.handle(done, NOW) == [Save(SAVE_2, A1, NS, IDLE)]
    assert s.handle(fact.save_failed(SAVE_2, A1, "disk full"), NOW) == []
    assert s.handle(fact.tick(), NOW + 1000) == []
    assert SnapshotId("s") in s.state.inventory.catalog


def test_what_a_purged_tenant_has_in_idle_slots_is_not_saved() -> None:
    """Also with a salt; what others have is saved as before."""
    contents = {A0: LONG, A1: run_of(1000, 7), SlotId(A, 2): run_of(1000, 9)}
    s = scheduler(backend("a", 3), holding=contents)
    for at, owner in zip(contents, ("alice", "alice~salt", "alicia"), strict=True):
        slot(s, at).hold(replace(slot(s, at).content, tenant=Tenant(owner)))

    *emptied, save = s.handle(fact.tenant_purged(Tenant("alice")), NOW)
    assert [(e.slot, e.wipe) for e in emptied if isinstance(e, WatchSlot)] == [
        (A0, True),
        (A1, True),
    ]
    assert isinstance(save, Save)
    assert save.slot == SlotId(A, 2)
    assert s.handle(fact.save_failed(save.request, save.slot, "disk full"), NOW) == []
    assert s.handle(fact.tick(), NOW + 1000) == []


def test_what_is_being_saved_of_a_purged_tenant_is_deleted() -> None:
    """Regression: the operator was told a count, and the transcript stayed on disk."""
    s = scheduler(backend("a", 1), holding={A0: LONG})
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=Tenant("alice~salt")))
    assert names(s.handle(fact.tick(), NOW)) == ["Save"]
    s.handle(fact.tenant_purged(Tenant("alice")), NOW)

    made = snapshot("s", LONG)
    assert s.handle(fact.saved(SAVE_1, A0, made, 0.001), NOW) == [Delete(made)]
    assert s.handle(fact.tick(), NOW + 1000) == []
    assert SnapshotId("s") not in s.state.inventory.catalog


def test_a_save_is_no_use_of_a_slot_and_a_request_is() -> None:
    s = scheduler(backend("a", 2), holding={A0: LONG})
    inventory, slots = s.state.inventory, s.state.inventory.slots
    s.handle(fact.tick(), NOW)
    s.handle(fact.saved(SAVE_1, A0, snapshot("s", LONG), 0.001), NOW)
    assert (inventory.neglect(slots[A0]), inventory.neglect(slots[A1])) == (0, 0)

    assert names(arrive(s, "r", [9, 9, 9], slot_hint=1)) == ["Dispatch"]
    assert "WatchSlot" not in names(finish(s, "r", prompt_tokens=3, generated_tokens=1))
    assert (inventory.neglect(slots[A0]), inventory.neglect(slots[A1])) == (0.5, 0)


@pytest.mark.parametrize(
    "more",
    [{"reuse": False}, {"pinnable": False, "prompt": Prompt(unknown="an embedding")}],
    ids=["what is not cached", "an embedding"],
)
def test_what_leaves_nothing_to_come_back_for_is_no_use(more: dict[str, Any]) -> None:
    """Otherwise 1,000 such requests would make no conversation worth a save."""
    s = scheduler(backend("a", 2), holding={A0: LONG}, idle_save_after_s=None)
    for _ in range(3):
        arrive(s, "r", [9, 9, 9], **more)
        finish(s, "r", prompt_tokens=3, generated_tokens=1)
    assert s.state.inventory.neglect(slot(s, A0)) == 0


def test_request_gone_before_its_prefill_is_not_saved() -> None:
    s = scheduler(backend("a", 2), holding={A0: LONG}, idle_save_after_s=None)
    arrive(s, "r", run_of(300, 3))
    cancel(s, "r")
    prefill_failed(s, "r")
    assert not s.state.inventory.jobs
    assert s.state.inventory.neglect(slot(s, A0)) == 0


def test_other_models_make_nobody_older() -> None:
    s = scheduler(
        backend("a", 1),
        backend("b", 1, namespace=OTHER_NS, models=frozenset({"m"})),
        holding={A0: LONG},
        idle_save_after_s=None,
    )
    arrive(s, "r", [9, 9, 9], model="m")
    finish(s, "r", prompt_tokens=3, generated_tokens=1)
    assert s.state.inventory.neglect(slot(s, A0)) == 0


def test_what_a_backend_that_comes_back_holds_is_not_old() -> None:
    """Unknown age: the content is read by a save only."""
    s = scheduler(backend("a", 1), backend("b", 1), idle_save_after_s=None)
    for _ in range(50):
        arrive(s, "r", [9, 9, 9], slot_hint=0)
        finish(s, "r", prompt_tokens=3, generated_tokens=1)
    s.handle(fact.backend_down(B), NOW)
    s.handle(fact.backend_up(backend("b", 1), (SlotStatus(0, False, 5000, 10_000),)), NOW)
    assert s.state.inventory.neglect(slot(s, B0)) == 0


def test_what_is_not_worth_it_is_looked_at_once() -> None:
    s = scheduler(backend("a", 1), holding={A0: LONG}, snapshots=[snapshot("s", LONG)])

    assert s.handle(fact.tick(), NOW) == []
    assert slot(s, A0).content.save_decided
    assert wakeup(s.state) == inf


def test_who_wants_what_is_being_saved_can_wait_for_it() -> None:
    s = scheduler(backend("a", 1), backend("b", 1), holding={A0: LONG})
    s.handle(fact.tick(), NOW)

    assert arrive(s, ids=run_of(1001)) == []
    done = fact.saved(SAVE_1, A0, snapshot("s", LONG), 0.001)
    assert names(s.handle(done, NOW)) == ["Dispatch"]


def test_a_slot_that_goes_back_by_a_checkpoint_is_waited_for() -> None:
    """Its file is of no use to the prompt, but the slot is free in a moment."""
    info = backend("a", 2, memory_kind=MemoryKind.HYBRID)
    s = scheduler(info, holding={A0: LONG}, coalesce_above_s=None)
    held = slot(s, A0).content
    slot(s, A0).hold(replace(held, resident=replace(held.resident, checkpoints=(900,))))
    s.handle(fact.tick(), NOW)

    assert arrive(s, ids=run_of(950) + run_of(20, 7)) == []
    done = fact.saved(SAVE_1, A0, snapshot("s", LONG), 0.001)
    s.handle(done, NOW)
    chosen = s.job_of(RequestId("r")).plan.chosen
    assert (chosen.slot, chosen.reused_tokens) == (A0, 900)


@pytest.mark.parametrize("busy", [True, False])
def test_nobody_is_stopped_by_a_save(busy: bool) -> None:
    s = scheduler(backend("a", 2), holding={A1: LONG}, coalesce_above_s=None)
    slot(s, A1).last_used = NOW
    arrive(s, ids=[5])
    if not busy:
        finish(s, prompt_tokens=1)

    slot(s, A0).hold(replace(slot(s, A0).content, save_decided=True))

    effects = s.handle(fact.tick(), NOW + 10)
    assert effects == ([] if busy else [Save(SAVE_1, A1, NS, IDLE)])
    assert s.next_wakeup(NOW + 10) is None


def test_off_is_off() -> None:
    for more in ({"idle_save_after_s": None}, {"policy": PolicyName.STICKY}):
        s = scheduler(backend("a", 1), holding={A0: LONG}, **more)
        assert s.handle(fact.tick(), NOW) == []
        assert wakeup(s.state) == inf


# -- volatile slots -----------------------------------------------------------------------------


# -- stopping ------------------------------------------------------------------------------------


def test_a_router_that_stops_saves_what_is_worth_it() -> None:
    s = scheduler(backend("a", 1), backend("b", 1), holding={A0: LONG, B0: run_of(1000, 7)})
    slot(s, A0).last_used = slot(s, B0).last_used = NOW

    effects = s.handle(fact.stopping(save=True), NOW)
    assert effects == [Save(SAVE_1, A0, NS, IDLE), Save(SAVE_2, B0, NS, IDLE)]
    assert wakeup(s.state) == inf


@pytest.mark.parametrize("keeps", [True, False])
def test_unless_it_is_told_not_to(keeps: bool) -> None:
    """Regression: volatile slots were saved all the same."""
    s = scheduler(backend("a", 1, keeps_idle_slots=keeps), coalesce_above_s=None)
    arrive(s, ids=LONG)
    s.handle(fact.stopping(save=False), NOW)

    assert names(finish(s, prompt_tokens=1000, generated_tokens=1)) == ["Account"]
    assert s.handle(fact.tick(), NOW + 1000) == []


@pytest.mark.parametrize("fills", [True, False])
@pytest.mark.parametrize("in_prefill", [True, False])
def test_a_fill_that_was_left_is_not_saved(fills: bool, in_prefill: bool) -> None:
    """100 warm-ups of an editor wrote 70 states, and 48 of 58 were never used."""
    s = scheduler(backend("a", 1), idle_save_after_s=0.5)
    assert names(arrive(s, ids=LONG, fills=fills)) == ["Prefill"]
    if in_prefill:
        cancel(s)
        prefilled(s)
    else:
        prefilled(s)
        finish(s, outcome=Outcome.CLIENT_GONE)
        quiet(s, n=1000)
    assert slot(s, A0).is_idle
    assert names(s.handle(fact.tick(), NOW + 1)) == ([] if fills else ["Save"])


def test_a_fill_that_never_had_its_slot_leaves_it_as_it_was() -> None:
    """It waited in the prefill queue, and the slot still has another conversation."""
    s = scheduler(backend("a", 2), idle_save_after_s=5, holding={A0: LONG})
    slot(s, A0).last_used = NOW
    arrive(s, "r2", ids=[9, *[1] * 3000])
    arrive(s, "r3", ids=[*[1] * 1000, *[7] * 2000], fills=True)
    assert slot(s, A0).holder == "r3"
    cancel(s, "r3")
    prefill_failed(s, "r2")
    assert slot(s, A0).is_idle
    assert slot(s, A0).is_unsaved
