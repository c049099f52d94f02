"""One backend, as the decisions see it: its slots, prefill queue, gate and write backoff.

`execution/prefill_queue.py` and `execution/placement_gate.py` have the rules of those two. A slot's
life is the table `TRANSITIONS`; an illegal move raises, because it is a bug.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from router.base.errors import StaleLeaseError
from router.base.tokens import WIDTH, Tokens, common_prefix
from router.base.types import (
    BackendId,
    BackendInfo,
    Lease,
    Namespace,
    Request,
    RequestId,
    SlotId,
    Stall,
    Tenant,
)
from router.core.model.prefix_index import GhostList
from router.core.model.rates import Rates
from router.core.model.slots import (
    EMPTY_SLOT,
    NO_WORK,
    TRANSITIONS,
    Content,
    Fate,
    Move,
    Phase,
    Work,
)
from router.core.model.tuning import TUNING

if TYPE_CHECKING:
    from router.core.model.jobs import RequestJob


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseHolder:
    """A job: who holds a slot, and perhaps more.

    Only its own methods change a job; `tests/repository/test_state_owners.py` checks that.
    """

    id: RequestId
    own: "Slot"
    others: "list[Slot]" = field(default_factory=list)
    is_over: bool = False  # it has no slot any more; work that it had ordered may still go on

    def end(self) -> None:
        """Note that it is over."""
        self.is_over = True

    @property
    def is_ours(self) -> bool:
        """Return whether the slot is held for work of the router, not of an unknown client."""
        return True

    @property
    def slot(self) -> SlotId:
        return self.own.id

    @property
    def held(self) -> "list[Slot]":
        """Return its slots, its own first; some may be lost since."""
        return [self.own, *self.others]

    def slot_at(self, at: SlotId) -> "Slot | None":
        """Return the slot of this id that it holds; None: it holds none, or no longer."""
        return next((slot for slot in self.held if slot.id == at), None)

    def hold_also(self, slots: "Iterable[Slot]") -> None:
        """Hold more slots, which are leased to it."""
        self.others += slots

    def give_back(self, slots: "Iterable[Slot]") -> None:
        """Hold these slots no longer; the caller releases them, or they are lost."""
        gone = list(slots)
        self.others = [slot for slot in self.others if slot not in gone]


@dataclass(slots=True, eq=False)
class Slot:
    """One slot: its phase, its content, and the work under its lease.

    It lives as long as its server process: after a restart there are new objects. Content and work
    are values: who changes one makes the next one of it, and sets it with `hold` or `do`.
    `tests/repository/test_state_owners.py` checks that.
    """

    id: SlotId
    backend: "Backend" = field(repr=False)
    phase: Phase = Phase.IDLE
    generation: int = 0  # rises with each lease
    job: LeaseHolder | None = field(default=None, repr=False)  # who holds it
    content: Content = EMPTY_SLOT
    work: Work = NO_WORK
    last_used: float = 0.0
    fate: Fate | None = None  # of its content
    used_no: int = 0  # its place among all uses of slots of its model (`Inventory.note_use`)
    # The last result of `Inventory.reach` for this content, and what else it was made from.
    reached: tuple[BackendInfo, int, int] | None = field(default=None, repr=False)

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.IDLE

    @property
    def is_abandoned(self) -> bool:
        """Return whether the slot was abandoned and its backend may still use it."""
        return self.phase is Phase.ABANDONED or self.work.prefill_abandoned

    @property
    def is_unsaved(self) -> bool:
        """Return whether the slot is idle, and no idle save was made or ruled out."""
        held = self.content
        undecided = self.phase is Phase.IDLE and held.savable and not held.save_decided
        return undecided and bool(held.resident.tokens or held.resident.unread)

    @property
    def holder(self) -> RequestId | None:
        """Return the name of the job that holds it."""
        return None if self.job is None else self.job.id

    @property
    def offered_tenant(self) -> Tenant:
        """Return the tenant of the tokens that it offers, now or at the end of its lease."""
        return self.content.tenant if self.phase is Phase.IDLE else self.work.tenant

    def _move(self, move: Move) -> None:
        allowed = TRANSITIONS[self.phase]
        if move not in allowed:
            raise StaleLeaseError(f"{self.id}: cannot {move} while {self.phase}")
        backend, after = self.backend, allowed[move]
        backend.phases[self.phase] -= 1
        backend.phases[after] += 1
        self.phase = after

    def lease(self, job: LeaseHolder, work: Work) -> "Slot":
        """Lease the slot to a job for `work`, until `release` or `lose`; return the slot."""
        self._move(Move.LEASE)
        self.generation += 1
        self.job, self.work = job, work
        return self

    def as_lease(self) -> Lease:
        """Return the lease that is in force, to tell it from later ones."""
        assert self.job is not None
        return Lease(self.id, self.generation, self.job.id)

    def start(self, job: LeaseHolder) -> None:
        """Note that the client's request goes to the backend."""
        self._check(job)
        self._move(Move.START)

    def abandon(self, job: LeaseHolder) -> None:
        """Keep the lease of an abandoned slot until the backend is known to be done with it."""
        self._check(job)
        self._move(Move.ABANDON)

    def hand_over(self, job: LeaseHolder, to: LeaseHolder) -> None:
        """Let another job have the lease."""
        self._check(job)
        self.job = to

    def release(self, job: LeaseHolder, content: Content, now: float) -> None:
        """Release the slot, holding `content`. Raise StaleLeaseError if the job has it no more."""
        self._check(job)
        self._move(Move.RELEASE)
        self.job, self.work = None, NO_WORK
        self.hold(content)
        self.last_used = now

    def lose(self) -> None:
        """Drop the slot's content and its lease, because the backend is down."""
        self._move(Move.LOSE)
        self.job, self.work = None, NO_WORK
        self.hold(Content(savable=self.content.savable))

    def hold(self, content: Content) -> None:
        """Change the content."""
        self.content, self.reached = content, None

    def do(self, work: Work) -> None:
        """Change the work under the lease."""
        self.work = work

    def follow(self, fate: Fate | None) -> None:
        """Note whose content it has now: what becomes of that is followed."""
        self.fate = fate

    def note_use(self, number: int) -> None:
        """Note its place among all uses of slots of its model."""
        self.used_no = number

    def note_reach(self, reached: tuple[BackendInfo, int, int]) -> None:
        """Keep a result of `Inventory.reach`."""
        self.reached = reached

    def invalidate_lease(self) -> None:
        """Make late reports on the last lease be ignored: its answer is in another slot."""
        self.generation += 1

    def _check(self, job: LeaseHolder) -> None:
        if self.job is not job:
            raise StaleLeaseError(f"{self.id} is not leased to {job.id}")


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
    waiting: "list[RequestJob]" = field(default_factory=list)

    def has_permit(self, job: "RequestJob", now: float) -> bool:
        """Return whether a job has the permit."""
        return self.holder == job.id and now < self.permit_until

    def grant(self, job: "RequestJob", until: float) -> None:
        """Give the permit to a job until then; the job waits no longer."""
        if job in self.waiting:
            self.waiting.remove(job)
        self.holder, self.permit_until = job.id, until

    def end_permit(self, job: "RequestJob", at: float = 0.0) -> None:
        """End the permit then, or now, if the job has it."""
        if self.holder == job.id:
            self.permit_until = min(self.permit_until, at)

    def wait(self, job: "RequestJob") -> None:
        """Let a job wait; its permit ends."""
        self.end_permit(job)
        self.waiting.append(job)

    def leave(self, job: "RequestJob") -> None:
        """End the job's permit, if it has one; let the job wait no longer."""
        self.end_permit(job)
        if job in self.waiting:
            self.waiting.remove(job)


