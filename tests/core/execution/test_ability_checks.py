"""What a backend was believed to do is taken back when its counts show otherwise."""

from dataclasses import dataclass

import pytest

from router.base.tokens import count, head, join
from router.base.types import BackendInfo, MemoryKind, Outcome, Reported, RequestId, Source
from router.core.execution.resident_updates import NO_EXTENSION, NO_USE_OF_STATES, RENDERS_OTHERWISE
from router.core.model.effects import Dispatch, Effect, Limited, Prefill
from router.core.model.slots import Content, Resident
from router.core.model.tuning import TUNING
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A,
    backend,
    request,
    run_of,
    scheduler,
    snapshot,
    tokens,
)
from tests.support.scheduler.drive import NOW, arrive, finish, plan_of, prefilled, restored
from tests.support.scheduler.driven import Driven

LONG = run_of(600)
NEXT = join([LONG, run_of(60, 2)])
HYBRID = MemoryKind.HYBRID


def limits(effects: list[Effect]) -> list[Limited]:
    return [effect for effect in effects if isinstance(effect, Limited)]


def info(s: Driven) -> BackendInfo:
    return s.state.inventory.backends[A].info


def computed_ahead(s: Driven, cached: int) -> list[Effect]:
    """Let the router compute a prompt first, and report so many cached tokens for the request."""
    effects = arrive(s, ids=LONG)
    assert [e.tokens for e in effects if isinstance(e, Prefill)] == [head(LONG, 599)]
    prefilled(s, cached_tokens=0, prompt_tokens=599, prompt_s=1.0)
    return finish(s, cached_tokens=cached, prompt_tokens=600, generated_tokens=1)


def test_a_prompt_computed_twice_is_not_computed_ahead_again() -> None:
    s = scheduler(backend(n_slots=1))

    effects = computed_ahead(s, cached=0)

    assert limits(effects) == [Limited(A, NO_EXTENSION)]
    assert s.state.inventory.backends[A].limited == NO_EXTENSION
    again = arrive(s, "r2", run_of(700, 3))
    assert not [e for e in again if isinstance(e, Prefill)]
    assert [type(e) for e in again if isinstance(e, Dispatch)] == [Dispatch]


def test_a_prompt_of_other_tokens_says_nothing_of_the_backend() -> None:
    """The template was rendered wrongly: the backend computed another prompt."""
    s = scheduler(backend(n_slots=1))
    arrive(s, ids=LONG)
    prefilled(s, cached_tokens=0, prompt_tokens=599, prompt_s=1.0)

    assert limits(finish(s, cached_tokens=0, prompt_tokens=612, generated_tokens=1)) == []
    assert info(s).extends


def test_a_prompt_that_was_misread_is_taken_back() -> None:
    """It had as many tokens; that they were others is found a moment later."""
    s = scheduler(backend(n_slots=1))
    computed_ahead(s, cached=0)
    assert not info(s).extends

    s.handle(fact.misread(A, False), NOW)
    assert info(s).extends
    assert s.state.inventory.backends[A].limited == ""


def test_a_backend_that_renders_otherwise_computes_nothing_ahead() -> None:
    """Whatever its counts show later; a new process is another matter."""
    s = scheduler(backend(n_slots=1))
    for _ in range(2):
        s.handle(fact.misread(A, always=True), NOW)
        assert s.state.inventory.backends[A].limited == RENDERS_OTHERWISE
    arrive(s, "r", LONG)
    finish(s, "r", cached_tokens=0, prompt_tokens=600, generated_tokens=1)
    arrive(s, "r2", run_of(610))
    finish(s, "r2", cached_tokens=600, prompt_tokens=610, generated_tokens=1)
    assert not info(s).extends
    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.backend_up(backend(n_slots=1)), NOW)
    assert info(s).extends


