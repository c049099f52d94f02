"""A session decides only where prompts go that the router cannot read."""

import pytest

from router.base.types import Outcome, Prompt
from router.core.model.slots import Content, Resident
from router.core.planning.planner import plan
from tests.support.scheduler.build import A1, A, B, backend, request, run_of, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, plan_of, slot
from tests.support.scheduler.driven import Driven

UNREAD = Prompt(unknown="only the server reads it")
LONG = run_of(3000)


@pytest.fixture
def s() -> Driven:
    return scheduler(backend("a", 2), backend("b", 2), idle_save_after_s=None)


def served(s: Driven, name: str, **more: object) -> str:
    """Serve a request at once; return its backend."""
    backend = plan_of(arrive(s, name, **more)).chosen.slot.backend
    finish(s, name, Outcome.OK)
    return backend


def test_unread_prompt_goes_where_its_session_was(s: Driven) -> None:
    assert served(s, "r1", prompt=UNREAD, session="s", avoid=frozenset({A})) == B
    assert served(s, "r2", prompt=UNREAD) == A
    assert served(s, "r3", prompt=UNREAD, session="s") == B


def test_session_does_not_wait_for_a_busy_backend(s: Driven) -> None:
    served(s, "r1", prompt=UNREAD, session="s", avoid=frozenset({A}))
    arrive(s, "long", avoid=frozenset({A}))
    assert served(s, "r2", prompt=UNREAD, session="s") == A


def test_tokens_beat_a_session_that_is_wrong(s: Driven) -> None:
    served(s, "r1", prompt=UNREAD, session="s", avoid=frozenset({A}))
    slot(s, A1).hold(Content(Resident(LONG)))

    made = plan(request(ids=LONG + run_of(9), session="s"), s.state.inventory, NOW)
    assert made is not None
    assert (made.chosen.slot, made.chosen.reused_tokens) == (A1, 3000)


def test_sessions_are_forgotten_with_their_backend(s: Driven) -> None:
    served(s, "r1", prompt=UNREAD, session="s", avoid=frozenset({A}))
    s.state.inventory.forget(B)
    assert s.state.inventory.homes == {}
