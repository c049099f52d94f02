"""Prefill chunks: a prompt is computed in chunks while other requests run on its backend."""

from math import inf
from typing import Any

import pytest

from router.base.tokens import count, head
from router.base.types import MemoryKind, RequestId
from router.core.model.effects import Account, Effect, Prefill, Restore, Save, StopWork
from router.core.model.effects import SaveReason as Why
from router.core.model.slots import UNKNOWN, Content, Resident
from router.core.planning.planner import plan
from tests.support.scheduler import fact
from tests.support.scheduler.build import A1, NS, R2, backend, request, run_of, scheduler, snapshot
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    cancel,
    finish,
    held,
    names,
    prefill_failed,
    prefilled,
    restored,
    slot,
)
from tests.support.scheduler.driven import Driven

# At 0.01 s per token (build.rates), 600 tokens come closest to a chunk, but the server computes
# 512 at once.
PIECE_S = 6.0
LONG = run_of(2000)
MINE, OTHER = "r2", "r"


def beside(n_slots: int = 2, kind: MemoryKind = MemoryKind.FULL, **more: Any) -> Driven:
    """Return a scheduler with one backend, on which OTHER streams."""
    info = backend("a", n_slots, memory_kind=kind, **more.pop("info", {}))
    given: dict[str, Any] = {"prefill_chunk_s": PIECE_S, "idle_save_after_s": None}
    s = scheduler(info, **(given | more))
    arrive(s, OTHER, run_of(20, 9))
    return s


def n_asked(effects: list[Effect]) -> int:
    """Return the number of tokens of LONG in the only prefill among the effects."""
    (prefill,) = (e for e in effects if isinstance(e, Prefill))
    assert prefill.tokens == head(LONG, count(prefill.tokens))
    return count(prefill.tokens)


def test_streams_go_on_after_each_piece() -> None:
    s = beside()

    assert n_asked(arrive(s, MINE, LONG)) == 512
    assert n_asked(prefilled(s, MINE, prompt_tokens=512, cached_tokens=0)) == 1024
    assert n_asked(prefilled(s, MINE, prompt_tokens=1024, cached_tokens=512)) == 1536
    assert n_asked(prefilled(s, MINE, prompt_tokens=1536, cached_tokens=1024)) == 1999
    assert names(prefilled(s, MINE, prompt_tokens=1999, cached_tokens=1536)) == ["Dispatch"]
    assert held(s, A1) == head(LONG, 1999)


def test_it_is_one_prefill_in_the_books() -> None:
    s = beside()
    arrive(s, MINE, LONG)
    for n, before in ((512, 0), (1024, 512), (1536, 1024), (1999, 1536)):
        prefilled(s, MINE, prompt_tokens=n, cached_tokens=before)
    (account, *_) = finish(s, MINE, prompt_tokens=2000, cached_tokens=1999)

    assert isinstance(account, Account)
    assert account.prefilled is not None
    assert account.prefilled.tokens == 1999


def test_a_piece_takes_so_long_whatever_the_server_is() -> None:
    s = beside(prefill_chunk_s=11.0)

    assert n_asked(arrive(s, MINE, LONG)) == 1024


@pytest.mark.parametrize(
    "more",
    [
        {"prefill_chunk_s": None},
        {"prefill_chunk_s": 20.0},
        {"prefill_chunk_s": 19.9},  # the remainder would be small
    ],
)
def test_all_at_once(more: dict[str, Any]) -> None:
    s = beside(**more)

    assert n_asked(arrive(s, MINE, LONG)) == 1999


def test_a_kind_that_cannot_go_back_keeps_its_checkpoints() -> None:
    s = beside(kind=MemoryKind.SLIDING_WINDOW, reuse_probability=0.0)

    assert n_asked(arrive(s, MINE, LONG)) == 1999


def test_alone_there_is_nobody_to_wait() -> None:
    s = beside()
    finish(s, OTHER)

    assert n_asked(arrive(s, MINE, LONG)) == 1999


def test_who_is_alone_at_last_goes_on_at_once() -> None:
    s = beside()
    arrive(s, MINE, LONG)
    finish(s, OTHER)

    assert n_asked(prefilled(s, MINE)) == 1999


def test_alone_a_piece_is_longer_and_not_all() -> None:
    s = beside(prefill_chunk_s=3.0)
    finish(s, OTHER)

    assert n_asked(arrive(s, MINE, LONG)) == 1024


def test_one_whose_prompt_waits_is_not_to_wait_for_all_of_mine() -> None:
    s = beside(reuse_probability=0.0)
    arrive(s, MINE, LONG)
    finish(s, OTHER)
    assert arrive(s, "r3", run_of(1500, 8)) == []

    assert n_asked(prefilled(s, MINE)) == 1024


def test_one_that_gets_its_state_back_is_not_held_up_for_long() -> None:
    snap = snapshot("s", run_of(900, 8))
    s = beside(3, snapshots=[snap], coalesce_above_s=12.0)
    finish(s, OTHER)
    assert names(arrive(s, OTHER + "'", run_of(1000, 8))) == ["Restore"]

    assert n_asked(arrive(s, MINE, LONG)) == 1999


