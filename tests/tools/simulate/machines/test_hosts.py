"""Simulated hosts: requests go where their tokens are, and nothing is lost on the way."""

from dataclasses import replace

import pytest

from router.core.model.policy import PolicyName
from router.tools.simulate.accounting import Result
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.hardware import PRESETS
from router.tools.simulate.requests import RequestSource
from router.tools.simulate.setup import Setup
from router.tools.simulate.workload import WORKLOADS, Workload

SETUP = Setup(PRESETS["gpu-8b"], servers=1, slots=4)


def workload() -> RequestSource:
    return Workload(WORKLOADS["chat"], 300, 24, SETUP.n_ctx, 1, ())


def result(setup: Setup) -> Result:
    experiment = Experiment(setup, workload, (PolicyName.PREFER_IDLE,), (setup.budget_bytes,))
    (run,) = experiment.runs()
    return experiment.run(run)


def reuse(found: Result) -> float:
    reused = found.resident_tokens + found.snapshot_tokens + found.copy_tokens
    return reused / found.oracle_tokens


def test_several_hosts_reuse_nearly_what_one_does() -> None:
    one = result(replace(SETUP, servers=4))
    four = result(replace(SETUP, hosts=4))

    assert one.forwarded == 0
    assert four.forwarded > four.requests / 4
    assert four.answered + four.abandoned == four.requests
    assert reuse(four) > 0.9 * reuse(one)


def test_without_asking_a_conversation_is_computed_at_every_door(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = result(replace(SETUP, hosts=4))
    monkeypatch.setattr("router.tools.simulate.machines.hosts.is_worth_asking", lambda *_: False)
    alone = result(replace(SETUP, hosts=4))

    assert alone.forwarded == 0
    assert reuse(alone) < 0.9 * reuse(asked)


def test_the_same_run_gives_the_same_result() -> None:
    first, second = (result(replace(SETUP, hosts=3)) for _ in range(2))

    assert replace(first, wall_s=0.0) == replace(second, wall_s=0.0)
