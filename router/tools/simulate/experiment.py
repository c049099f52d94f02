"""One run for each policy and budget over the same workload, and the results as data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter

from msgspec import structs

from router.core.model.policy import PolicyName
from router.tools.simulate.accounting import Result
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
        start = perf_counter()
        simulator = Simulator(
            setup.scheduler_of(),
            setup.servers_of(),
            self.source(),
            on_demand=setup.on_demand,
            progress=told,
        )
        made, catalog = simulator.run(), simulator.catalog
        made.policy, made.budget_bytes = setup.policy.name.name.lower(), setup.budget_bytes
        on_servers = sum(server.computed_tokens for server in simulator.servers.values())
        made.wasted_tokens = on_servers - made.computed_tokens
        made.evictions, made.snapshots = catalog.evicted, len(catalog)
        made.snapshot_bytes = catalog.total_bytes
        if not self.explain:
            made.misses.clear()
        made.swaps = simulator.scheduler.state.inventory.servers.swaps
        made.scale(setup.scale)
        made.simulated_s, made.wall_s = simulator.ended_at, perf_counter() - start
        return made
