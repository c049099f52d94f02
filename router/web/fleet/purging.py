"""Delete all that hosts and the cold tier keep of one tenant, and say who could not be reached."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from secrets import token_hex

from msgspec import Struct

from router.base.errors import BackendError, KvError
from router.base.tasks import spawn
from router.base.types import Snapshot, Tenant
from router.engine.engine import Engine
from router.hosts.peer import Peer
from router.store.cold.tier import ColdTier
from router.store.store import KvStore
from router.web.fleet.cold import NAME

_LIMIT_S = 60.0  # for one host


class Reached(Struct, frozen=True):
    """One holder that was told: how much it deletes, or the problem. Objects in the cold tier."""

    holder: str
    count: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Purging:
    """Purges of this host."""

    engine: Engine
    store: KvStore
    memories: Sequence[Callable[[str], None]]  # what else of a tenant is kept in memory
    cold: ColdTier | None
    peers: Callable[[], Iterable[Peer]]
    stop_fetches: Callable[[Tenant], None]

    async def here(self, tenant: Tenant) -> Reached:
        """Delete the snapshots of a tenant on this host, and what is known of its prompts.

        Those in use are deleted after their last use. What idle slots have of it is neither saved
        nor reused.
        """
        self.stop_fetches(tenant)
        count = await self.engine.purge_tenant(tenant)
        problems = await self.store.purge(tenant, token_hex(16))
        for forget in self.memories:
            forget(tenant)
        told = "; ".join(f"{kv_dir}: {why}" for kv_dir, why in problems.items())
        return Reached("this host", count, told or None)

    async def elsewhere(self, tenant: Tenant) -> list[Reached]:
        """Delete what the other hosts and the cold tier have of a tenant.

        It goes on to its end if the operator does not wait.
        """
        told = [_reached(peer.name, peer.purge(tenant, _LIMIT_S)) for peer in self.peers()]
        if self.cold is not None:
            told.append(_reached(NAME, self.cold.purge(tenant)))
        reached: list[Reached] = []

        async def work() -> None:
            reached.extend(await asyncio.gather(*told))

        await asyncio.wait([spawn(work(), name="purge a tenant")])
        return reached

    async def in_cold(self, snapshots: Iterable[Snapshot]) -> list[Reached]:
        """Delete the copies of snapshots from the cold tier, if there is one."""
        if self.cold is None:
            return []
        return [await _reached(NAME, self.cold.forget(snapshots))]


async def _reached(holder: str, count: Awaitable[int]) -> Reached:
    """Return the outcome of a purge at a holder."""
    try:
        return Reached(holder, await count)
    except (BackendError, KvError) as error:
        return Reached(holder, problem=str(error))
