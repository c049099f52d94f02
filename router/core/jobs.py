"""A lease at work: the steps between a grant and the client's request, one after the other."""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from router.core.effects import SaveReason
from router.core.plan import Plan
from router.tokens import EMPTY, Tokens
from router.types import Lease, Reported, Request, RequestId, SlotId, SnapshotId


@dataclass(frozen=True, slots=True)
class SaveStep:
    """Save a slot that the job holds."""

    slot: SlotId
    reason: SaveReason


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """Restore into the job's slot. None: whatever the copy's save has just made."""

    snapshot: SnapshotId | None


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Compute tokens into the job's slot."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class DispatchStep:
    """Let the client's request go."""


Step = SaveStep | RestoreStep | PrefillStep | DispatchStep


class Stage(StrEnum):
    """How far a job is."""

    PREPARING = "preparing"
    DISPATCHED = "dispatched"
    DRAINING = "draining"


@dataclass(slots=True)
class Job:
    """Who holds which leases, for what, and what comes next. Owned by the scheduler."""

    id: RequestId
    lease: Lease
    request: Request | None = None  # None: a save in the background
    plan: Plan | None = None
    others: list[Lease] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=deque)
    doing: Step | None = None
    using: SnapshotId | None = None  # a reference to give back
    stage: Stage = Stage.PREPARING
    gated: bool = False
    cancelled: bool = False
    placed: bool = False  # it is known on which slot an unpinned request ran
    since: float = 0.0
    waited_s: float = 0.0
    prepared_s: float = 0.0
    prefilled: Reported | None = None
    sent_over: Tokens = EMPTY  # what the slot held when the request went

    @property
    def slot(self) -> SlotId:
        return self.lease.slot

    def lease_of(self, slot: SlotId) -> Lease:
        """The job's lease on one of its slots."""
        return next(lease for lease in (self.lease, *self.others) if lease.slot == slot)