def test_pieces_are_of_what_is_missing() -> None:
    snap = snapshot("s", head(LONG, 400))
    s = beside(snapshots=[snap])
    assert arrive(s, MINE, LONG) == [Restore(R2, A1, snap)]

    assert n_asked(restored(s, 400, MINE)) == 912


def test_what_others_wait_for_is_saved_when_all_of_it_is_there() -> None:
    s = beside(3)
    arrive(s, MINE, LONG)
    assert names(arrive(s, "r3", LONG)) == []
    for _ in range(3):
        assert names(prefilled(s, MINE)) == ["Prefill"]

    assert prefilled(s, MINE) == [Save(R2, A1, NS, Why.SHARED)]


def test_pieces_of_a_gone_client_are_finished_for_waiters() -> None:
    s = beside(3)
    arrive(s, MINE, LONG)
    arrive(s, "r3", LONG)

    assert cancel(s, MINE) == []
    assert [n_asked(prefilled(s, MINE)) for _ in range(3)] == [1024, 1536, 1999]
    assert prefilled(s, MINE) == [Save(R2, A1, NS, Why.SHARED)]


def test_nobody_waits_for_one_that_broke_off() -> None:
    """Servers may hang: a request that waited for the prompt computes it in another slot."""
    s = beside(4)
    arrive(s, MINE, LONG)
    arrive(s, "r3", LONG)
    assert RequestId("r3") not in s.state.inventory.jobs

    s.handle(fact.prefill_broke(RequestId(MINE)), NOW)
    assert RequestId("r3") in s.state.inventory.jobs
    ends = s.next_wakeup(NOW)
    assert ends is not None
    assert NOW < ends <= NOW + PIECE_S  # the end of the chunk's permit
    assert names(s.handle(fact.tick(), ends)) == ["Prefill"]
    assert names(s.handle(fact.prefill_failed(RequestId(MINE), "late"), NOW)) == ["Dispatch"]


def test_who_left_a_prefill_is_gone_from_its_slot_soon() -> None:
    """Abandoned prefills end soon, unless they broke off before."""
    s = beside(3)
    arrive(s, MINE, LONG)
    cancel(s, MINE)
    s.handle(fact.prefill_broke(RequestId(MINE)), NOW)
    held = next(slot for slot in s.state.inventory.slots if slot.holder == MINE)
    assert held.work.prefill_abandoned
    assert held.work.busy_until < inf


def test_nobody_waits_for_one_that_broke_off_and_was_left() -> None:
    """Waiting for a prefill with an unknown end is not a candidate."""
    s = beside(3)
    arrive(s, MINE, LONG)
    s.handle(fact.prefill_broke(RequestId(MINE)), NOW)
    cancel(s, MINE)
    made = plan(request("r3", LONG), s.state.inventory, NOW)
    assert made is not None
    assert all(way.price.total_s < inf for way in (made.chosen, *made.losers))


def test_nothing_goes_on_for_one_who_left_alone() -> None:
    s = beside()
    arrive(s, MINE, LONG)

    assert cancel(s, MINE) == [StopWork(R2)]
    assert names(prefilled(s, MINE)) == []
    assert held(s, A1) == head(LONG, 512)


def test_nor_for_those_who_waited_and_left_as_well() -> None:
    s = beside(3)
    arrive(s, MINE, LONG)
    arrive(s, "r3", LONG)
    cancel(s, MINE)
    cancel(s, "r3")

    assert names(prefilled(s, MINE)) == []


@pytest.mark.parametrize("may_hold_more", [False, True])
def test_an_answer_that_nobody_has_read_is_not_cut_off(may_hold_more: bool) -> None:
    """Shorter prefills would make the server drop the unread tokens after them."""
    s = beside(reuse_probability=0.0)
    unread = 0 if may_hold_more else 400
    resident = Resident(head(LONG, 600), unread, may_hold_more=may_hold_more)
    slot(s, A1).hold(Content(resident))

    assert n_asked(arrive(s, MINE, LONG)) == (1999 if may_hold_more else 1512)


def test_a_slot_that_was_never_used_has_nothing_to_be_cut_off() -> None:
    s = beside()
    slot(s, A1).hold(Content(UNKNOWN))

    assert n_asked(arrive(s, MINE, LONG)) == 512
    assert n_asked(prefilled(s, MINE)) == 1024


def test_of_what_was_there_before_the_router_nothing_is_cut_off() -> None:
    s = beside(reuse_probability=0.0)
    slot(s, A1).hold(Content(Resident(unread=400)))

    assert n_asked(arrive(s, MINE, LONG)) == 912


def test_kind_that_cannot_go_back_has_no_pieces() -> None:
    s = beside(kind=MemoryKind.HYBRID)
    slot(s, A1).hold(Content(UNKNOWN))

    assert n_asked(arrive(s, MINE, LONG)) == 1999


def test_a_piece_that_fails_is_the_last() -> None:
    s = beside()
    arrive(s, MINE, LONG)

    assert names(prefill_failed(s, MINE)) == ["Dispatch"]


def test_who_waits_is_told_what_is_left() -> None:
    s = beside()
    arrive(s, MINE, LONG)
    assert slot(s, A1).work.busy_until == pytest.approx(NOW + 19.99)
    prefilled(s, MINE)

    assert slot(s, A1).work.busy_until == pytest.approx(NOW + 14.87)
