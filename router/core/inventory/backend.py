"""One backend, as the decisions see it: its prefill queue, placement gate and write backoff too.

`execution/prefill_queue.py` and `execution/placement_gate.py` have the rules of the first two.
"""

from dataclasses import dataclass, field
from math import inf

from router.base.types import BackendId, BackendInfo, Namespace, Request, RequestId, Stall
from router.core.inventory.prefix_index import GhostList
from router.core.model.rates import Rates
from router.core.model.slots import BackendSlots, Phase, Slot
from router.core.model.tuning import TUNING


@dataclass(slots=True)
class WriteBackoff:
    """The write backoff of one backend: failures in a row, and its end in clock seconds, if any."""

    failures: int = 0
    until: float | None = None
    reason: str = ""  # of the last failure

    def fail(self, now: float, reason: str) -> None:
        """Count a failed save or rewrite: the second in a row starts a backoff.

        Each further failure doubles the backoff.
        """
        self.failures += 1
        self.reason = reason
        doubled = self.failures - TUNING.write_failures_forgiven - 1
        if doubled >= 0:
            backoff_s = TUNING.write_backoff_first_s * 2.0**doubled
            self.until = now + min(backoff_s, TUNING.write_backoff_most_s)

    def succeed(self) -> None:
        """Forget all failures."""
        self.failures, self.until, self.reason = 0, None, ""

    def end(self) -> None:
        """Allow writes again; the failures still count."""
        self.until = None


@dataclass(slots=True)
class PrefillQueue:
    """The prefill queue of one backend. The permit ends by itself, in clock seconds."""

    holder: RequestId | None = None
    permit_until: float = 0.0
    waiting: list[RequestId] = field(default_factory=list)

    def has_permit(self, job: RequestId, now: float) -> bool:
        """Return whether a job has the permit."""
        return self.holder == job and now < self.permit_until

    def grant(self, job: RequestId, until: float) -> None:
        """Give the permit to a job until then; the job waits no longer."""
        if job in self.waiting:
            self.waiting.remove(job)
        self.holder, self.permit_until = job, until

    def end_permit(self, job: RequestId, at: float = 0.0) -> None:
        """End the permit then, or now, if the job has it."""
        if self.holder == job:
            self.permit_until = min(self.permit_until, at)

    def wait(self, job: RequestId) -> None:
        """Let a job wait; its permit ends."""
        self.end_permit(job)
        self.waiting.append(job)

    def leave(self, job: RequestId) -> None:
        """End the job's permit, if it has one; let the job wait no longer."""
        self.end_permit(job)
        if job in self.waiting:
            self.waiting.remove(job)


@dataclass(slots=True)
class PlacementGate:
    """The placement gate of one backend: closed while a job holds it."""

    holder: RequestId | None = None
    waiting: list[RequestId] = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        return self.holder is not None

    def take(self, job: RequestId) -> None:
        """Close the gate behind a job, which no longer waits."""
        self.leave(job)
        self.holder = job

    def wait(self, job: RequestId) -> None:
        """Let a job wait."""
        self.waiting.append(job)

    def leave(self, job: RequestId) -> None:
        """Open the gate if the job holds it; let the job wait no longer."""
        if self.holder == job:
            self.holder = None
        if job in self.waiting:
            self.waiting.remove(job)


