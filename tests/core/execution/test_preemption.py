"""Requests that can wait give their slots to those that cannot, at the next boundary."""

from typing import Any

from router.base.types import Outcome, Reported, RequestId
from router.core.execution.preemption import must_yield
from router.core.model import events as ev
from router.core.model.effects import Dispatch, Effect, Prefill, Save
from router.core.scheduler import Scheduler
from tests.support.scheduler.build import A0, backend, run_of, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, prefilled, slot

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


def test_last_to_be_turned_away_is_what_was_served_before() -> None:
    s = one_slot()
    arrive(s, "first", BATCH)
    arrive(s, "new", NEXT, background=True)
    arrive(s, "rest", ASKED, background=True, goes_on=True)
    assert s.state.queue.last() == "new"


def test_end_of_an_answer_keeps_nothing() -> None:
    s = one_slot()
    arrive(s, "batch", BATCH, background=True)
    finish(s, "batch", prompt_tokens=300, generated_tokens=48)
    assert slot(s, A0).content.keep_s == 0
