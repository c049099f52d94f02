"""Jobs: the steps from the admission of a request until it is sent, one after the other."""

from collections import deque
from dataclasses import field, replace
from enum import StrEnum

from router.base.frozen import dataclass
from router.base.tokens import Tokens, head
from router.base.types import (
    Lease,
    Reported,
    Request,
    RequestId,
    SlotId,
    SnapshotId,
    Source,
)
from router.core.model.effects import SaveReason
from router.core.model.plan import Plan
from router.core.model.slots import NOTHING, Resident


@dataclass(frozen=True, slots=True)
class SaveStep:
    """Save a slot that the job holds."""

    slot: SlotId
    reason: SaveReason


@dataclass(frozen=True, slots=True)
class CutStep:
    """Cut the first `n_tokens` out of a snapshot, for the restore that comes next."""

    snapshot: SnapshotId
    n_tokens: int


@dataclass(frozen=True, slots=True)
class EraseStep:
    """Empty a slot that the job holds and that has another tenant's tokens."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """Restore into the job's slot. None: the snapshot that the copy's save makes."""

    snapshot: SnapshotId | None


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Prefill the job's slot with `tokens`; only the first `upto` if this is one chunk."""

    tokens: Tokens
    upto: int | None = None

    @property
    def now(self) -> Tokens:
        """Return the tokens to compute in this step."""
        return self.tokens if self.upto is None else head(self.tokens, self.upto)


@dataclass(frozen=True, slots=True)
class InPrefillQueue:
    """No step: the job waits in the prefill queue (`execution/prefill_queue.py`)."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class AtGate:
    """No step: the job waits at the placement gate (`execution/placement_gate.py`)."""


@dataclass(frozen=True, slots=True)
class DispatchStep:
    """Send the client's request."""


Step = SaveStep | CutStep | EraseStep | RestoreStep | PrefillStep | DispatchStep


class Stage(StrEnum):
    """Progress of a job."""

    PREPARING = "preparing"
    DISPATCHED = "dispatched"
    ABANDONED = "abandoned"


@dataclass(slots=True)
class Job:
    """The leases of a request or a save, and its next steps. Owned by the scheduler."""

    id: RequestId
    lease: Lease
    request: Request | None = None  # None: an idle save, a probe or a watch
    plan: Plan | None = None
    others: list[Lease] = field(default_factory=list)
    steps: deque[Step] = field(default_factory=deque)
    doing: Step | InPrefillQueue | AtGate | None = None
    using: SnapshotId | None = None  # a reference to release
    stage: Stage = Stage.PREPARING
    gated: bool = False  # holds the placement gate of its backend
    gated_at_dispatch: bool = False  # needs the placement gate only when sent
    cancelled: bool = False
    has_permit: bool = False  # has the prefill permit, not begun
    prefill_queue_s: float = 0.0  # in the prefill queue, up to the last permit
    slot_confirmed: bool = False  # the slot of a server-placed request is known
    since: float = 0.0
    waited_s: float = 0.0
    prepared_s: float = 0.0
    prefilled: Reported | None = None
    resident_at_dispatch: Resident = NOTHING  # slot content when the request was sent
    content_unknown: bool = False  # the slot content will be unknown at its end
    likely_unchanged: bool = False  # slot content is probably unchanged: its length will tell

    @property
    def is_ours(self) -> bool:
        """Return whether this is a request, save or probe of the router, not a mere watch."""
        return self.request is not None or self.stage is not Stage.ABANDONED

    @property
    def slot(self) -> SlotId:
        return self.lease.slot

    def lease_of(self, slot: SlotId) -> Lease | None:
        """Return the job's lease on a slot. None: it has none, or no longer."""
        return next((x for x in (self.lease, *self.others) if x.slot == slot), None)

    def note_prefill(self, reported: Reported) -> None:
        """Add one more prefill of this job; no token is computed twice, so they add up."""
        before = self.prefilled.computed_tokens if self.prefilled is not None else None
        if before is not None and reported.cached_tokens is not None:
            reported = replace(reported, cached_tokens=reported.cached_tokens - before)
        self.prefilled = reported

    @property
    def has_used_slot(self) -> bool:
        """Return whether the slot holds content of its request: it was sent or prefilled."""
        if self.request is None or not self.request.reuse:
            return False
        return self.stage is not Stage.PREPARING or self.prefilled is not None

    def went_cold(self, reason: str) -> None:
        """Change the plan to a cold prefill, because its source of tokens failed."""
        assert self.plan is not None
        chosen = replace(self.plan.chosen, source=Source.COLD, reused_tokens=0, snapshot=None)
        self.plan = replace(self.plan, chosen=chosen, reason=reason)
