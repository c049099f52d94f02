"""Ends of requests on a backend that goes down, or comes back as a new process."""

from router.base.errors import BackendError
from router.base.types import Outcome, SlotStatus
from router.core.model.effects import Delete, Reject, Save, SaveReason, StopWork, WatchSlot
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
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    astray,
    cancel,
    finish,
    launched,
    names,
    quiet,
    restored,
    running,
    slot,
    stranger,
)

TWO = backend("a", 2)


def test_who_is_being_prepared_is_told_when_the_backend_goes() -> None:
    s = scheduler(TWO)
    arrive(s, ids=run_of(1000))
    reject, stop = s.handle(fact.backend_down(A), NOW)

    assert isinstance(reject, Reject)
    assert isinstance(reject.error, BackendError)  # so it is retried
    assert stop == StopWork(R)  # otherwise a hung server would continue it for no client
    assert s.state.inventory.jobs == {}


def test_who_left_already_is_told_nothing() -> None:
    s = scheduler(TWO)
    arrive(s, ids=run_of(1000))
    cancel(s)

    assert s.handle(fact.backend_down(A), NOW) == [StopWork(R)]


def test_what_is_running_ends_by_itself() -> None:
    s = running()
    assert s.handle(fact.backend_down(A), NOW) == []

    assert names(finish(s, "r", Outcome.BACKEND_ERROR)) == ["Account"]
    assert slot(s, A0).phase is Phase.LOST
    assert s.state.inventory.jobs == {}


def test_what_runs_elsewhere_goes_on() -> None:
    s = running(TWO, backend("b", 1))
    s.handle(fact.backend_down(B), NOW)

    assert s.state.inventory.jobs.keys() == {R}
    assert names(finish(s)) == ["Account"]


def test_old_end_does_not_open_the_gate_after_a_restart() -> None:
    """Regression: the old request's end opened the gate of a newer request."""
    s = astray()
    s.handle(fact.backend_up(TWO), NOW)
    arrive(s, "r2", [5], pinnable=False)
    finish(s, "r", Outcome.BACKEND_ERROR)

    assert s.state.inventory.gated == {A}
    assert s.state.inventory.jobs.keys() == {R2}


def test_news_of_where_it_ran_from_before_a_restart_is_ignored() -> None:
    """Regression: the event released a stale lease."""
    s = astray()
    s.handle(fact.backend_up(backend("a", 1)), NOW)

    assert launched(s, 1) == []
    assert slot(s, A0).phase is Phase.IDLE


def test_a_stranger_from_before_a_restart_is_another() -> None:
    s = scheduler()
    busy = fact.backend_up(backend("b", 1), (SlotStatus(0, True, 5, 100),))
    (first,) = s.handle(busy, NOW)
    (second,) = s.handle(busy, NOW)

    assert first == WatchSlot(stranger(B0), B0)
    assert second != first
    assert quiet(s, stranger(B0), 1) == []
    assert slot(s, B0).phase is Phase.ABANDONED


def test_unrestored_snapshot_is_released_with_its_job() -> None:
    used = snapshot("s", run_of(900))
    s = scheduler(backend("a", 1), snapshots=[used], holding={A0: run_of(1000, 7)})
    assert arrive(s, ids=run_of(1000)) == [Save(R, A0, NS, SaveReason.DISPLACED)]
    s.state.inventory.catalog.remove(used.id)

    assert s.handle(fact.backend_down(A), NOW)[1:] == [Delete(used)]
    assert restored(s) == []
