"""Backends that are not managed: requests go to the server that had the prompt, and no KV moves."""

import pytest
from msgspec.structs import replace

from router.base.tokens import join, pack
from router.base.types import BackendInfo, Outcome, Reported, RequestId, Source
from router.core.model import effects as ef
from router.core.model.effects import Dispatch
from tests.support.scheduler import fact
from tests.support.scheduler.build import A, B, backend, request, run_of, scheduler

LONG = run_of(1000)
ONE = replace(backend("a", 1), keeps_idle_slots=False)
TWO = replace(backend("b", 1), keeps_idle_slots=False)


def sent(effects: list[ef.Effect]) -> Dispatch:
    (effect,) = [effect for effect in effects if isinstance(effect, Dispatch)]
    return effect


def ended(name: str) -> fact.Fact:
    return fact.finished(RequestId(name), Outcome.OK, Reported(1000, 0, 1.0, 8, 0.1))


@pytest.mark.parametrize("asked", [{}, {"pinnable": False}], ids=["chat", "messages"])
def test_nothing_is_pinned_prepared_or_saved(asked: dict[str, bool]) -> None:
    made = scheduler(ONE)
    started = made.handle(fact.arrived(request("r", LONG, **asked)), 0.0)

    assert [type(effect) for effect in started] == [Dispatch]
    assert not sent(started).pin
    assert not sent(started).confirm
    over = made.handle(ended("r"), 1.0)
    assert [type(effect) for effect in over] == [ef.Account]
    assert made.handle(fact.tick(), 100.0) == []


def test_the_server_that_had_the_prompt_gets_its_next_turn() -> None:
    made = scheduler(ONE, TWO)
    first = sent(made.handle(fact.arrived(request("r0", LONG)), 0.0)).lease.slot.backend
    other = sent(made.handle(fact.arrived(request("r1", run_of(1000, 7))), 0.0)).lease.slot.backend
    assert {first, other} == {A, B}
    for name in ("r0", "r1"):
        made.handle(ended(name), 1.0)

    for name, prompt, home in (("r2", run_of(1000, 7), other), ("r3", LONG, first)):
        again = sent(made.handle(fact.arrived(request(name, join([prompt, pack([5, 6])]))), 2.0))
        assert again.lease.slot.backend == home
        assert (again.plan.chosen.source, again.plan.chosen.reused_tokens) == (Source.NONE, 1000)
        made.handle(ended(name), 3.0)


def test_it_waits_for_its_server_if_that_is_cheaper() -> None:
    """The prompt takes 10 s on the idle server, and the answer ahead of it ends sooner."""
    made = scheduler(ONE, TWO)
    home = sent(made.handle(fact.arrived(request("r0", LONG)), 0.0)).lease.slot.backend
    made.handle(ended("r0"), 1.0)
    made.handle(fact.arrived(request("r1", join([LONG, pack([3])]), max_new_tokens=1)), 1.0)

    assert made.handle(fact.arrived(request("r2", join([LONG, pack([5, 6])]))), 1.0) == []
    assert sent(made.handle(ended("r1"), 2.0)).lease.slot.backend == home


def test_what_a_restarted_server_was_sent_is_gone() -> None:
    made = scheduler(ONE)
    made.handle(fact.arrived(request("r0", LONG)), 0.0)
    made.handle(ended("r0"), 1.0)
    made.handle(fact.backend_down(A), 2.0)
    made.handle(fact.backend_up(ONE), 3.0)

    again = sent(made.handle(fact.arrived(request("r1", LONG)), 4.0))
    assert again.plan.chosen.reused_tokens == 0


def test_tenants_do_not_learn_of_each_other() -> None:
    """The place of a request depends on what its own tenant sent."""
    made = scheduler(ONE, keeps_apart=True)
    made.handle(fact.arrived(request("r0", LONG, tenant="x")), 0.0)
    made.handle(ended("r0"), 1.0)

    asked = sent(made.handle(fact.arrived(request("r1", LONG, tenant="y")), 2.0))
    assert asked.plan.chosen.reused_tokens == 0


def _embedding() -> BackendInfo:
    return replace(backend("a", 1), generates=False)


def test_of_a_server_without_kv_nothing_is_remembered() -> None:
    made = scheduler(_embedding())
    made.handle(fact.arrived(request("r0", LONG)), 0.0)
    made.handle(ended("r0"), 1.0)

    assert not any(there.sent for there in made.state.inventory.up.values())
