"""Background requests leave the last slot of a backend free where a person was lately."""

import pytest

from router.base.types import BackendInfo, RequestId
from router.core.model.effects import Dispatch
from router.core.model.tuning import TUNING
from tests.support.scheduler import fact
from tests.support.scheduler.build import backend, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, names
from tests.support.scheduler.driven import Driven

TWO = backend("a", 2)
ONE = backend("a", 1)


def ticked(s: Driven) -> tuple[float, list[RequestId]]:
    """Tick whenever the scheduler wants it; return what it starts first by that, and when."""
    now = NOW
    while (at := s.next_wakeup(now)) is not None:
        sent = [e.request for e in s.handle(fact.tick(), at) if isinstance(e, Dispatch)]
        if sent:
            return at, sent
        now = at
    raise AssertionError("nothing is started")


def test_a_batch_has_all_slots_where_nobody_else_comes() -> None:
    s = scheduler(TWO, idle_save_after_s=None)
    assert "Dispatch" in names(arrive(s, "b1", background=True))
    assert "Dispatch" in names(arrive(s, "b2", background=True))


@pytest.mark.parametrize("capped", [TWO, backend("a", 3, max_running=2)])
def test_the_last_slot_is_free_for_a_person(capped: BackendInfo) -> None:
    s = scheduler(capped, idle_save_after_s=None)
    arrive(s, "person")
    finish(s, "person")
    assert "Dispatch" in names(arrive(s, "b1", background=True))
    assert arrive(s, "b2", background=True) == []
    assert "Dispatch" in names(arrive(s, "again", [7, 8]))
    assert "Dispatch" not in names(finish(s, "again"))


def test_the_last_slot_is_given_once_nobody_came_for_minutes() -> None:
    s = scheduler(TWO, idle_save_after_s=None)
    arrive(s, "person")
    finish(s, "person")
    arrive(s, "b1", background=True)
    arrive(s, "b2", background=True)
    assert ticked(s) == (NOW + TUNING.last_slot_free_s, [RequestId("b2")])


def test_the_only_slot_is_given_in_a_gap() -> None:
    s = scheduler(ONE, idle_save_after_s=None)
    arrive(s, "person")
    finish(s, "person")
    assert arrive(s, "b1", background=True) == []
    assert ticked(s) == (NOW + TUNING.only_slot_free_s, [RequestId("b1")])


def test_a_batch_goes_to_another_backend_first() -> None:
    s = scheduler(ONE, backend("b", 2), idle_save_after_s=None)
    arrive(s, "person", slot_hint=0)
    finish(s, "person")
    sent = {}
    for name in ("b1", "b2"):
        (dispatch,) = arrive(s, name, background=True)
        assert isinstance(dispatch, Dispatch)
        sent[name] = dispatch.lease.slot.backend
    assert set(sent.values()) == {"b"}
