"""What the cold tier needs of the rest: the snapshots of this host, and who fetches from it."""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from router.base.types import Snapshot, SnapshotId, Tenant


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

    async def forget(self, tenant: Tenant) -> None:
        """Save nothing of what slots have of a tenant."""

    async def purged(self, snapshots: list[SnapshotId]) -> None:
        """Delete snapshots of a tenant that another host has purged."""


class MeasuredLink(Protocol):
    """The link to the tier, which wants to know how fast bytes come."""

    def is_to_be_measured(self) -> bool:
        """Return whether nothing is known of it, or nothing new for long."""

    def not_measured(self) -> None:
        """Note that it could not be measured."""

    def measured(self, size_bytes: int, seconds: float) -> None:
        """Take the rate from bytes that were read."""
