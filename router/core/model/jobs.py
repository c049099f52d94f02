"""Jobs: the holders of leases. A request, an idle save, a probe, or the watch of a slot."""

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from router.base.tokens import EMPTY, Tokens
from router.base.types import Cost, OwnPrefill, Reported, Request, SnapshotId, Source
from router.core.model.backend import LeaseHolder, Slot
from router.core.model.effects import Order
from router.core.model.plan import Plan
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import NOTHING, Content, Fate, Resident


class InPrefillQueue(Struct, frozen=True):
    """No step: the job waits in the prefill queue since then, in clock seconds."""

    since: float


class AtGate(Struct, frozen=True):
    """No step: the job waits at the placement gate since then, in clock seconds."""

    since: float


@dataclass(slots=True, kw_only=True, eq=False)
class SaveJob(LeaseHolder):
    """The save of an idle slot."""


@dataclass(slots=True, kw_only=True, eq=False)
class ProbeLoan(LeaseHolder):
    """Slots lent to the probe of their backend, which may write anything there.

    `before`: what they held, by index; the probe puts back what it can.
    """

    before: dict[int, Content] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class SlotWatch(LeaseHolder):
    """The watch of a slot until its backend is known to be done with it.

    `request`: the abandoned request that may still run there; None: an unknown client may use it.
    `before`: what the slot held when that request, or its payer, was sent.
    """

    request: Request | None = None
    payer: Request | None = None  # an abandoned one of several tasks, which may have had one here
    before: Resident = NOTHING
    plan: Plan | None = None  # of that request
    prefilled: int = 0  # tokens that the router computed for it before it was sent
    counted: Cost | None = None  # of that request; None: all of it
    has_begun: bool = False  # to answer: that request surely ran here
    is_elsewhere: bool = False  # that request may run in any slot of the backend
    is_doubtful: bool = False  # nothing will be known of the slot's content
    likely_unchanged: bool = False  # the content is the same if its length is

    @property
    def is_ours(self) -> bool:
        return self.request is not None

    def doubt(self) -> None:
        """Note that nothing will be known of the slot's content."""
        self.is_doubtful = True


@dataclass(slots=True, kw_only=True, eq=False)
class RequestJob(LeaseHolder):
    """A request from its admission to the end of its answer, and the steps until it is sent."""

    request: Request
    plan: Plan
    doing: Order[Any] | InPrefillQueue | AtGate | None = None
    wanted: Tokens = EMPTY  # of a prefill under way in chunks: all that is to be computed
    using: SnapshotId | None = None  # a reference to release
    is_sent: bool = False
    claim: SlotClaim = SlotClaim.PINNED  # how its request takes slots
    cancelled: bool = False
    for_others: bool = False  # cancelled, but its prefill goes on: other requests wait for it
    past_queue_s: float = 0.0  # in the prefill queue, up to the last permit
    chunk_until: float = 0.0  # predicted end of the prefill in progress; 0: there is none
    slot_confirmed: bool = False  # the slot of a server-placed request is known
    since: float = 0.0
    waited_s: float = 0.0  # in the request queue
    prepared_s: float = 0.0
    prefilled: OwnPrefill | None = None
    fate: Fate | None = None  # of what it leaves in its slot
    resident_at_dispatch: Resident = NOTHING  # slot content when the request was sent

    @property
    def knows_slot(self) -> bool:
        """Return whether it is known in which slot the server runs the request."""
        return self.claim is SlotClaim.PINNED or self.slot_confirmed

    # -- steps -----------------------------------------------------------------------------------

    def do(self, doing: Order[Any] | InPrefillQueue | AtGate | None) -> None:
        """Do this now, or wait for this."""
        self.doing = doing

    def prefill_queue_s(self, now: float) -> float:
        """Return the seconds in the prefill queue so far."""
        waits = self.doing
        return self.past_queue_s + (now - waits.since if isinstance(waits, InPrefillQueue) else 0.0)

    def leave_prefill_queue(self, now: float) -> None:
        """End the wait in the prefill queue."""
        assert isinstance(self.doing, InPrefillQueue)
        self.past_queue_s = self.prefill_queue_s(now)
        self.doing = None

    def want(self, tokens: Tokens) -> None:
        """Note what the prefill under way is a part of."""
        self.wanted = tokens

    def begin_chunk(self, until: float) -> None:
        """Note when the prefill in progress is predicted to end; 0: there is none."""
        self.chunk_until = until

    def move(self, slot: Slot) -> None:
        """Hold another slot for the request."""
        self.own = slot

    def use(self, snapshot: SnapshotId | None) -> None:
        """Note the snapshot that the job has a reference to."""
        self.using = snapshot

    # -- stages ----------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Note that the client disconnected before the request was sent."""
        self.cancelled = True

    def go_on_for_others(self, *, wanted: bool) -> None:
        """Note whether the prefill of a cancelled job goes on because others wait for it."""
        self.for_others = wanted

    def dispatch(self, resident: Resident, now: float) -> None:
        """Note that the request is sent to a slot that holds `resident`."""
        self.is_sent, self.prepared_s = True, now - self.since
        self.resident_at_dispatch = resident

    def runs_on(self, resident: Resident) -> None:
        """Note that the request runs in a slot that held `resident`."""
        self.resident_at_dispatch = resident

    def confirm_slot(self) -> None:
        """Note that the server is known to run the request in the job's slot."""
        self.slot_confirmed = True

    def explain(self, plan: Plan) -> None:
        """Replace the plan with the same one, explained."""
        self.plan = plan

    def note_prefill(self, reported: Reported) -> None:
        """Add one more prefill of this job; no token is computed twice, so they add up."""
        before = self.prefilled or OwnPrefill()
        self.prefilled = OwnPrefill(
            tokens=before.tokens + (reported.computed_tokens or 0),
            seconds=before.seconds + (reported.prompt_s or 0.0),
        )

    def went_cold(self, reason: str) -> None:
        """Change the plan to a cold prefill, because its source of tokens failed."""
        chosen = replace(self.plan.chosen, source=Source.COLD, reused_tokens=0, snapshot=None)
        self.plan = replace(self.plan, chosen=chosen, reason=reason)


Job = RequestJob | SaveJob | ProbeLoan | SlotWatch
