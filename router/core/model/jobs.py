"""Jobs: the steps from the admission of a request until it is sent, one after the other."""

from collections import deque
from collections.abc import Iterable
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
from router.core.model.server_placement import SlotClaim
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
    """The leases of a request or a save, and its next steps. Owned by the scheduler.

    Only its own methods change it; `tests/repository/test_state_owners.py` checks that.
    """

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
    claim: SlotClaim = SlotClaim.PINNED  # how its request takes slots
    cancelled: bool = False
    has_permit: bool = False  # has the prefill permit, not begun
    prefill_queue_s: float = 0.0  # in the prefill queue, up to the last permit
    slot_confirmed: bool = False  # the slot of a server-placed request is known
    since: float = 0.0
    waited_s: float = 0.0  # in the request queue
    wait_since: float | None = None  # waits in the prefill queue or at the gate since then
    past_waits_s: float = 0.0  # in both of them, up to the last wait
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
    def knows_slot(self) -> bool:
        """Return whether it is known in which slot the server runs the request."""
        whole = self.claim is SlotClaim.WHOLE_BACKEND
        return self.claim is SlotClaim.PINNED or (self.slot_confirmed and not whole)

    @property
    def slot(self) -> SlotId:
        return self.lease.slot

    def lease_of(self, slot: SlotId) -> Lease | None:
        """Return the job's lease on a slot. None: it has none, or no longer."""
        return next((x for x in (self.lease, *self.others) if x.slot == slot), None)

    # -- steps -----------------------------------------------------------------------------------

    def set_steps(self, steps: Iterable[Step]) -> None:
        """Replace all steps that are still to do."""
        self.steps = deque(steps)

    def insert(self, step: Step) -> None:
        """Put a step before all others."""
        self.steps.appendleft(step)

    def append(self, step: Step) -> None:
        """Put a step behind all others."""
        self.steps.append(step)

    def replace_next(self, step: Step) -> None:
        """Put a step in the place of the next one."""
        self.steps[0] = step

    def drop_next(self) -> None:
        """Drop the next step."""
        self.steps.popleft()

    def drop_steps(self) -> None:
        """Drop all steps that are still to do."""
        self.steps.clear()

    def take_step(self) -> Step:
        """Begin the next step, and return it."""
        step = self.steps.popleft()
        self.doing = step
        return step

    def do(self, doing: Step | InPrefillQueue | AtGate) -> None:
        """Do this now, or wait for this, instead of the step that was taken."""
        self.doing = doing

    # -- leases ----------------------------------------------------------------------------------

    def hold_also(self, leases: Iterable[Lease]) -> None:
        """Hold more slots."""
        self.others += leases

    def give_back(self, leases: Iterable[Lease]) -> None:
        """Hold these slots no longer; the caller releases them, or they are lost."""
        gone = set(leases)
        self.others = [lease for lease in self.others if lease not in gone]

    def move(self, lease: Lease) -> None:
        """Hold another slot for the request."""
        self.lease = lease

    def use(self, snapshot: SnapshotId | None) -> None:
        """Note the snapshot that the job has a reference to."""
        self.using = snapshot

    # -- stages ----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Note that the client disconnected before the request was sent."""
        self.cancelled = True
        self.drop_steps()

    def dispatch(self, resident: Resident, now: float) -> None:
        """Note that the request is sent to a slot that holds `resident`."""
        self.stage, self.prepared_s = Stage.DISPATCHED, now - self.since
        self.resident_at_dispatch = resident

    def runs_on(self, resident: Resident) -> None:
        """Note that the request runs in a slot that held `resident`."""
        self.resident_at_dispatch = resident

    def confirm_slot(self) -> None:
        """Note that the server is known to run the request in the job's slot."""
        self.slot_confirmed = True

    def abandon(self) -> None:
        """Note that only the end of the backend's work is waited for."""
        self.stage = Stage.ABANDONED

    def doubt(self) -> None:
        """Note that nothing will be known of the slot's content."""
        self.content_unknown = True

    # -- queues ----------------------------------------------------------------------------------

    def take_gate(self) -> None:
        """Note that the job holds the placement gate of its backend."""
        self.gated = True

    def leave_gate(self) -> None:
        """Note that the job holds the placement gate no longer."""
        self.gated = False

    def call(self) -> None:
        """Give the job the prefill permit."""
        self.has_permit = True

    def use_permit(self) -> None:
        """Note that the prefill begins for which the job has the permit."""
        self.has_permit = False

    def begin_wait(self, now: float) -> None:
        """Note that the job waits from now on, in the prefill queue or at the gate."""
        self.wait_since = now

    def end_wait(self, now: float) -> None:
        """Note that the job waits no longer."""
        if self.wait_since is not None:
            self.past_waits_s += now - self.wait_since
            self.wait_since = None

    def stood(self, seconds: float) -> None:
        """Note how long the job has been in the prefill queue."""
        self.prefill_queue_s = seconds

    # --------------------------------------------------------------------------------------------

    def explain(self, plan: Plan) -> None:
        """Replace the plan with the same one, explained."""
        self.plan = plan

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