@dataclass(slots=True)
class Backend:
    """What a backend is, how fast it is, what it was seen not to do, and which jobs wait for it.

    It may go down and come back. What it learned survives that: `rates`, `backoff`, `stalled_s`.
    What belongs to its process does not: `lose` drops the jobs that wait and the prompts that were
    sent, `come_up` also what it was seen not to do. When it leaves for good, all is dropped.
    """

    info: BackendInfo  # while it is down, the last one
    id: BackendId = field(init=False)
    rates: Rates = field(default_factory=Rates)
    slots: BackendSlots = field(default_factory=BackendSlots)  # the same as in `Inventory.slots`
    gate: PlacementGate = field(default_factory=PlacementGate)
    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    backoff: WriteBackoff = field(default_factory=WriteBackoff)
    stalled_s: dict[Stall, float] = field(default_factory=dict)  # so far, in seconds x streams
    # Prompts sent to a backend that is not managed: they may be in its own cache.
    sent: GhostList = field(default_factory=GhostList, repr=False, compare=False)
    # Restores in a row that were not used, and why it does less than its probe showed.
    unused_restores: int = 0
    limited: str = ""
    # Prefills of the router's own that were lost, and when another one is tried, in clock seconds.
    lost_prefills: int = 0
    extends_again_at: float | None = None
    person_at: float = -inf  # when a request that cannot wait last had a slot, in clock seconds
    proof_asked: bool = False  # it was to end before it was probed, so a probe was ordered

    def __post_init__(self) -> None:
        self.id = self.info.id

    def come_up(self, info: BackendInfo) -> None:
        """Take what the backend is now. What it was seen not to do counts no longer."""
        self.info = info
        self.unused_restores = self.lost_prefills = 0
        self.limited, self.extends_again_at, self.proof_asked = "", None, False

    def lose(self) -> None:
        """Drop what was of a process that has ended, or may have."""
        self.gate, self.prefills, self.sent = PlacementGate(), PrefillQueue(), GhostList()

    def fits(self, request: Request) -> bool:
        """Return whether it has the model and a long enough slot, and is not to be avoided."""
        info = self.info
        return (
            request.prompt.n_tokens < info.n_ctx
            and info.answers_to(request.model)
            and info.id not in request.avoid
        )

    @property
    def may_run_more(self) -> bool:
        """Return whether it runs fewer requests than its operator allows (`max_running`)."""
        most, phases = self.info.max_running, self.slots.phases
        busy = phases[Phase.RUNNING] + phases[Phase.PREPARING] + phases[Phase.ABANDONED]
        return most is None or busy < most

    def kept_free_until(self, request: Request) -> float:
        """Return until when a background request leaves its free slots to others.

        In clock seconds; -inf: one is left beside it.
        """
        phases, most = self.slots.phases, self.info.max_running or self.info.n_slots
        busy = phases[Phase.RUNNING] + phases[Phase.PREPARING] + phases[Phase.ABANDONED]
        if min(phases[Phase.IDLE], most - busy) > request.n_slots(self.info.n_slots):
            return -inf
        only = min(most, self.info.n_slots) == 1
        return self.person_at + (TUNING.only_slot_free_s if only else TUNING.last_slot_free_s)

    @property
    def may_write(self) -> bool:
        """Return whether there is no write backoff, so state files can be made for it."""
        return self.backoff.until is None

    def reuses(self, request: Request) -> bool:
        """Return whether the request can go on from what a slot holds.

        Not where slots do not extend, nor where the server caches by request only, and the request
        cannot say so (/v1/messages drops the field).
        """
        return self.info.extends and (self.info.caches_by_default or request.pinnable)

    def free(self, request: Request) -> list[Slot]:
        """Return the idle slots that the request may use."""
        idle = [slot for slot in self.slots if slot.is_idle]
        if request.slot_hint is None:
            return idle
        return [slot for slot in idle if self.wants(slot, request)]

    def wants(self, slot: Slot, request: Request) -> bool:
        """Return whether a slot meets the client's `id_slot`, if the backend has that slot."""
        hint = request.slot_hint
        return hint is None or slot.id.index == hint or hint >= self.info.n_slots

    def note_sent(self, request: Request) -> None:
        """Record a prompt that is sent to a backend which keeps it as it likes."""
        prompt = request.prompt
        if self.info.generates and request.reuse and prompt.is_exact:
            self.sent.add(Namespace(request.tenant), prompt.tokens)

    def sent_before(self, request: Request) -> int:
        """Return how many tokens a prompt could reuse of what was sent before.

        The last token of a prompt is always computed.
        """
        if not self.sent:
            return 0
        shared, _ = self.sent.nearest(Namespace(request.tenant), request.prompt.tokens)
        return min(shared, request.prompt.n_tokens - 1)
