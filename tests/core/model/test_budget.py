"""Budgets of tenants: windows of a minute and a day, what counts, and what a refusal says."""

from math import inf
from typing import Any

import pytest

from router.base.types import Cost
from router.core.model.tenancy import Budget, Limits

NOON = 20_000 * 86_400.0 + 43_200


class Clock:
    now = NOON

    def __call__(self) -> float:
        return self.now


def budget(clock: Clock | None = None, **limits: Any) -> Budget:
    made = Budget(clock or Clock())
    made.limit({"alice": Limits(**limits)})
    return made


def test_a_tenant_without_a_limit_may_use_all() -> None:
    made = budget(tokens_per_day=50)
    made.spend("bob", Cost(computed=10**9))
    assert made.left("bob") == inf
    assert made.refusal("bob") is None
    assert budget(max_requests=1).left("alice") == inf


def test_a_step_of_the_wall_time_ends_no_minute() -> None:
    clock, steady = Clock(), Clock()
    made = Budget(clock, steady)
    made.limit({"alice": Limits(tokens_per_minute=30)})
    made.spend("alice", Cost(computed=30))
    clock.now += 90
    assert made.left("alice") == 0
    steady.now += 60
    assert made.left("alice") == 30


def test_windows_of_a_minute_and_a_day_end() -> None:
    clock = Clock()
    made = budget(clock, tokens_per_minute=30, tokens_per_day=100)
    made.spend("alice", Cost(computed=20, generated=5))
    assert made.left("alice") == 5
    clock.now += 60
    assert made.left("alice") == 30
    clock.now += 86_400
    assert made.left("alice") == 30


@pytest.mark.parametrize(
    ("limits", "said", "left_s"),
    [
        ({"tokens_per_minute": 30}, "30 tokens of this minute; try again in 60 s", 60),
        ({"tokens_per_day": 30}, "30 tokens of this day; try again in 43200 s", 43_200),
        ({"tokens_per_minute": 30, "tokens_per_day": 30}, "of this day", 43_200),
    ],
)
def test_a_refusal_says_when_the_window_ends(
    limits: dict[str, Any], said: str, left_s: float
) -> None:
    made = budget(**limits)
    made.spend("alice", Cost(computed=30))
    refusal = made.refusal("alice")
    assert refusal is not None
    assert said in str(refusal)
    assert refusal.left_s == left_s


@pytest.mark.parametrize(("reused", "left"), [(0.0, 90), (0.1, 80), (1.0, -10)])
def test_reused_tokens_count_what_the_operator_says(reused: float, left: float) -> None:
    made = budget(tokens_per_day=100, reused=reused)
    made.spend("alice", Cost(cached=100, computed=4, generated=6))
    assert made.left("alice") == left


def test_a_new_limit_counts_what_was_used_today() -> None:
    made = budget()
    made.costs_of_day = lambda day: {"alice": Cost(computed=30)} if day == 20_000 else {}
    made.limit({"alice": Limits(tokens_per_day=100)})
    assert made.left("alice") == 70
