"""Copies: content of an idle slot goes to a slot of another backend."""

import pytest

from router.base.types import SnapshotId, Source
from router.core.model.effects import Delete, Restore, Save
from router.core.model.effects import SaveReason as Why
from router.core.model.slots import Phase
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    B0,
    NS,
    R2,
    A,
    B,
    R,
    backend,
    rates,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    cancel,
    held,
    names,
    plan_of,
    restored,
    save_failed,
    saved,
    slot,
)
from tests.support.scheduler.driven import Driven

LONG, ELSE = run_of(1000), run_of(1000, 7)
ONE = backend("a", 1)


def copying() -> Driven:
    """Return a scheduler that saves a/0 for R, which will run on b/0."""
    s = scheduler(ONE, backend("b", 1), holding={A0: run_of(500)}, coalesce_above_s=None)
    s.state.inventory.backends[A].rates = rates(prefill_s=1.0)
    assert arrive(s, ids=LONG) == [Save(R, A0, NS, Why.COPY)]
    return s


def test_a_copy_is_a_save_there_and_a_restore_here() -> None:
    s = copying()
    made = snapshot("c", run_of(500))

    assert saved(s, made) == [Restore(R, B0, made)]
    assert slot(s, A0).phase is Phase.IDLE  # released at once
    assert plan_of(restored(s, 500, of="c")).chosen.source is Source.COPY
    assert held(s, B0) == run_of(500)


def test_a_copy_uses_the_equal_snapshot_that_was_there_before() -> None:
    s = copying()
    there = snapshot("old", run_of(500))
    s.handle(fact.snapshots_found((there,)), NOW)
    made = snapshot("c", run_of(500))

    assert saved(s, made) == [Delete(made), Restore(R, B0, there)]


def test_a_copy_that_the_limits_do_not_allow_is_a_cold_start() -> None:
    s = copying()
    s.handle(fact.snapshots_found((snapshot("s", run_of(9)),)), NOW)
    made = snapshot("c", run_of(500), size=10**15)
    s.state.inventory.catalog.limits = type(s.state.inventory.catalog.limits)(max_bytes=10**14)

    effects = saved(s, made)
    assert names(effects) == ["Delete", "Dispatch"]
    assert plan_of(effects).chosen.source is Source.COLD


def test_a_copy_whose_save_fails_is_a_cold_start() -> None:
    s = copying()

    assert plan_of(save_failed(s)).reason == "the copy failed"
    assert slot(s, A0).phase is Phase.IDLE


def test_a_copy_whose_client_left_gives_everything_back() -> None:
    s = copying()
    cancel(s)

    assert saved(s, snapshot("c", run_of(500))) == []
    assert {x.phase for x in s.state.inventory.slots} == {Phase.IDLE}


@pytest.mark.parametrize("ok", [True, False])
def test_a_copy_whose_source_goes_away_is_a_cold_start(ok: bool) -> None:
    """Regression: the request was rejected, although its own backend was up."""
    s = copying()

    assert s.handle(fact.backend_down(A), NOW) == []
    effects = saved(s, snapshot("c", run_of(500))) if ok else save_failed(s)
    assert plan_of(effects).chosen.source is Source.COLD
    assert slot(s, B0).phase is Phase.RUNNING


@pytest.mark.parametrize("ok", [True, False])
def test_copy_to_a_lost_target_keeps_its_source_until_saved(ok: bool) -> None:
    """Regression: the slot was leased to the next request while it was still being saved."""
    s = copying()

    assert names(s.handle(fact.backend_down(B), NOW)) == ["Reject"]
    assert arrive(s, "r2", [5]) == []
    effects = saved(s, snapshot("c", run_of(500))) if ok else save_failed(s)
    assert names(effects) == (["Dispatch"] if ok else ["Save"])
    assert (SnapshotId("c") in s.state.inventory.catalog) is ok
    assert s.state.inventory.jobs.keys() == {R2}


def test_copy_from_a_lost_source_is_a_cold_start() -> None:
    s = scheduler(ONE, backend("b", 1), holding={A0: run_of(500), B0: ELSE}, coalesce_above_s=None)
    s.state.inventory.backends[A].rates = rates(prefill_s=1.0)
    assert arrive(s, ids=LONG) == [Save(R, B0, NS, Why.DISPLACED)]
    s.handle(fact.backend_down(A), NOW)

    effects = saved(s, snapshot("x", ELSE), at=B0)
    assert plan_of(effects).reason == "the backend of the copy's source went down"


def test_copy_from_a_removed_source_is_a_cold_start() -> None:
    """Regression: the slot was looked up by its id after the save, and was gone."""
    s = scheduler(ONE, backend("b", 1), holding={A0: run_of(500), B0: ELSE}, coalesce_above_s=None)
    s.state.inventory.backends[A].rates = rates(prefill_s=1.0)
    assert arrive(s, ids=LONG) == [Save(R, B0, NS, Why.DISPLACED)]
    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.removed(A), NOW)

    assert names(saved(s, snapshot("x", ELSE), at=B0)) == ["Dispatch"]
