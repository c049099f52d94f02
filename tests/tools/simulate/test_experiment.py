"""Runs over policies and budgets, and their numbers."""

from functools import partial
from statistics import median

import pytest

from router.core.model.policy import UNLIMITED, PolicyName
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.hardware import PRESETS
from router.tools.simulate.setup import Setup
from router.tools.simulate.trace import TraceRow, TraceWorkload

LINES = [
    TraceRow(20_000.0 * n, 2048, 80, (n % 3, 10 + n % 3, 20 + n % 3, 30 + n))  # three in turn
    for n in range(12)
]


def experiment(scale: int = 1, **more: object) -> Experiment:
    given: dict[str, object] = {
        "setup": Setup(PRESETS["gpu-8b"], servers=1, slots=2, scale=scale),
        "source": partial(TraceWorkload, LINES, scale),
        "policies": (PolicyName.PREFER_IDLE, PolicyName.ROUND_ROBIN),
        "budgets": (0, UNLIMITED),
    }
    return Experiment(**(given | more))  # type: ignore[arg-type]


def test_shares() -> None:
    """Three of four blocks were there before, in each prompt but the first three."""
    none, all_, plain = (experiment().run(setup) for setup in experiment().runs())
    assert all_.prompt_tokens == 12 * 2048
    assert all_.oracle_tokens == 9 * 1536
    assert all_.reused_tokens == all_.oracle_tokens
    assert none.reused_share < all_.reused_share == all_.oracle_share
    assert plain.reused_share == 0.0  # two slots in turn for three prompts in turn
    for result in (none, all_, plain):
        assert result.reused_tokens + result.computed_tokens == result.prompt_tokens
        assert result.wasted_tokens == 0


def test_scale_changes_little() -> None:
    """Tokens and seconds are those of the trace, however many tokens one stands for.

    2,048 new tokens in each prompt: a batch of fewer than 128 has another price, at any scale.
    """
    lines = [
        TraceRow(20_000.0 * n, 8192, 80, (*range(100 * (n % 3), 100 * (n % 3) + 12), *own))
        for n in range(12)
        for own in [range(1000 * (n + 1), 1000 * (n + 1) + 4)]
    ]
    exact, coarse = (
        made.run(next(s for s in made.runs() if s.budget_bytes == UNLIMITED))
        for made in (
            experiment(scale, source=partial(TraceWorkload, lines, scale)) for scale in (1, 8)
        )
    )
    assert coarse.prompt_tokens == exact.prompt_tokens
    assert coarse.reused_tokens == exact.reused_tokens
    assert median(coarse.ttft_s) == pytest.approx(median(exact.ttft_s), rel=0.05)
    assert coarse.saved_bytes == pytest.approx(exact.saved_bytes, rel=0.05)
