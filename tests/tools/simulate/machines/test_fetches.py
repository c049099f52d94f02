"""Simulated hosts fetch states from each other, where the network is fast enough for it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import pytest

from router.base.tokens import Tokens, count, head, join, pack
from router.base.types import (
    MemoryKind,
    Namespace,
    Prompt,
    Request,
    RequestId,
    Snapshot,
    SnapshotId,
)
from router.core.model import events as ev
from router.core.model.plan import Handout
from router.core.model.policy import PolicyName
from router.tools.simulate.accounting import Meter, Result
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.blobs import SplitSettings
from router.tools.simulate.machines.fetches import Fetches
from router.tools.simulate.machines.hardware import PRESETS
from router.tools.simulate.machines.hosts import Fetch, SimulatedHost
from router.tools.simulate.setup import Setup
from router.tools.simulate.simulator import KV_DIR
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
    without, fast = (result(setup, 1000) for setup in (FOUR, FAST))

    assert without.fetches == without.fetched_bytes == 0
    assert fast.fetches >= 5
    missed = [found.oracle_tokens - found.reused_tokens for found in (without, fast)]
    assert missed[1] < 0.9 * missed[0]
    assert fast.answered + fast.abandoned == fast.requests == 1000
    assert fast.rejected == {}


def test_nothing_is_fetched_that_is_computed_sooner() -> None:
    """128 KiB a token at 2,500 tokens/s are 328 MB/s; a slow link carries less."""
    slow = result(replace(FOUR, link_bytes_per_s=12.5e6))

    assert slow.fetches == 0


@dataclass
class Two:
    """A host that holds states, one that fetches them, and the time of both."""

    now: float = 0.0
    meter: Meter = field(default_factory=Meter)
    hosts: list[SimulatedHost] = field(default_factory=FAST.hosts_of)
    heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    made: int = 0

    def __post_init__(self) -> None:
        for host in self.hosts:
            self.feed(host, ev.BackendUp(host.servers[0].info))
        self.fetches = Fetches(self.meter, lambda: self.now, self.at, self.feed, self.copy)

    def at(self, time: float, action: Callable[[], None]) -> None:
        self.made += 1
        heappush(self.heap, (time, self.made, action))

    def feed(self, host: SimulatedHost, event: ev.Event) -> None:
        host.scheduler.handle(event, self.now)

    def copy(self, host: SimulatedHost, snapshot: Snapshot, n_tokens: int) -> Snapshot:
        return self.snapshot(head(snapshot.tokens, n_tokens))

    def snapshot(self, tokens: Tokens) -> Snapshot:
        self.made += 1
        size_bytes = count(tokens) * FAST.hardware.bytes_per_token
        name = SnapshotId(f"s{self.made}")
        return Snapshot(name, Namespace("simulated"), KV_DIR, tokens, size_bytes)

    def holds(self, host: SimulatedHost, tokens: Tokens) -> None:
        self.feed(host, ev.SnapshotsFound((self.snapshot(tokens),), MemoryKind.FULL))

    def fetch(self, tokens: Tokens) -> list[float]:
        """Let the second host fetch; the list gets the time at which it is there."""
        holder, host, over = self.hosts[0], self.hosts[1], list[float]()
        prompt = Prompt(tokens=join([tokens, pack([7] * 20)]))
        request = Request(RequestId(f"r{self.made}"), prompt)
        handout = holder.handout(request, self.now)
        assert handout is not None
        self.fetches.begin(host, Fetch(holder, handout), request, lambda: over.append(self.now))
        return over

    def run(self) -> None:
        while self.heap:
            self.now, _, action = heappop(self.heap)
            action()


def text(seed: int, n: int) -> Tokens:
    return pack(range(seed * 100_000, seed * 100_000 + n))


def test_a_host_sends_one_state_after_the_other() -> None:
    two = Two()
    size_bytes = 4000 * FAST.hardware.bytes_per_token
    for seed in (1, 2):
        two.holds(two.hosts[0], text(seed, 4000))
    first, second, same = (two.fetch(text(seed, 4000)) for seed in (1, 2, 2))
    two.run()
    assert second[0] - first[0] == pytest.approx(size_bytes / FAST.link_bytes_per_s)
    assert same == second, "it waits for the same bytes"
    assert two.meter.fetches == 2
    assert two.meter.fetched_bytes == 2 * size_bytes
    assert two.hosts[1].view.store.n_snapshots == 2
    assert two.hosts[0].n_sending == 0


def test_only_missing_bytes_go_over_the_network() -> None:
    two = Two()
    two.holds(two.hosts[0], text(1, 4000))
    two.holds(two.hosts[1], text(1, 3000))
    two.fetch(text(1, 4000))
    two.run()
    assert two.meter.fetched_bytes == 1000 * FAST.hardware.bytes_per_token


@pytest.mark.parametrize("kind", [MemoryKind.HYBRID, MemoryKind.RECURRENT])
def test_other_memory_kinds_are_fetched_whole(kind: MemoryKind) -> None:
    found = result(replace(FAST, memory_kind=kind))

    assert found.fetches > 0
    assert found.answered + found.abandoned == found.requests


def test_the_same_run_gives_the_same_result() -> None:
    setup = replace(FAST, blobs=SplitSettings(8 * GIB, 60.0, float("inf")))
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
