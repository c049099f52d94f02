"""Room for the answer: a slot that can hold it, where there is one."""

import pytest

from router.core.model.effects import Dispatch
from router.core.model.rates import Mean
from router.core.model.slots import Content, Resident
from router.core.planning.start_candidates import PricingContext
from tests.support.scheduler.build import A0, B0, A, B, backend, busy, request, run_of, scheduler
from tests.support.scheduler.drive import NOW, arrive, plan_of

SMALL, LARGE = backend("a", 1, n_ctx=1024), backend("b", 1, n_ctx=4096)
PROMPT = run_of(600)


def test_an_idle_slot_with_room_for_the_whole_answer_is_taken() -> None:
    """Even if another slot holds the prompt."""
    s = scheduler(SMALL, LARGE, coalesce_above_s=None)
    s.state.inventory.slots[A0].hold(Content(Resident(PROMPT)))

    plan = plan_of(arrive(s, ids=PROMPT, max_new_tokens=700, streams=False))

    assert plan.chosen.slot == B0


def test_a_short_answer_goes_to_what_is_cheapest() -> None:
    s = scheduler(SMALL, LARGE, coalesce_above_s=None)
    s.state.inventory.slots[A0].hold(Content(Resident(PROMPT)))

    plan = plan_of(arrive(s, ids=PROMPT, max_new_tokens=100))

    assert plan.chosen.slot == A0


@pytest.mark.parametrize(("until_s", "waits"), [(1.0, True), (1000.0, False)])
def test_a_busy_slot_with_room_has_a_price(until_s: float, waits: bool) -> None:
    s = scheduler(SMALL, LARGE, coalesce_above_s=None)
    busy(s.state.inventory, B0, until=NOW + until_s)
    s.state.inventory.backends[A].rates.output_tokens = Mean(1000.0)

    effects = arrive(s, ids=PROMPT, max_new_tokens=700)

    assert bool([e for e in effects if isinstance(e, Dispatch)]) is not waits


def test_unlimited_answer_prefers_the_larger_slot() -> None:
    s = scheduler(SMALL, LARGE, coalesce_above_s=None)

    assert plan_of(arrive(s, ids=PROMPT)).chosen.slot == B0


def test_a_slot_that_is_long_enough_costs_nothing() -> None:
    inventory = scheduler(SMALL, LARGE).state.inventory
    context = PricingContext(request("r", PROMPT), inventory, NOW)

    assert context.cut_off_s(inventory.backends[B]) == 0.0
    assert context.cut_off_s(inventory.backends[A]) > 0.0
