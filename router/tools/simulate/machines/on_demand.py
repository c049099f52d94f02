"""Simulated servers on demand: one for each model, with times for a load and a stop."""

from collections.abc import Sequence
from dataclasses import dataclass

from router.base.types import BackendId
from router.core.model.servers import ServerLimit, ServerSpec


@dataclass(frozen=True, slots=True)
class OnDemand:
    """Servers on demand, one for each model: `loaded` at a time; loads and stops in seconds."""

    loaded: int
    load_s: float
    stop_s: float
    max_wait_s: float

    def configured(self, names: Sequence[str]) -> tuple[list[ServerSpec], list[ServerLimit]]:
        """Return the servers, and what of them may be loaded together."""
        specs = [ServerSpec(BackendId(name), (name,), max_wait_s=self.max_wait_s) for name in names]
        return specs, [ServerLimit(frozenset(names), self.loaded)]