@dataclass(slots=True)
class PlacementGate:
    """The placement gate of one backend: closed while a job holds it."""

    holder: RequestId | None = None
    waiting: "list[RequestJob]" = field(default_factory=list)

    @property
    def is_closed(self) -> bool:
        return self.holder is not None

    def take(self, job: "RequestJob") -> None:
        """Close the gate behind a job, which no longer waits."""
        self.leave(job)
        self.holder = job.id

    def wait(self, job: "RequestJob") -> None:
        """Let a job wait."""
        self.waiting.append(job)

    def leave(self, job: "RequestJob") -> None:
        """Open the gate if the job holds it; let the job wait no longer."""
        if self.holder == job.id:
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
    slots: list[Slot] = field(default_factory=list, repr=False)  # by index
    phases: dict[Phase, int] = field(
        default_factory=lambda: dict.fromkeys(Phase, 0)
    )  # slots in each
    gate: PlacementGate = field(default_factory=PlacementGate)
    prefills: PrefillQueue = field(default_factory=PrefillQueue)
    backoff: WriteBackoff = field(default_factory=WriteBackoff)
    stalled_s: dict[Stall, float] = field(default_factory=dict)  # so far, in seconds x streams
    # Prompts sent to a backend that is not managed: they may be in its own cache.
    sent: GhostList = field(default_factory=GhostList, repr=False, compare=False)
    # Restores in a row that were not used, and why it does less than its probe showed.
    unused_restores: int = 0
    limited: str = ""
    outgrown: float = inf  # tokens of the shortest state seen that is longer than its window
    # Prefills of the router's own that were lost, and when another one is tried, in clock seconds.
    lost_prefills: int = 0
    extends_again_at: float | None = None
    person_at: float = -inf  # when a request that cannot wait last had a slot, in clock seconds
    proof_asked: bool = False  # it was to end before it was probed, so a probe was ordered

    def __post_init__(self) -> None:
        self.id = self.info.id

    def attach(self, n_slots: int, first: int = 0) -> None:
        """Replace the slots: a process that has just come up has empty ones.

        Their generations go on, from `first` at least: a late report must not be taken for new.
        What must not be saved stays so: perhaps only the connection was lost.
        """
        for old in self.slots:
            old.lose()
        first = max([first, *(slot.generation for slot in self.slots)])
        contents = [slot.content for slot in self.slots[:n_slots]]
        contents += [EMPTY_SLOT] * (n_slots - len(contents))
        self.slots = [
            Slot(SlotId(self.id, index), self, generation=first, content=content)
            for index, content in enumerate(contents)
        ]
        self.phases = dict.fromkeys(Phase, 0) | {Phase.IDLE: n_slots}

    @property
    def has_idle(self) -> bool:
        """Return whether a slot is idle."""
        return self.phases[Phase.IDLE] > 0

    @property
    def running(self) -> int:
        """Count the running streams, which stop while a state file is written or read."""
        return self.phases[Phase.RUNNING]

    @property
    def may_be_waited_for(self) -> bool:
        """Return whether a slot is in use, or its own cache may have prompts."""
        return self.phases[Phase.IDLE] < len(self.slots) or len(self.sent) > 0

    @property
    def prefilling(self) -> list[Slot]:
        """Return the slots that the router prefills before their request, now or soon."""
        if not self.phases[Phase.PREPARING]:
            return []
        return [slot for slot in self.slots if slot.phase is Phase.PREPARING and slot.work.sharing]

    @property
    def held_up(self) -> int:
        """Count the requests that a transfer or a prefill would hold up.

        Requests that the router prefills first count too: without them a busy server would look
        idle.
        """
        return self.running + len(self.prefilling)

    @property
    def unsaved(self) -> list[Slot]:
        """Return the idle slots to save; none while a save would delay a request."""
        phases = self.phases
        if phases[Phase.RUNNING] or phases[Phase.PREPARING] or self.gate.holder is not None:
            return []
        return [slot for slot in self.slots if slot.is_unsaved]

    def come_up(self, info: BackendInfo) -> None:
        """Take what the backend is now. What it was seen not to do counts no longer."""
        self.info = info
        self.unused_restores = self.lost_prefills = 0
        self.limited, self.extends_again_at, self.proof_asked = "", None, False
        self.outgrown = info.window + 1 if info.window else inf

    def lose(self) -> None:
        """Drop what was of a process that has ended, or may have."""
        self.gate, self.prefills, self.sent = PlacementGate(), PrefillQueue(), GhostList()
        for slot in self.slots:
            slot.lose()

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
        most, phases = self.info.max_running, self.phases
        if most is None:
            return True
        return phases[Phase.RUNNING] + phases[Phase.PREPARING] + phases[Phase.ABANDONED] < most

    def kept_free_until(self, request: Request) -> float:
        """Return until when a background request leaves its free slots to others.

        In clock seconds; -inf: one is left beside it.
        """
        phases, most = self.phases, self.info.max_running or self.info.n_slots
        busy = phases[Phase.RUNNING] + phases[Phase.PREPARING] + phases[Phase.ABANDONED]
        if min(phases[Phase.IDLE], most - busy) > request.n_slots(self.info.n_slots):
            return -inf
        only = min(most, self.info.n_slots) == 1
        return self.person_at + (TUNING.only_slot_free_s if only else TUNING.last_slot_free_s)

    @property
    def may_write(self) -> bool:
        """Return whether there is no write backoff, so state files can be made for it."""
        return self.backoff.until is None

    @property
    def limit(self) -> str | None:
        """Return why it does less than its probe showed; None: it does not."""
        if self.backoff.failures > TUNING.write_failures_forgiven:
            return f"writing states failed {self.backoff.failures} times: {self.backoff.reason}"
        return self.limited or None

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


