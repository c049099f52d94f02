"""Requests that can wait give their slots to those that cannot, at the next boundary."""

from typing import Any

from router.base.types import Outcome, Reported, RequestId
from router.core.execution.preemption import must_yield
from router.core.model import events as ev
from router.core.model.effects import Dispatch, Effect, Prefill, Reject, Save
from router.core.model.request_queue import QueueLimits
from router.core.scheduler import Scheduler
from tests.support.scheduler.build import A0, backend, request, run_of, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, prefilled, slot, tick

BATCH, ASKED, NEXT = run_of(300, 1), run_of(200, 2), run_of(250, 3)


def one_slot(**more: Any) -> Scheduler:
    given: dict[str, Any] = {"idle_save_after_s": None, "coalesce_above_s": None}
    return scheduler(backend("a", 1), **(given | more))


def sent(effects: list[Effect]) -> list[str]:
    return [e.request for e in effects if isinstance(e, Dispatch)]


def prefills(effects: list[Effect]) -> list[str]:
    return [e.request for e in effects if isinstance(e, Prefill)]


def ends_a_slice(s: Scheduler, name: str) -> list[Effect]:
    """Report that a running request gives its slot away after 48 tokens of its answer."""
    said = Reported(prompt_tokens=300, generated_tokens=48)
    return s.handle(ev.Finished(RequestId(name), Outcome.OK, said, yields=True), NOW)


def test_only_a_request_that_cannot_wait_is_given_way() -> None:
    s = one_slot()
    arrive(s, "batch", BATCH, background=True)
    arrive(s, "batch2", NEXT, background=True)
    assert not must_yield(s.state, RequestId("batch"))
    arrive(s, "elsewhere", NEXT, model="another model")
    assert not must_yield(s.state, RequestId("batch"))
    arrive(s, "asked", ASKED)
    assert must_yield(s.state, RequestId("batch"))


def test_who_does_not_wait_keeps_its_slot() -> None:
    s = one_slot()
    arrive(s, "first", BATCH)
    arrive(s, "asked", ASKED)
    assert not must_yield(s.state, RequestId("first"))


def test_rest_of_an_answer_comes_before_the_rest_of_the_batch() -> None:
    """The state is wanted again: its slot is saved first, and it is restored before others."""
    s = one_slot(reuse_probability=0.0)
    assert sent(arrive(s, "batch", BATCH, background=True)) == ["batch"]
    arrive(s, "batch2", NEXT, background=True)
    arrive(s, "asked", ASKED)
    effects = ends_a_slice(s, "batch")
    assert [type(e).__name__ for e in effects if "Account" not in str(type(e))] == ["Save"]
    assert slot(s, A0).content.keep_s > 0
    arrive(s, "rest", [*range(1, 349)], background=True, goes_on=True)
    assert [w.request.id for w in s.state.queue.in_turn()] == ["rest", "batch2"]


def test_long_prompt_gives_way_between_two_chunks() -> None:
    s = one_slot(prefill_chunk_s=0.5, coalesce_above_s=0.1)
    assert prefills(arrive(s, "batch", run_of(2000, 1), background=True)) == ["batch"]
    arrive(s, "asked", ASKED)
    (save,) = prefilled(s, "batch", prompt_tokens=512)
    assert isinstance(save, Save)
    assert save.request == "asked"  # what was computed is saved, then its slot is taken
    (waiting,) = s.state.queue
    assert (waiting.request.id, waiting.request.goes_on) == ("batch", True)


def test_full_queue_turns_a_batch_away_and_never_its_rest() -> None:
    s = one_slot(queue=QueueLimits(max_requests=2))
    arrive(s, "first", BATCH)
    effects: list[Effect] = []
    for name, more in (("batch", {"background": True}), ("asked", {}), ("asked2", {})):
        effects = arrive(s, name, NEXT, **more)
    assert [e.request for e in effects if isinstance(e, Reject)] == ["batch"]
    effects = arrive(s, "rest", ASKED, background=True, goes_on=True)
    assert not [e for e in effects if isinstance(e, Reject)]
    assert len(s.state.queue) == 3


def test_rest_of_an_answer_has_no_deadline() -> None:
    s = one_slot(queue=QueueLimits(deadline_s=10.0))
    arrive(s, "first", BATCH)
    arrive(s, "rest", ASKED, background=True, goes_on=True)
    arrive(s, "asked", NEXT)
    late = [e.request for e in tick(s, 60.0) if isinstance(e, Reject)]
    assert late == ["asked"]


def test_slot_is_kept_where_nothing_is_won_by_giving_it_away() -> None:
    """Another slot is free, or the state cannot be saved."""
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    arrive(s, "batch", BATCH, background=True)
    arrive(s, "batch2", NEXT, background=True, slot_hint=0)
    s.state.queue.add(request("asked", ASKED), NOW)
    assert not must_yield(s.state, RequestId("batch"))
    without = scheduler(backend("a", 1, kv_dir=None), idle_save_after_s=None)
    arrive(without, "batch", BATCH, background=True)
    arrive(without, "asked", ASKED)
    assert not must_yield(without.state, RequestId("batch"))


def test_end_of_an_answer_keeps_nothing() -> None:
    s = one_slot()
    arrive(s, "batch", BATCH, background=True)
    finish(s, "batch", prompt_tokens=300, generated_tokens=48)
    assert slot(s, A0).content.keep_s == 0
