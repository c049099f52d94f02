"""Locality priority: which queued request goes first on a freed slot."""

from typing import Any

import pytest

from router.base.tokens import head, join, pack
from router.base.types import Tenant
from router.core.model.effects import Dispatch, Effect
from router.core.scheduler import Scheduler
from tests.support.scheduler.build import A0, NS, backend, run_of, scheduler, snapshot
from tests.support.scheduler.drive import arrive, cancel, finish, slot

TALK, OTHER = run_of(1000, 1), run_of(900, 2)
NEXT = join([TALK, pack([7] * 50)])


def sent(effects: list[Effect]) -> list[str]:
    return [effect.request for effect in effects if isinstance(effect, Dispatch)]


def talking(n_slots: int = 1, **more: Any) -> Scheduler:
    """Return a scheduler that answers TALK in the first slot; nothing can be saved."""
    info = backend("a", n_slots, kv_dir=None)
    s = scheduler(info, coalesce_above_s=None, idle_save_after_s=None, **more)
    assert sent(arrive(s, "talk", TALK, client="talker")) == ["talk"]
    return s


def over(s: Scheduler, name: str = "talk", n: int = 1000) -> list[str]:
    """Finish a request, and return the requests that are sent then."""
    return sent(finish(s, name, prompt_tokens=n, cached_tokens=0, generated_tokens=1))


def test_who_has_come_for_what_is_there() -> None:
    s = talking()
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT)

    assert over(s) == ["next"]
    assert over(s, "next", 1050) == ["other"]


def test_nobody_has() -> None:
    s = talking()
    arrive(s, "other", OTHER)
    arrive(s, "third", run_of(900, 3))

    assert over(s) == ["other"]


def test_a_snapshot_has_it_as_well() -> None:
    s = talking(snapshots=[snapshot("s", TALK)])
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT)

    assert over(s) == ["other"]


def test_it_is_too_little() -> None:
    """40 shared tokens (0.4 s) are too few; 60 (0.6 s) are enough."""
    for n, first in ((40, "other"), (60, "next")):
        s = talking()
        arrive(s, "other", OTHER)
        arrive(s, "next", join([head(TALK, n), pack([7] * 500)]))
        assert over(s) == [first]


def test_it_is_another_tenants() -> None:
    s = talking()
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT, tenant=Tenant("t"))

    assert over(s) == ["other"]


@pytest.mark.parametrize("more", [{"reuse": False}, {"slot_hint": 1}])
def test_who_cannot_have_it_keeps_nobody_waiting(more: dict[str, Any]) -> None:
    """`slot_hint` names the other slot, which is running."""
    s = talking(2)
    arrive(s, "beside", run_of(500, 4), slot_hint=1)
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT, **more)

    assert over(s) == ["other"]


def test_a_message_that_goes_where_its_prompt_is_has_come_for_it_too() -> None:
    s = talking(2)
    arrive(s, "beside", run_of(500, 4), slot_hint=1)
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT, pinnable=False)
    over(s)

    assert slot(s, A0).holder == "next"


def test_who_needs_all_slots_gives_none_away() -> None:
    """Idle slots were kept for the request that needs all of them."""
    s = talking()
    arrive(s, "batch", OTHER, whole_backend=True)
    arrive(s, "next", NEXT)

    assert over(s) == ["batch"]


def test_nobody_else_goes_before_him_who_gives_way() -> None:
    """Freed slots: one goes to the request that reuses it, one to the first in the queue."""
    s = talking(3)
    for number in (1, 2):
        arrive(s, f"talk{number}", run_of(1000, 3 + number), slot_hint=number, client="talker")
    arrive(s, "batch", run_of(5, 6), whole_backend=True, client="batch")
    arrive(s, "other", OTHER, client="poor")
    arrive(s, "next", NEXT, client="mid")
    arrive(s, "rich", run_of(900, 7), client="talker")
    assert over(s) == over(s, "talk1") == []

    assert sent(cancel(s, "batch")) == ["next", "other"]
    assert [(w.request.id, w.passed_over) for w in s.state.queue] == [("rich", 0)]


def test_a_client_who_has_had_much_more_does_not_go_first() -> None:
    """TALK took 10 s of prefill, and some for its answer."""
    s = talking()
    arrive(s, "other", OTHER, client="somebody")
    arrive(s, "next", NEXT, client="talker")

    assert over(s) == ["other"]


def test_nobody_is_passed_over_for_ever() -> None:
    s = talking()
    arrive(s, "other", OTHER)
    order, last, n = [], "talk", 1000
    for turn in range(10):
        arrive(s, f"next{turn}", join([NEXT, pack([7] * turn)]))
        order += over(s, last, n)
        last, n = order[-1], 1050 + turn
        if last == "other":
            break
    assert order == [*(f"next{turn}" for turn in range(8)), "other"]


def test_who_went_before_nobody_was_not_passed_over() -> None:
    s = talking(2)
    arrive(s, "beside", run_of(500, 4), slot_hint=1)
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT)
    assert [waiting.passed_over for waiting in s.state.queue] == [0, 0]
    arrive(s, "third", join([NEXT, pack([8])]))

    assert over(s) == ["next"]
    assert [waiting.passed_over for waiting in s.state.queue] == [1, 0]


def test_of_two_slots_the_other_is_taken() -> None:
    """Neither request is passed over if there is room for both."""
    s = talking(2)
    arrive(s, "beside", run_of(5, 4), slot_hint=1)
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT)

    assert over(s, "beside", 5) == ["other"]
    assert over(s) == ["next"]
    assert slot(s, A0).pending == NEXT


def test_namespaces_are_told_apart() -> None:
    """Snapshots of another model do not help."""
    s = talking(snapshots=[snapshot("s", TALK, ns=f"{NS}-else")])
    arrive(s, "other", OTHER)
    arrive(s, "next", NEXT)

    assert over(s) == ["next"]
