"""Job steps from admission to dispatch, and what follows if one fails."""

from typing import Any

import pytest

from router.base.tokens import Tokens, head
from router.base.types import MemoryKind, SnapshotId, Source
from router.core.model.effects import Delete, Dispatch, Prefill, Quarantine, Restore, Save
from router.core.model.effects import SaveReason as Why
from router.core.model.policy import SnapshotLimits
from router.core.model.slots import Phase
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    NS,
    OTHER_NS,
    R2,
    A,
    R,
    backend,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    cancel,
    finish,
    held,
    names,
    plan_of,
    prefill_failed,
    prefilled,
    restore_failed,
    restored,
    save_failed,
    saved,
    slot,
)
from tests.support.scheduler.driven import Driven

LONG, ELSE = run_of(1000), run_of(1000, 7)
OFF: dict[str, Any] = {"idle_save_after_s": None}
SNAP = snapshot("s", run_of(900))
ONE = backend("a", 1)


def restoring(**more: Any) -> Driven:
    """Return a scheduler that restores SNAP into a/0 for R."""
    s = scheduler(ONE, snapshots=[SNAP], coalesce_above_s=None, **more)
    assert arrive(s, ids=LONG) == [Restore(R, A0, SNAP)]
    return s


# -- displaced content ---------------------------------------------------------------------------


def test_what_is_displaced_is_saved_before_the_request_runs() -> None:
    s = scheduler(ONE, holding={A0: ELSE}, coalesce_above_s=None)

    assert arrive(s, ids=LONG) == [Save(R, A0, NS, Why.DISPLACED)]
    assert names(saved(s, snapshot("x", ELSE))) == ["Dispatch"]
    assert SnapshotId("x") in s.state.inventory.catalog
    assert slot(s, A0).phase is Phase.RUNNING


def test_what_is_displaced_is_followed_as_its_own_clients() -> None:
    """Not as that of the client who displaces it: it would give up the wrong one."""
    s = scheduler(ONE, coalesce_above_s=None)
    arrive(s, "first", ELSE, client="person")
    finish(s, "first", prompt_tokens=1000)
    assert names(arrive(s, ids=LONG, client="clock")) == ["Save"]
    saved(s, snapshot("x", ELSE))

    returns = s.state.inventory.returns
    returns.restored(SnapshotId("x"))
    person, clock = (returns.next(request(ids=ELSE, client=one)) for one in ("person", "clock"))
    assert returns.chance(person, 0.5) > 0.5 == returns.chance(clock, 0.5)


def test_who_wants_what_is_displaced_waits_for_its_save() -> None:
    """Displaced content is nowhere else then; computing it again elsewhere would take 10 s."""
    s = scheduler(ONE, backend("b", 1), holding={A0: ELSE, B0: run_of(1000, 3)}, **OFF)
    assert arrive(s, ids=LONG) == [Save(R, A0, NS, Why.DISPLACED)]

    assert arrive(s, "r2", run_of(1001, 7)) == []
    effects = saved(s, snapshot("x", ELSE))
    assert names(effects) == ["Prefill", "Save"]  # for r; b/0 is saved for r2
    assert names(saved(s, snapshot("y", run_of(1000, 3)), B0, "r2")) == ["Restore"]


@pytest.mark.parametrize("works", [True, False])
def test_nobody_waits_for_a_save_that_is_over(works: bool) -> None:
    s = scheduler(ONE, backend("b", 1), holding={A0: ELSE, B0: run_of(1000, 3)}, **OFF)
    arrive(s, ids=LONG)

    over = saved(s, snapshot("x", run_of(5, 7))) if works else save_failed(s)
    assert names(over) == ["Prefill"]
    assert names(arrive(s, "r2", run_of(1001, 7))) == ["Save"]  # r2 takes b/0, and starts cold


