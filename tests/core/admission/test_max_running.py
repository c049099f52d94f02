"""A cap on running requests below the number of slots."""

from router.base.types import Outcome, RequestId
from router.core.model.slots import Phase
from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, A1, backend, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, names, plan_of, slot

CAPPED = backend("a", 3, max_running=1)


def test_request_over_the_cap_waits_beside_idle_slots() -> None:
    s = scheduler(CAPPED, idle_save_after_s=None)
    assert names(arrive(s, "r1")) == ["Dispatch"]
    assert arrive(s, "r2") == []
    assert slot(s, A1).phase is Phase.IDLE

    assert plan_of(finish(s, "r1")).chosen.slot.backend == "a"


def test_conversations_keep_their_slots_under_the_cap() -> None:
    s = scheduler(CAPPED, idle_save_after_s=None, coalesce_above_s=None)
    first = {}
    for n, ids in enumerate(([1] * 50, [2] * 50, [3] * 50)):
        first[n] = plan_of(arrive(s, f"r{n}", ids)).chosen.slot
        finish(s, f"r{n}", prompt_tokens=50, generated_tokens=1)

    assert len(set(first.values())) == 3
    again = plan_of(arrive(s, "again", [1] * 60)).chosen
    assert (again.slot, again.reused_tokens) == (first[0], 50)


def test_request_goes_to_a_backend_below_its_cap() -> None:
    s = scheduler(CAPPED, backend("b", 1), idle_save_after_s=None)
    assert plan_of(arrive(s, "r1")).chosen.slot == A0
    assert plan_of(arrive(s, "r2", [7, 8, 9])).chosen.slot.backend == "b"


def test_abandoned_request_counts_until_its_server_is_done() -> None:
    s = scheduler(CAPPED, idle_save_after_s=None)
    arrive(s, "r1")
    s.handle(fact.begun(RequestId("r1")), NOW)
    finish(s, "r1", outcome=Outcome.CLIENT_GONE, begun=True)
    assert arrive(s, "r2", [7, 8, 9]) == []
    assert "Dispatch" in names(s.handle(fact.quiet(RequestId("r1"), 5), NOW))
