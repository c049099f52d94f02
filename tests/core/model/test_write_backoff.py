"""Write backoff: after repeated failures, nothing is written for a while."""

import pytest
from msgspec.structs import replace

from router.base.types import KvDir, RequestId, Snapshot, SnapshotId, Source, StateShape
from router.core.model.backend import WriteBackoff
from router.core.model.effects import Blame, Effect, Save, SaveReason
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, A1, NS, A, backend, run_of, scheduler, snapshot
from tests.support.scheduler.drive import NOW, arrive, names, plan_of, saved
from tests.support.scheduler.driven import Driven

LONG = run_of(1000)
SNAP = snapshot("s", run_of(900))
TWO_STREAMS = replace(SNAP, shape=StateShape(n_stream=2))
ELSEWHERE = replace(SNAP, kv_dir=KvDir("other"))


def failing() -> Driven:
    """Return a scheduler after the saves of two slots failed."""
    s = scheduler(backend("a", 2), holding={A0: LONG, A1: run_of(1000, 7)}, idle_save_after_s=0.0)
    assert s.handle(fact.tick(), NOW) == [Save(RequestId("save-1"), A0, NS, SaveReason.IDLE)]
    (again,) = fails(s, 1, NOW)
    assert again == Save(RequestId("save-2"), A1, NS, SaveReason.IDLE)  # no backoff yet
    assert fails(s, 2, NOW) == []
    return s


def fails(s: Driven, number: int, now: float) -> list[Effect]:
    slot = A0 if number % 2 else A1
    return s.handle(fact.save_failed(RequestId(f"save-{number}"), slot, "disk full"), now)


def test_two_in_a_row_are_followed_by_a_rest_and_another_try() -> None:
    s = failing()
    assert s.next_wakeup(NOW) == NOW + 1.0
    assert s.handle(fact.tick(), NOW + 0.9) == []
    assert names(s.handle(fact.tick(), NOW + 1.0)) == ["Save"]


def test_each_rest_is_twice_as_long_up_to_a_minute() -> None:
    s, now, rests = failing(), NOW, []
    for number in range(3, 11):
        due = s.next_wakeup(now)
        assert due is not None
        rests.append(due - now)
        now = due
        assert names(s.handle(fact.tick(), now)) == ["Save"]
        s.handle(fact.save_failed(RequestId(f"save-{number}"), A0, "disk full"), now)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_save_that_works_ends_it() -> None:
    s = failing()
    s.handle(fact.tick(), NOW + 1.0)
    effects = s.handle(fact.saved(RequestId("save-3"), A0, SNAP, 0.001), NOW + 1.0)
    assert names(effects) == ["Save"]
    assert s.state.inventory.backends[A].backoff == WriteBackoff()


def test_requests_displace_without_a_save_meanwhile() -> None:
    s = failing()
    assert names(arrive(s, ids=run_of(100, 5))) == ["Dispatch"]


@pytest.mark.parametrize(
    ("held", "source"),
    [(SNAP, Source.SNAPSHOT), (TWO_STREAMS, Source.COLD), (ELSEWHERE, Source.COLD)],
)
def test_what_is_there_is_still_restored(held: Snapshot, source: Source) -> None:
    """Except snapshots that need a new file."""
    s = scheduler(backend("a", 1), snapshots=[held], coalesce_above_s=None)
    for _ in range(2):
        s.state.write_failed(A, NOW, "disk full")
    effects = arrive(s, ids=LONG)
    if source is Source.SNAPSHOT:
        assert names(effects) == ["Restore"]
    else:
        assert plan_of(effects).chosen.source is source


def test_a_file_is_not_blamed_for_the_disk() -> None:
    s = scheduler(backend("a", 3), snapshots=[TWO_STREAMS], coalesce_above_s=None)
    for name in ("r", "r2", "r3"):
        arrive(s, name, ids=LONG)
    for name in ("r", "r2", "r3"):
        failed = fact.restore_failed(RequestId(name), "full", Blame.DISK)
        assert names(s.handle(failed, NOW)) == ["Dispatch"]
    assert SnapshotId("s") in s.state.inventory.catalog
    assert not s.state.inventory.backends[A].may_write


def test_a_backend_that_goes_away_is_not_blamed_for_its_saves() -> None:
    s = failing()
    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.removed(A), NOW)
    fails(s, 3, NOW)
    assert A not in s.state.inventory.backends
    saved(s, SNAP)  # no backend vouches for it
