"""What the cold tier needs of the rest: the snapshots of this host."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from router.base.types import Snapshot, Tenant


class Owned(NamedTuple):
    """Whose a snapshot is: the part of its namespace that all hosts share, and its tenant."""

    facts: str
    tenant: Tenant


class KeptSnapshots(Protocol):
    """The snapshots of this host, and what else it has of tenants."""

    def snapshots(self) -> Iterable[Snapshot]:
        """Return all that are in use, the most valuable first."""

    def owned(self, snapshot: Snapshot) -> Owned:
        """Return whose a snapshot is."""

    def tenants(self) -> set[Tenant]:
        """Return the tenants of snapshots and slots."""

    def knows(self, note: str) -> bool:
        """Return whether a purge was obeyed, by this run or an earlier one."""

    def untold(self) -> Mapping[str, str]:
        """Return the purges of which the tier has not heard: tenants or folders by id."""

    async def tell(self, notes: Iterable[str]) -> None:
        """Note that the tier has heard of purges."""

    async def purge(self, tenant: Tenant, note: str) -> None:
        """Delete all that is here of a tenant, and note that the purge was obeyed."""
