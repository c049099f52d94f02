"""Simulated hosts fetch states from each other, where the network is fast enough for it."""

from dataclasses import replace

import pytest

from router.base.types import MemoryKind, Request
from router.core.model.plan import Handout
from router.core.model.policy import PolicyName
from router.tools.simulate.accounting import Result
from router.tools.simulate.blobs import BlobSettings
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.hardware import PRESETS
from router.tools.simulate.hosts import SimulatedHost
from router.tools.simulate.setup import Setup
from router.tools.simulate.workload import WORKLOADS, Workload

GIB = 1024**3
FOUR = Setup(PRESETS["gpu-8b"], servers=1, slots=4, hosts=4, budget_bytes=32 * GIB)
FAST = replace(FOUR, link_bytes_per_s=1.25e9)


def result(setup: Setup, requests: int = 400) -> Result:
    made = Experiment(
        setup,
        lambda: Workload(WORKLOADS["agent"], requests, 16, setup.n_ctx, 1, ()),
        (PolicyName.PREFER_IDLE,),
        (setup.budget_bytes,),
    )
    (run,) = made.runs()
    return made.run(run)


def test_a_fast_network_spares_computing() -> None:
    without, fast = result(FOUR), result(FAST)

    assert without.fetches == without.fetched_bytes == 0
    assert fast.fetches >= 5
    assert fast.computed_tokens < without.computed_tokens
    assert fast.answered + fast.abandoned == fast.requests == 400
    assert fast.rejected == {}


def test_nothing_is_fetched_that_is_computed_sooner() -> None:
    """128 KiB a token at 2,500 tokens/s are 328 MB/s; a slow link carries less."""
    slow = result(replace(FOUR, link_bytes_per_s=12.5e6))

    assert slow.fetches == 0


def test_only_missing_bytes_go_over_the_network() -> None:
    """A state of 32,768 tokens has 4 GiB; most fetches are of beginnings that many share."""
    fast = result(FAST)

    assert 0 < fast.fetched_bytes < fast.fetches * 2 * GIB


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT])
def test_other_memory_kinds_are_fetched_whole(kind: MemoryKind) -> None:
    found = result(replace(FAST, memory_kind=kind))

    assert found.fetches > 0
    assert found.answered + found.abandoned == found.requests


def test_with_blobs_and_a_fetch_the_same_run_gives_the_same_result() -> None:
    setup = replace(FAST, blobs=BlobSettings(8 * GIB, 60.0, float("inf")))
    first, second = (result(setup) for _ in range(2))

    assert replace(first, wall_s=0.0) == replace(second, wall_s=0.0)
    assert first.fetches > 0
    assert first.written_bytes is not None
    assert 0 < first.written_bytes < first.saved_bytes / 2


def test_a_fetch_whose_state_is_gone_lets_the_request_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, gone = SimulatedHost.handout, list[Request]()

    def handout(
        self: SimulatedHost, request: Request, now: float, *, saved: bool = False
    ) -> Handout | None:
        if saved:
            gone.append(request)
            return None
        return real(self, request, now)

    monkeypatch.setattr(SimulatedHost, "handout", handout)
    found = result(FAST)

    assert gone
    assert found.fetches == 0
    assert found.answered + found.abandoned == found.requests