def test_what_is_of_no_use_in_another_slot_is_not_waited_for() -> None:
    limits = SnapshotLimits(min_tokens=9)
    s = scheduler(ONE, backend("b", 1), holding={A0: ELSE, B0: ELSE}, limits=limits, **OFF)
    arrive(s, ids=LONG)
    assert slot(s, A0).work.saving == ELSE

    assert names(arrive(s, "r2", run_of(5, 7))) == ["Save"]  # 5 tokens are too few


def test_prefill_is_waited_for_while_room_is_made() -> None:
    s = scheduler(ONE, backend("b", 1), holding={A0: ELSE, B0: ELSE}, **OFF)
    assert arrive(s, ids=LONG) == [Save(R, A0, NS, Why.DISPLACED)]

    assert arrive(s, "r2", LONG) == []


def test_so_is_one_of_a_kind_that_cannot_go_back() -> None:
    """Useful there too: the prefill is a strict prefix of the same prompt."""
    kind = {"memory_kind": MemoryKind.HYBRID}
    one, two = backend("a", 1, **kind), backend("b", 1, **kind)
    s = scheduler(one, two, holding={A0: ELSE, B0: ELSE}, **OFF)
    assert arrive(s, ids=LONG) == [Save(R, A0, NS, Why.DISPLACED)]

    assert arrive(s, "r2", LONG) == []


def test_nobody_waits_for_one_whose_client_has_left() -> None:
    s = scheduler(ONE, backend("b", 1), holding={A0: ELSE, B0: ELSE}, **OFF)
    arrive(s, ids=LONG)
    assert arrive(s, "r2", LONG) == []

    assert names(cancel(s)) == ["StopWork", "Save"]  # r2 makes room for itself on b/0


def test_a_save_that_fails_is_the_end_of_the_save_only() -> None:
    s = scheduler(ONE, holding={A0: ELSE}, coalesce_above_s=None)
    arrive(s, ids=LONG)

    assert names(save_failed(s)) == ["Dispatch"]


def test_a_save_tells_what_the_slot_really_holds() -> None:
    s = scheduler(ONE, holding={A0: ELSE}, coalesce_above_s=None)
    arrive(s, ids=LONG)
    cancel(s)
    saved(s, snapshot("x", run_of(5, 8)))

    assert held(s, A0) == run_of(5, 8)


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "another namespace"])
def test_nothing_vouches_for_a_save_whose_backend_went(gone: bool) -> None:
    s = scheduler(ONE, holding={A0: ELSE}, coalesce_above_s=None)
    arrive(s, ids=LONG)
    event: fact.Fact = fact.backend_down(A)
    if not gone:
        event = fact.backend_up(backend("a", 1, namespace=OTHER_NS))
    s.handle(event, NOW)

    assert saved(s, snapshot("x", ELSE)) == [Delete(snapshot("x", ELSE))]
    assert save_failed(s) == []


def test_a_late_save_is_a_snapshot_all_the_same() -> None:
    s = scheduler(ONE, holding={A0: ELSE}, coalesce_above_s=None)
    arrive(s, ids=LONG)
    s.handle(fact.backend_up(ONE), NOW)

    assert saved(s, snapshot("x", ELSE)) == []
    assert SnapshotId("x") in s.state.inventory.catalog
    assert held(s, A0) == b""


# -- restores ------------------------------------------------------------------------------------


def test_what_is_purged_is_deleted_unless_it_is_restored_from() -> None:
    """Purged during a restore, a snapshot is offered no more, and deleted afterwards."""
    other = snapshot("o", run_of(900, 5))
    s = restoring()
    s.state.inventory.catalog.add(other, MemoryKind.FULL, 1.0)
    purged = fact.purged((SnapshotId("s"), SnapshotId("o"), SnapshotId("unknown")))

    assert s.handle(purged, NOW) == [Delete(other)]
    assert s.state.inventory.catalog.snapshots() == []
    effects = restored(s)
    assert effects[0] == Delete(SNAP)
    assert plan_of(effects).chosen.source is Source.SNAPSHOT
    assert s.handle(purged, NOW) == []


