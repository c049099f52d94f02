"""Slots that share their cells (unified KV): requests that do not fit beside others wait."""

from typing import Any

from router.base.types import BackendInfo, MemoryKind
from router.core.model.effects import Erase
from router.core.model.slots import Content, Resident
from tests.support.scheduler.build import (
    A0,
    A1,
    A2,
    A,
    backend,
    inventory,
    request,
    run_of,
    scheduler,
)
from tests.support.scheduler.drive import arrive, finish

ANSWER: dict[str, Any] = {"max_new_tokens": 100}


def unified(n_slots: int = 3) -> BackendInfo:
    return backend(n_slots=n_slots, n_ctx=1000, unified=True, memory_kind=MemoryKind.FULL)


def test_request_that_does_not_fit_beside_others_waits() -> None:
    s = scheduler(unified(), coalesce_above_s=None)
    arrive(s, "r", run_of(500, 1), **ANSWER)

    assert arrive(s, "r2", run_of(500, 2), **ANSWER) == []
    finish(s, "r", prompt_tokens=500, cached_tokens=0)
    assert list(s.state.inventory.jobs) == ["r2"]


def test_shorter_requests_do_not_overtake_it_for_ever() -> None:
    """They would fit into the cells that are left, one after the other."""
    s = scheduler(unified(), coalesce_above_s=None)
    arrive(s, "r", run_of(500, 1), **ANSWER)
    arrive(s, "r2", run_of(500, 2), **ANSWER)

    assert arrive(s, "r3", run_of(50, 3), max_new_tokens=10) == []
    assert [waiting.request.id for waiting in s.state.queue] == ["r2", "r3"]


def test_a_request_alone_is_given_all_cells() -> None:
    made = inventory(unified())

    assert made.has_cells(made.backends[A], request(ids=run_of(990), **ANSWER))
    assert made.lacks_cells(request(ids=run_of(990), **ANSWER)) == []


def test_slots_that_were_used_longest_ago_are_emptied_for_it() -> None:
    made = inventory(unified())
    for which, n, used in ((A0, 400, 3.0), (A1, 300, 1.0), (A2, 0, 2.0)):
        made.slots[which].hold(Content(Resident(run_of(n))))
        made.slots[which].last_used = used

    def in_the_way(n: int) -> list[object]:
        found = made.in_the_way(made.slots[A2], request(ids=run_of(n, 7), **ANSWER), 0)
        return [slot.id for slot in found]

    assert in_the_way(200) == []
    assert in_the_way(400) == [A1]
    assert in_the_way(900) == [A1, A0]


def test_a_slot_of_unknown_length_is_emptied_first() -> None:
    made = inventory(unified())
    made.slots[A0].hold(Content(Resident(may_hold_more=True)))
    made.slots[A1].hold(Content(Resident(run_of(300))))

    found = made.in_the_way(made.slots[A2], request(ids=run_of(200, 7), **ANSWER), 0)

    assert [slot.id for slot in found] == [A0]


def test_an_opaque_slot_is_emptied_before_another_prompt() -> None:
    """How far back its content is right is unknown, and the server goes back by itself."""
    for kind, erases in ((MemoryKind.OPAQUE, [A0]), (MemoryKind.HYBRID, [])):
        s = scheduler(backend(n_slots=1, memory_kind=kind, kv_dir=None), coalesce_above_s=None)
        s.state.inventory.slots[A0].hold(Content(Resident(run_of(300))))

        effects = arrive(s, ids=run_of(100))

        assert [effect.slot for effect in effects if isinstance(effect, Erase)] == erases
