"""Statistics of the scheduler's current state."""

from collections.abc import Iterable
from math import inf

from router.base.types import BackendId, BackendStats, ServerStats, Stats
from router.core.execution.state import State
from router.core.model.policy import UNLIMITED
from router.core.model.slots import Phase


def stats_of(state: State, backends: Iterable[BackendId]) -> Stats:
    """Return the statistics. `backends` are all backends, in use or not."""
    catalog = state.inventory.catalog
    limits = catalog.limits
    return Stats(
        backends=tuple(_backend(state, backend) for backend in backends),
        queue_depth=len(state.queue),
        snapshots=len(catalog),
        snapshot_bytes=catalog.total_bytes,
        snapshot_tokens=catalog.total_tokens,
        evicted=catalog.evicted,
        protected_bytes=catalog.protection.total_bytes,
        snapshot_bytes_limit=inf if limits.max_bytes == UNLIMITED else limits.max_bytes,
        snapshot_tokens_limit=inf if limits.max_tokens == UNLIMITED else limits.max_tokens,
        servers=tuple(
            ServerStats(one.name, one.phase, state.waiting_for(one), one.load_s.value)
            for one in state.inventory.servers
        ),
        server_swaps=state.inventory.servers.swaps,
    )


def _backend(state: State, backend: BackendId) -> BackendStats:
    slots, known = state.inventory.slots.of(backend), state.inventory.backends.get(backend)
    return BackendStats(
        backend,
        backend in state.inventory.up,
        {phase: sum(slot.phase is phase for slot in slots) for phase in Phase},
        resident_tokens=sum(len(slot.content.resident) for slot in slots),
        speeds=known.rates.speeds if known else None,
        stalled_s=known.stalled_s if known else {},
    )
