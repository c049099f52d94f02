"""A lease at work: the steps between a grant and the client's request, one after the other."""

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
    """Make a snapshot of the first `n_tokens` of one, for the restore that comes next."""

    snapshot: SnapshotId
    n_tokens: int


@dataclass(frozen=True, slots=True)
class EraseStep:
    """Empty a slot that the job holds, of another tenant's tokens."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class RestoreStep:
    """Restore into the job's slot. None: whatever the copy's save has just made."""

    snapshot: SnapshotId | None


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Compute tokens into the job's slot; `upto` so many of them for now, where it is a piece."""

    tokens: Tokens
    upto: int | None = None

    @property
    def now(self) -> Tokens:
        """What is computed for now."""
        return self.tokens if self.upto is None else head(self.tokens, self.upto)


@dataclass(frozen=True, slots=True)
class InLine:
    """No step: the job waits until it may compute these tokens (`core/turns.py`)."""

    tokens: Tokens


@dataclass(frozen=True, slots=True)
class AtGate:
    """No step: the job waits until its request may be sent (`core/gate.py`)."""


@dataclass(frozen=True, slots=True)
class LookStep:
    """Find out whether a slot that the job holds is what it was."""

    slot: SlotId


@dataclass(frozen=True, slots=True)
class DispatchStep:
    """Let the client's request go."""


Step = SaveStep | CutStep | EraseStep | RestoreStep | PrefillStep | LookStep | DispatchStep


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
    doing: Step | InLine | AtGate | None = None
    using: SnapshotId | None = None  # a reference to give back
    stage: Stage = Stage.PREPARING
    gated: bool = False
    late: bool = False  # it needs the gate when it is sent, and not before (`core/gate.py`)
    cancelled: bool = False
    called: bool = False  # it was its turn, and it has not begun yet
    stood_s: float = 0.0  # in line, until it was called last
    placed: bool = False  # it is known on which slot an unpinned request ran
    since: float = 0.0
    waited_s: float = 0.0
    prepared_s: float = 0.0
    prefilled: Reported | None = None
    sent_over: Resident = NOTHING  # what the slot held when the request went
    doubted: bool = False  # nothing can be said of what its slot holds when it is over
    untouched: bool = False  # very likely its slot holds what it held: its length will tell

    @property
    def is_ours(self) -> bool:
        """A request or a save; else a slot that somebody unknown may be using is waited for."""
        return self.request is not None or self.stage is not Stage.DRAINING

    @property
    def slot(self) -> SlotId:
        return self.lease.slot

    def lease_of(self, slot: SlotId) -> Lease | None:
        """The job's lease on a slot. None: it has none, or no longer."""
        return next((x for x in (self.lease, *self.others) if x.slot == slot), None)

    def note_prefill(self, reported: Reported) -> None:
        """One more part of the prompt was computed for this job; none twice, so they add up."""
        before = self.prefilled.computed_tokens if self.prefilled is not None else None
        if before is not None and reported.cached_tokens is not None:
            reported = replace(reported, cached_tokens=reported.cached_tokens - before)
        self.prefilled = reported

    @property
    def has_used_slot(self) -> bool:
        """What it leaves is of its request, which was sent, or computed in part."""
        if self.request is None or not self.request.reuse:
            return False
        return self.stage is not Stage.PREPARING or self.prefilled is not None

    def went_cold(self, reason: str) -> None:
        """What the plan meant to reuse did not come."""
        assert self.plan is not None
        chosen = replace(self.plan.chosen, source=Source.COLD, reused_tokens=0, snapshot=None)
        self.plan = replace(self.plan, chosen=chosen, reason=reason)
