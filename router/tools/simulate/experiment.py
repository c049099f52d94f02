"""One run for each policy and budget over the same workload, and the results as data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

from msgspec import structs

from router.core.model.policy import PolicyName
from router.tools.simulate.accounting import Result, percentiles
from router.tools.simulate.requests import RequestSource
from router.tools.simulate.setup import Setup
from router.tools.simulate.simulator import Simulator

Told = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Experiment:
    """Runs to compare. `source` makes a fresh workload for each run."""

    setup: Setup
    source: Callable[[], RequestSource]
    policies: tuple[PolicyName, ...]
    budgets: tuple[int, ...]
    explain: bool = False

    def runs(self) -> Iterator[Setup]:
        """Yield the runs in order. A policy that never moves KV has no budget and one run."""
        for name in self.policies:
            policy = structs.replace(self.setup.policy, name=name)
            for budget_bytes in self.budgets if policy.name.moves_kv else (0,):
                yield replace(self.setup, policy=policy, budget_bytes=budget_bytes)

    def run(self, setup: Setup, told: Told = lambda _: None) -> Result:
        """Execute one run; `told` is called with the number of arrived requests now and then."""
        return _run(setup, self.source(), explain=self.explain, told=told)


def _run(setup: Setup, source: RequestSource, *, explain: bool, told: Told) -> Result:
    start, scale = perf_counter(), setup.scale
    simulator = Simulator(
        setup.scheduler_of(),
        setup.servers_of(),
        source,
        on_demand=setup.on_demand,
        progress=told,
    )
    meter = simulator.run()
    catalog = simulator.catalog
    servers = simulator.servers.values()
    reused = meter.reused_tokens
    on_servers = sum(server.computed_tokens for server in servers)
    return Result(
        policy=setup.policy.name.name.lower(),
        budget_bytes=setup.budget_bytes,
        requests=meter.arrived,
        answered=meter.answered,
        abandoned=meter.abandoned,
        rejected=_named(meter.rejected),
        plans=_named(meter.plans),
        prompt_tokens=meter.prompt_tokens * scale,
        oracle_tokens=meter.oracle_tokens * scale,
        resident_tokens=reused["resident"] * scale,
        snapshot_tokens=reused["snapshot"] * scale,
        copy_tokens=reused["copy"] * scale,
        computed_tokens=meter.computed_tokens * scale,
        wasted_tokens=(on_servers - meter.computed_tokens) * scale,
        generated_tokens=meter.generated_tokens * scale,
        ttft_s=percentiles(meter.ttft_s),
        waited_s=percentiles(meter.waited_s),
        saves=_named(meter.saves),
        restores=meter.restores,
        cuts=meter.cuts,
        saved_bytes=meter.saved_bytes,
        restored_bytes=meter.restored_bytes,
        cut_bytes=meter.cut_bytes,
        evictions=catalog.evicted,
        snapshots=len(catalog),
        snapshot_bytes=catalog.total_bytes,
        peak_bytes=meter.peak_bytes,
        misses=_named(meter.misses, scale) if explain else {},
        swaps=simulator.scheduler.state.inventory.servers.swaps,
        simulated_s=simulator.ended_at,
        wall_s=perf_counter() - start,
    )


def _named(counts: Mapping[str, int], scale: int = 1) -> dict[str, int]:
    """Return `counts` times `scale`, with plain string keys in alphabetical order."""
    return {str(name): n * scale for name, n in sorted(counts.items())}