def test_a_prompt_is_computed_ahead_again_after_a_while() -> None:
    """What was lost may have been another client's doing. Each loss doubles the time."""
    s = scheduler(backend(n_slots=1))
    computed_ahead(s, cached=0)
    for losses, wait_s in ((1, TUNING.extends_again_s), (2, 2 * TUNING.extends_again_s)):
        assert s.state.inventory.backends[A].lost_prefills == losses
        assert s.state.inventory.backends[A].extends_again_at == NOW + wait_s
        s.state.inventory.backends[A].extends_again_at = NOW
        arrive(s, "r2", run_of(700, 3))
        finish(s, "r2", cached_tokens=0, prompt_tokens=700, generated_tokens=1)
        assert info(s).extends
        assert s.state.inventory.backends[A].limited == ""

        s.state.inventory.slots[A0].hold(Content(Resident()))
        computed_ahead(s, cached=0)
        assert not info(s).extends


def test_a_new_probe_is_believed_more_than_an_old_loss() -> None:
    s = scheduler(backend(n_slots=1))
    computed_ahead(s, cached=0)
    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.backend_up(backend(n_slots=1, extends=False)), NOW)

    later = NOW + 2 * TUNING.extends_again_s
    s.handle(fact.arrived(request("r2", run_of(700, 3))), later)
    said = Reported(cached_tokens=0, prompt_tokens=700, generated_tokens=1)
    s.handle(fact.finished(RequestId("r2"), Outcome.OK, said), later)

    assert not info(s).extends


@pytest.mark.parametrize("cached", [599, 590, 400])
def test_a_prompt_that_is_reused_changes_nothing(cached: int) -> None:
    """A window that is not outgrown resumes at a checkpoint, a few tokens before its end."""
    s = scheduler(backend(n_slots=1))

    assert limits(computed_ahead(s, cached)) == []
    assert info(s).extends


def test_a_slot_that_extends_after_all_is_believed_again() -> None:
    s = scheduler(backend(n_slots=1, extends=False))
    s.state.inventory.slots[A0].hold(Content(Resident(LONG)))
    s.state.inventory.backends[A].limited = NO_EXTENSION

    plan = plan_of(arrive(s, ids=NEXT))
    finish(s, cached_tokens=600, prompt_tokens=660, generated_tokens=1)

    assert (plan.chosen.source, plan.prefill_first) == (Source.COLD, False)
    assert info(s).extends
    assert s.state.inventory.backends[A].limited == ""


@dataclass(frozen=True)
class Back:
    """A slot with checkpoints, and a prompt that goes back to one of them."""

    shared: int
    cached: int
    left: int  # checkpoints that are believed afterwards


@pytest.mark.parametrize(
    "back",
    [
        Back(shared=300, cached=0, left=1),  # the last of two is claimed no more
        Back(shared=300, cached=296, left=32),
        Back(shared=600, cached=0, left=0),
        Back(shared=100, cached=0, left=32),  # nothing was claimed
    ],
)
def test_a_checkpoint_that_is_not_there(back: Back) -> None:
    s = scheduler(backend(n_slots=1, memory_kind=HYBRID, kv_dir=None))
    s.state.inventory.slots[A0].hold(Content(Resident(LONG, checkpoints=(296, 596))))
    other = join([head(LONG, back.shared), run_of(20, 5)]) if back.shared < 600 else LONG

    arrive(s, ids=other)
    finish(s, cached_tokens=back.cached, prompt_tokens=count(other), generated_tokens=1)

    assert info(s).checkpoints == back.left


def test_restored_states_that_are_not_used() -> None:
    """One may be another client's doing; two in a row are the server's."""
    s = scheduler(
        backend(n_slots=1),
        snapshots=[snapshot("s", LONG)],
        coalesce_above_s=None,
        reuse_probability=0.0,
    )
    effects: list[Effect] = []
    for name in ("r", "r2"):
        assert info(s).kv_dir is not None
        assert arrive(s, name, NEXT)
        restored(s, 600, name)
        effects = finish(s, name, cached_tokens=0, prompt_tokens=660, generated_tokens=0)
        s.state.inventory.slots[A0].hold(Content(Resident(tokens(9))))

    assert limits(effects) == [Limited(A, NO_USE_OF_STATES)]
    assert info(s).kv_dir is None
    assert plan_of(arrive(s, "r3", NEXT)).chosen.source is Source.COLD
