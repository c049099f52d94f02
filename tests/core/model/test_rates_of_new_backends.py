"""Expected costs of a backend that no request has used yet."""

from typing import Any

import pytest

from tests.support.scheduler import fact
from tests.support.scheduler.build import A0, B0, OTHER_NS, B, backend, run_of, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, plan_of
from tests.support.scheduler.driven import Driven


def after_one_on_a(**b: Any) -> Driven:
    """Return a scheduler after one request on backend a; `b`: fields of backend b."""
    s = scheduler(backend("a", 1, prefill_s_per_token=0.01), idle_save_after_s=None)
    s.handle(fact.backend_up(backend("b", 1, **b)), NOW)
    assert plan_of(arrive(s, ids=run_of(20))).chosen.slot == A0
    over(s, "r", 0.2)
    return s


def over(s: Driven, name: str, prompt_s: float) -> None:
    """End a request that computed all 20 tokens of its prompt."""
    finish(s, name, prompt_tokens=20, cached_tokens=0, prompt_s=prompt_s)


def test_it_costs_what_others_of_its_kind_do() -> None:
    """b's probe was slower by chance; a's content must not be displaced for that."""
    s = after_one_on_a(prefill_s_per_token=0.015)

    assert plan_of(arrive(s, "r2", run_of(20, 2))).chosen.slot == B0


@pytest.mark.parametrize("b", [{"prefill_s_per_token": 0.025}, {"namespace": OTHER_NS}])
def test_of_another_kind_it_costs_what_its_probe_says(b: dict[str, Any]) -> None:
    s = after_one_on_a(**{"prefill_s_per_token": 0.015} | b)

    expected = b.get("prefill_s_per_token", 0.015)
    assert s.state.inventory.backends[B].rates.prefill_s(20) == pytest.approx(
        20 * expected, rel=0.01
    )


def test_once_used_it_costs_what_it_has_cost() -> None:
    s = after_one_on_a(prefill_s_per_token=0.015)
    arrive(s, "r2", run_of(20, 2))
    over(s, "r2", 0.6)
    arrive(s, "r3", run_of(20, 3))
    over(s, "r3", 0.2)

    assert s.state.inventory.backends[B].rates.prefill_s(20) == pytest.approx(0.6, rel=0.01)
