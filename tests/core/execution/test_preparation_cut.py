"""Cuts: a prefix shared with a longer snapshot is cut out of its file and restored."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.tokens import join
from router.base.types import MemoryKind, SnapshotId, Source, StateShape, Tenant
from router.core.model.effects import Cut, Delete, Restore
from router.core.model.policy import SnapshotLimits
from router.core.model.rates import LinearFit
from router.core.model.slots import Content, Resident
from router.core.planning.planner import plan
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    R2,
    A,
    R,
    backend,
    inventory,
    rates,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import NOW, arrive, cancel, held, names, plan_of, restored
from tests.support.scheduler.driven import Driven

CUTS = backend(cuts=True)
LONG = snapshot("s", run_of(8000), size=8_000_000)
SHORT = join([run_of(500), run_of(50, 2)])
TRUNK = snapshot("t", run_of(500), size=500_000)


def by_size() -> LinearFit:
    """Return a fit of 1 ms plus 1 s per GB: the moved bytes count."""
    return LinearFit(1e-3, 1e-9)


def cutting(info: Any = CUTS, **more: Any) -> Driven:
    s = scheduler(info, snapshots=[LONG], coalesce_above_s=None, **more)
    s.state.inventory.backends[A].rates.restore = LinearFit(1e-3, 1e-8)
    s.state.inventory.backends[A].rates.rewrite = by_size()
    return s


def begun() -> Driven:
    s = cutting()
    assert arrive(s, ids=SHORT) == [Cut(R, LONG, 500)]
    return s


def test_only_what_is_shared_is_restored() -> None:
    s = begun()

    assert s.handle(fact.was_cut(R, TRUNK, 0.002), NOW) == [Restore(R, A0, TRUNK)]
    done = plan_of(restored(s, 500, of="t"))
    assert (done.chosen.source, done.chosen.reused_tokens) == (Source.SNAPSHOT, 500)
    assert done.chosen.price.rewrite_s == pytest.approx(1e-3 + 500_000e-9)
    assert held(s, A0) == run_of(500)
    assert SnapshotId("s") in s.state.inventory.catalog  # the source stays
    assert SnapshotId("t") in s.state.inventory.catalog
    assert all(n == 0 for _, _, n in s.state.inventory.catalog.snapshots())


def test_the_trunk_serves_the_next_without_a_cut() -> None:
    s = begun()
    s.handle(fact.was_cut(R, TRUNK, 0.002), NOW)

    restored(s, 500, of="t")
    other = join([run_of(500), run_of(50, 3)])
    assert arrive(s, "r2", ids=other) == [Restore(R2, A1, TRUNK)]


def test_what_was_learned_prices_the_next_cut() -> None:
    s = begun()
    before = s.state.inventory.backends[A].rates.rewrite_s(500_000)
    s.handle(fact.was_cut(R, TRUNK, 5.0), NOW)

    assert s.state.inventory.backends[A].rates.rewrite_s(500_000) > before


@pytest.mark.parametrize(
    ("info", "rewrite"),
    [(backend(cuts=False), by_size()), (CUTS, LinearFit(9.0, 0.0))],
    ids=["not on this backend", "dearer than the bytes"],
)
def test_else_the_whole_is_restored(info: Any, rewrite: LinearFit) -> None:
    s = cutting(info)
    s.state.inventory.backends[A].rates.rewrite = rewrite

    assert arrive(s, ids=SHORT) == [Restore(R, A0, LONG)]


def test_a_state_with_media_is_restored_whole() -> None:
    """Regression: a cut was tried each time, and always failed."""
    seen = replace(LONG, shape=StateShape(media=True))
    s = scheduler(CUTS, snapshots=[seen], coalesce_above_s=None)
    s.state.inventory.backends[A].rates.restore = LinearFit(1e-3, 1e-8)
    s.state.inventory.backends[A].rates.rewrite = by_size()

    assert arrive(s, ids=SHORT) == [Restore(R, A0, seen)]


def test_what_is_not_worth_a_file_is_not_worth_reading_one() -> None:
    s = cutting()
    s.state.inventory.catalog.limits = SnapshotLimits(min_tokens=501)

    assert plan_of(arrive(s, ids=SHORT)).chosen.source is Source.COLD


def test_a_conversation_that_fits_no_slot_gives_its_beginning() -> None:
    s = cutting(backend(cuts=True, n_ctx=1000))
    assert arrive(s, ids=SHORT) == [Cut(R, LONG, 500)]

    effects = s.handle(fact.cut_failed(R, "no"), NOW)
    assert names(effects) == ["Dispatch"]
    assert plan_of(effects).chosen.source is Source.COLD
    assert "no" in plan_of(effects).reason


def test_a_cut_that_fails_is_a_longer_restore() -> None:
    s = begun()

    assert s.handle(fact.cut_failed(R, "no"), NOW) == [Restore(R, A0, LONG)]


def test_a_trunk_that_the_catalog_has_already_or_will_not_have() -> None:
    s = begun()
    same = snapshot("old", run_of(500), size=500_000)
    s.handle(fact.snapshots_found((same,)), NOW)
    assert s.handle(fact.was_cut(R, TRUNK, 0.1), NOW) == [Delete(TRUNK), Restore(R, A0, same)]

    s = begun()
    s.state.inventory.catalog.limits = SnapshotLimits(max_bytes=400_000)
    effects = s.handle(fact.was_cut(R, TRUNK, 0.1), NOW)
    assert names(effects) == ["Delete", "Restore"]
    assert isinstance(effects[1], Restore)
    assert effects[1].snapshot == LONG


def test_trunk_without_room_and_too_long_a_whole_start_cold() -> None:
    s = cutting(backend(cuts=True, n_ctx=1000))
    arrive(s, ids=SHORT)
    s.state.inventory.catalog.limits = SnapshotLimits(max_bytes=400_000)

    effects = s.handle(fact.was_cut(R, TRUNK, 0.1), NOW)
    assert names(effects) == ["Delete", "Dispatch"]
    assert plan_of(effects).chosen.source is Source.COLD


def test_a_client_that_leaves_meanwhile_leaves_the_trunk_behind() -> None:
    s = begun()
    cancel(s)

    assert s.handle(fact.was_cut(R, TRUNK, 0.1), NOW) == []
    assert R not in s.state.inventory.jobs
    assert SnapshotId("t") in s.state.inventory.catalog
    assert all(n == 0 for _, _, n in s.state.inventory.catalog.snapshots())


def test_a_client_that_leaves_and_a_cut_that_fails() -> None:
    s = begun()
    cancel(s)

    assert s.handle(fact.cut_failed(R, "no"), NOW) == []
    assert s.state.inventory.jobs == {}
    assert all(n == 0 for _, _, n in s.state.inventory.catalog.snapshots())


def test_a_backend_that_goes_meanwhile() -> None:
    s = begun()
    s.handle(fact.backend_down(A), NOW)

    assert s.handle(fact.was_cut(R, TRUNK, 0.1), NOW) == []
    assert SnapshotId("t") in s.state.inventory.catalog
    s = begun()
    s.handle(fact.backend_down(A), NOW)
    assert s.handle(fact.cut_failed(R, "no"), NOW) == []


def test_a_snapshot_that_is_lost_before_its_turn_is_not_cut() -> None:
    s = cutting()
    s.state.inventory.slots[A0].hold(Content(Resident(run_of(900, 7)), Tenant("x"), savable=False))
    assert names(arrive(s, ids=SHORT)) == ["Erase"]
    s.handle(fact.snapshot_lost(SnapshotId("s")), NOW)

    assert names(s.handle(fact.erased(R, A0), NOW)) == ["Dispatch"]


def test_kinds_that_cannot_go_back_are_not_cut() -> None:
    made = inventory(backend(cuts=True, memory_kind=MemoryKind.HYBRID), snapshots=[LONG])
    found = plan(request(ids=SHORT), made, NOW)

    assert found is not None
    assert found.chosen.source is Source.COLD


def test_what_rewriting_for_a_restore_took_is_learned() -> None:
    s = cutting(backend())
    arrive(s, ids=SHORT)
    before = s.state.inventory.backends[A].rates.rewrite_s(8_000_000)
    s.handle(fact.restored(R, 8000, 0.001, rewrite_s=5.0), NOW)

    assert s.state.inventory.backends[A].rates.rewrite_s(8_000_000) > before


def test_a_file_with_other_streams_is_priced_for_its_rewriting() -> None:
    two = snapshot("s", run_of(900))
    two = type(two)(two.id, two.namespace, two.kv_dir, two.pieces, two.size_bytes, StateShape(2))
    made = inventory(backend(), snapshots=[two])
    made.backends[A].rates = rates()
    made.backends[A].rates.rewrite = LinearFit(0.5, 0.0)
    found = plan(request(ids=run_of(1000)), made, NOW)

    assert found is not None
    assert found.chosen.price.rewrite_s == 0.5
    made.backends[A].info = backend(n_stream=2)
    found = plan(request(ids=run_of(1000)), made, NOW)
    assert found is not None
    assert found.chosen.price.rewrite_s == 0.0