def test_a_restored_slot_holds_the_snapshot() -> None:
    s = restoring()
    effects = restored(s)

    assert plan_of(effects).chosen.source is Source.SNAPSHOT
    assert held(s, A0) == SNAP.tokens
    assert s.state.inventory.catalog.snapshots() == [(SNAP, 2, 0)]


def test_a_restore_of_another_length_is_not_believed() -> None:
    s = restoring()
    restored(s, n=899)

    assert held(s, A0) == b""


def test_a_restore_that_fails_is_a_cold_start_on_the_same_lease() -> None:
    s = restoring()
    effects = restore_failed(s)

    chosen = plan_of(effects).chosen
    assert (chosen.source, chosen.slot, chosen.reused_tokens) == (Source.COLD, A0, 0)
    assert plan_of(effects).reason == "restore failed: why"
    assert SnapshotId("s") in s.state.inventory.catalog  # one failure is forgiven


def test_a_bad_file_is_put_aside_at_once() -> None:
    s = restoring()
    effects = restore_failed(s, bad=True)

    assert effects[0] == Quarantine(SNAP, "why")
    assert names(effects) == ["Quarantine", "Dispatch"]
    assert SnapshotId("s") not in s.state.inventory.catalog
    assert len(s.state.inventory.catalog) == 0


def test_two_failed_restores_quarantine_a_success_forgives() -> None:
    for between, quarantined in ((False, True), (True, False)):
        s = scheduler(backend("a", 3), snapshots=[SNAP], coalesce_above_s=None)
        arrive(s, "r", ids=LONG)
        arrive(s, "r2", ids=LONG)
        arrive(s, "r3", ids=LONG)
        restore_failed(s, name="r")
        if between:
            restored(s, name="r2")
        effects = restore_failed(s, name="r3")
        assert ("Quarantine" in names(effects)) is quarantined


def test_a_quarantined_file_is_never_deleted_nor_put_aside_twice() -> None:
    """Regression: the end of its second restore named a quarantined file for deletion."""
    s = scheduler(backend("a", 2), snapshots=[SNAP], coalesce_above_s=None)
    arrive(s, "r", ids=LONG)
    arrive(s, "r2", ids=LONG)
    restore_failed(s, bad=True, name="r")

    assert names(restore_failed(s, bad=True, name="r2")) == ["Dispatch"]
    assert len(s.state.inventory.catalog) == 0


def test_quarantined_file_is_not_restored_by_waiting_jobs() -> None:
    s = scheduler(
        backend("a", 2), snapshots=[SNAP], holding={A1: ELSE, A0: ELSE}, coalesce_above_s=None
    )
    assert arrive(s, "r", ids=LONG) == [Save(R, A0, NS, Why.DISPLACED)]
    assert arrive(s, "r2", ids=LONG) == [Save(R2, A1, NS, Why.DISPLACED)]
    assert names(saved(s, snapshot("x", ELSE))) == ["Restore"]
    restore_failed(s, bad=True)

    effects = save_failed(s, at=A1, name="r2")
    assert plan_of(effects).reason == "the snapshot turned out to be unusable"
    assert s.job_of(R2).using is None


def test_restore_outlives_its_job_and_keeps_the_file() -> None:
    """Regression: a file was deleted during a restore on a backend that was declared down."""
    s = restoring()
    s.handle(fact.backend_down(A), NOW)
    assert s.state.inventory.jobs == {}
    assert s.state.inventory.catalog.remove(SNAP.id) == []

    assert restored(s) == [Delete(SNAP)]
    assert s.state.under_way == {}


def test_a_file_that_kills_backends_is_put_aside() -> None:
    s = restoring()
    s.handle(fact.backend_down(A), NOW)
    assert restore_failed(s) == []
    s.handle(fact.backend_up(ONE), NOW)
    assert arrive(s, ids=LONG) == [Restore(R, A0, SNAP)]
    s.handle(fact.backend_down(A), NOW)

    assert restore_failed(s) == [Quarantine(SNAP, "why")]


# -- prefill -------------------------------------------------------------------------------------


def prefilling(*more: Any) -> Driven:
    s = scheduler(*(more or (ONE,)))
    assert arrive(s, ids=LONG) == [Prefill(R, A0, head(LONG, 999))]
    return s


