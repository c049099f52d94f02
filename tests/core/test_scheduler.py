"""Scheduler: every event is accepted, and the next wake-up is when a tick matters."""

import pytest

from router.base.types import Outcome, Reported, RequestId, SnapshotId
from router.core.model.policy import PolicyName
from router.core.model.request_queue import QueueLimits
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, A, R, backend, run_of, scheduler, snapshot, tokens
from tests.support.scheduler.drive import NOW, arrive, finish, held, names

NO_TENANT = RequestId("nobody")
LATE: list[fact.Fact] = [
    fact.backend_down(A),
    fact.cancelled(NO_TENANT),
    fact.save_failed(NO_TENANT, A0, "x"),
    fact.restored(NO_TENANT, 5, 0.1),
    fact.prefilled(NO_TENANT, Reported()),
    fact.prefill_failed(NO_TENANT, "x"),
    fact.launched(NO_TENANT, 0),
    fact.finished(NO_TENANT, Outcome.OK, Reported()),
    fact.answer_read(A0, 0, tokens(1), tokens(2)),
    fact.quiet(NO_TENANT, 5),
    fact.snapshot_lost(SnapshotId("x")),
    fact.tick(),
]


@pytest.mark.parametrize("event", LATE, ids=lambda e: type(e).__name__)
def test_news_that_concerns_nobody_does_nothing(event: fact.Fact) -> None:
    assert scheduler().handle(event, NOW) == []


def test_effects_of_one_event_are_not_repeated_with_the_next() -> None:
    s = scheduler()

    assert names(arrive(s)) == ["Dispatch"]
    assert s.handle(fact.tick(), NOW) == []


def test_a_lost_snapshot_is_not_offered_and_not_deleted() -> None:
    """Regression: a lost snapshot in use was named for deletion, although its file was gone."""
    s = scheduler(backend("a", 1), snapshots=[snapshot("s", run_of(900))], coalesce_above_s=None)
    assert names(arrive(s, ids=run_of(1000))) == ["Restore"]
    assert s.handle(fact.snapshot_lost(SnapshotId("s")), NOW) == []

    effects = s.handle(fact.restored(R, 900, 0.1), NOW)
    assert names(effects) == ["Dispatch"]
    assert len(s.state.inventory.catalog) == 0


def test_a_slot_that_comes_free_goes_to_who_waits() -> None:
    s = scheduler(backend("a", 1))
    arrive(s, "r")
    arrive(s, "r2")

    assert names(finish(s, prompt_tokens=3)) == ["Account", "Dispatch"]
    assert held(s, A0) == tokens(1, 2, 3)


# -- wake-ups ------------------------------------------------------------------------------------


def test_an_idle_router_sleeps() -> None:
    assert scheduler().next_wakeup(NOW) is None


@pytest.mark.parametrize(
    ("queue", "model", "max_wait_s", "due_s"),
    [
        (QueueLimits(deadline_s=5.0), None, 9.0, 5.0),
        (QueueLimits(deadline_s=50.0), None, 9.0, 9.0),
        (QueueLimits(deadline_s=50.0, no_backend_s=3.0), "other", 9.0, 3.0),
        (QueueLimits(deadline_s=50.0, no_backend_s=-3.0), "other", 9.0, 0.0),
    ],
    ids=["deadline", "end of patience", "no backend", "overdue"],
)
def test_it_wakes_when_something_is_due(
    queue: QueueLimits, model: str | None, max_wait_s: float, due_s: float
) -> None:
    s = scheduler(backend("a", 1), queue=queue, max_wait_s=max_wait_s)
    arrive(s, "r")
    arrive(s, "r2", model=model)

    assert s.next_wakeup(NOW) == NOW + due_s


def test_patience_with_a_late_slot_ends_by_a_tick() -> None:
    """Regression: only another event ended the wait."""
    s = scheduler(
        backend("a", 2), policy=PolicyName.CHEAPEST, coalesce_above_s=None, max_wait_s=7.0
    )
    arrive(s, "r", run_of(1000))
    assert arrive(s, "r2", run_of(1001)) == []
    due = s.next_wakeup(NOW)

    assert due == NOW + 7.0
    assert names(s.handle(fact.tick(), due)) == ["Dispatch"]