class SlotTable:
    """All slots of a set of backends, in the order of their ids."""

    def __init__(self, backends: Mapping[BackendId, Backend]) -> None:
        """`backends` may change."""
        self._backends = backends

    def __getitem__(self, slot: SlotId) -> Slot:
        return self._backends[slot.backend].slots[slot.index]

    def __iter__(self) -> Iterator[Slot]:
        return (slot for backend in self._backends.values() for slot in backend.slots)

    def of(self, backend: BackendId) -> list[Slot]:
        """Return the slots of one backend, by index; lost ones while it is down."""
        there = self._backends.get(backend)
        return [] if there is None else there.slots

    def any_idle(self) -> bool:
        """Return whether any slot is idle."""
        return any(backend.phases[Phase.IDLE] for backend in self._backends.values())

    def shared(self, tokens: Tokens, tenant: Tenant | None = None) -> dict[SlotId, int]:
        """Return the number of leading tokens that each slot of `tenant` shares; None: any tenant.

        Slots that share none are left out. A leased slot counts with what its lease computes.
        """
        found: dict[SlotId, int] = {}
        first = tokens[:WIDTH]
        for slot in self:
            held = slot.content.resident.tokens if slot.phase is Phase.IDLE else slot.work.pending
            if held[:WIDTH] == first and (tenant is None or slot.offered_tenant == tenant):
                found[slot.id] = common_prefix(held, tokens)
        return found if first else {}
