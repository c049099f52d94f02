"""Results of a simulation as tables and JSON."""

from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from router.core.model.policy import UNLIMITED, PolicyName
from router.tools.simulate import report
from router.tools.simulate.accounting import Result
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.hardware import PRESETS
from router.tools.simulate.setup import Setup
from router.tools.simulate.workload import WORKLOADS, Workload


@pytest.fixture(scope="module")
def results() -> list[Result]:
    made = Experiment(
        Setup(PRESETS["gpu-8b"], servers=1, slots=1),
        lambda: Workload(WORKLOADS["chat"], 30, 8, 32_768, 1),
        (PolicyName.PREFER_IDLE, PolicyName.STICKY),
        (0, UNLIMITED),
        explain=True,
    )
    return [made.run(setup) for setup in made.runs()]


def test_refusals_are_told(results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    refused = replace(results[0], rejected=Counter(QueueFullError=3))
    report.show(Console(), [refused])
    assert "refused 3 x QueueFullError" in capsys.readouterr().out
