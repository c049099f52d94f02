"""Driven state: the seconds for which streams were stalled."""

from typing import Any

import pytest

from router.base.types import Reported, RequestId, SlotId, Stall
from router.core.model.slots import Content, Resident
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    A,
    R,
    backend,
    busy,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import NOW, arrive
from tests.support.scheduler.driven import Driven

SNAP = snapshot("s", run_of(900))
THREE = backend("a", 3)


def with_two_streams(**more: Any) -> Driven:
    """Return a scheduler with two streams on a, and a free third slot."""
    s = scheduler(THREE, idle_save_after_s=None, reuse_probability=0.0, **more)
    for index in (1, 2):
        busy(s.state.inventory, SlotId(A, index))
    return s


def test_a_restore_stops_every_running_stream_of_its_backend() -> None:
    s = with_two_streams(snapshots=[SNAP], coalesce_above_s=None)
    arrive(s, ids=run_of(1000))
    s.handle(fact.restored(R, 900, 0.25), NOW)

    assert s.state.inventory.backends[A].stalled_s == {Stall.RESTORE: 0.5}


def test_a_save_stops_them_too_whoever_wanted_it() -> None:
    s = with_two_streams()
    s.state.inventory.slots[A0].hold(Content(Resident(SNAP.tokens)))
    for name in ("save-1", "save-2"):
        s.handle(fact.save_asked(A0), NOW)
        s.handle(fact.saved(RequestId(name), A0, SNAP, 0.25), NOW)

    assert s.state.inventory.backends[A].stalled_s == {Stall.SAVE: 1.0}


@pytest.mark.parametrize(("prompt_s", "expected"), [(3.0, 6.0), (None, 0.0)])
def test_prefill_counts_as_far_as_its_time_is_known(
    prompt_s: float | None, expected: float
) -> None:
    s = with_two_streams(coalesce_above_s=0.0)
    arrive(s, ids=run_of(1000))
    s.handle(fact.prefilled(R, Reported(999, 0, prompt_s)), NOW)

    assert s.state.inventory.backends[A].stalled_s == {Stall.PREFILL: expected}


def test_streams_of_other_backends_and_idle_slots_lose_nothing() -> None:
    s = scheduler(THREE, backend("b", 1), idle_save_after_s=None)
    busy(s.state.inventory, B0)
    s.state.inventory.slots[A1].hold(Content(Resident(run_of(5))))
    s.state.inventory.slots[A0].hold(Content(Resident(SNAP.tokens)))
    s.handle(fact.save_asked(A0), NOW)
    s.handle(fact.saved(RequestId("save-1"), A0, SNAP, 0.25), NOW)

    assert s.state.inventory.backends[A].stalled_s == {Stall.SAVE: 0.0}