def test_a_prefill_leaves_one_token_to_the_request() -> None:
    s = prefilling()
    effects = prefilled(s, prompt_tokens=999, cached_tokens=0, prompt_s=50.0)

    assert names(effects) == ["Dispatch"]
    assert held(s, A0) == run_of(999)
    assert s.state.inventory.backends[A].rates.prefill.n == 1


def test_a_prefill_that_says_nothing_teaches_nothing() -> None:
    s = prefilling()
    prefilled(s)

    assert s.state.inventory.backends[A].rates.prefill.n == 0


def test_after_a_failed_prefill_nothing_is_claimed() -> None:
    s = prefilling()

    assert names(prefill_failed(s)) == ["Dispatch"]
    assert held(s, A0) == b""


def test_what_others_wait_for_is_saved_before_it_is_used() -> None:
    s = prefilling()
    assert arrive(s, "r2", Tokens(LONG + run_of(5, 2))) == []

    assert prefilled(s) == [Save(R, A0, NS, Why.SHARED)]
    assert names(saved(s, snapshot("x", run_of(999)))) == ["Dispatch"]


@pytest.mark.parametrize(
    "other", [run_of(50, 7), head(LONG, 3)], ids=["nothing in common", "covered already"]
)
def test_what_nobody_needs_is_not_saved(other: Tokens) -> None:
    s = scheduler(ONE, snapshots=[snapshot("s", run_of(3))])
    arrive(s, ids=LONG)
    restored(s, 3)
    arrive(s, "r2", other)

    assert names(prefilled(s)) == ["Dispatch"]


def test_what_cannot_be_saved_is_not() -> None:
    s = scheduler(backend("a", 1, kv_dir=None))
    arrive(s, ids=LONG, pinnable=False)
    arrive(s, "r2", LONG)

    assert names(prefilled(s)) == ["Dispatch"]


def test_who_is_gone_gets_no_prefill_told() -> None:
    s = prefilling()
    cancel(s)
    assert prefill_failed(s) == []
    assert prefill_failed(s) == []  # late, or twice
    assert slot(s, A0).phase is Phase.IDLE


def test_prefill_of_a_gone_client_is_finished_for_waiters() -> None:
    s = prefilling()
    arrive(s, "r2", LONG)

    assert cancel(s) == []
    assert prefilled(s) == [Save(R, A0, NS, Why.SHARED)]


def test_a_prefill_for_those_who_wait_can_fail_too() -> None:
    """Regression: the remains of the failed prefill were saved for the waiting requests."""
    s = prefilling()
    arrive(s, "r2", LONG)
    cancel(s)

    assert names(prefill_failed(s)) == ["Prefill"]  # now for r2
    assert s.state.inventory.jobs.keys() == {R2}


# -- dispatch ------------------------------------------------------------------------------------


def test_a_request_is_pinned_unless_its_route_drops_the_pin() -> None:
    s = scheduler(backend("a", 2), backend("b", 1))
    (first,) = arrive(s, "r")
    (other,) = arrive(s, "r2", ids=[5], pinnable=False)

    assert isinstance(first, Dispatch)
    assert isinstance(other, Dispatch)
    assert (first.pin, first.confirm) == (True, False)
    assert (other.pin, other.confirm) == (False, True)
    assert s.state.inventory.gated == {other.lease.slot.backend}


def test_whole_backend_request_takes_all_and_saves_first() -> None:
    s = scheduler(backend("a", 2), holding={A0: ELSE, A1: LONG})

    assert arrive(s, whole_backend=True) == [Save(R, A0, NS, Why.DISPLACED)]
    assert saved(s, snapshot("x", ELSE)) == [Save(R, A1, NS, Why.DISPLACED)]
    (dispatch,) = save_failed(s, at=A1)
    assert isinstance(dispatch, Dispatch)
    assert not dispatch.pin
    assert {x.phase for x in s.state.inventory.slots} == {Phase.RUNNING}
