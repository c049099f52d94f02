"""Placement gate: decide when a server-placed request may be sent.

Its prompt is computed in the leased slot beside other work. Only the send needs the gate: nothing
new begins on the backend until the request is known to run. While another slot that the server may
take for idle has as much of the prompt, the request waits at the gate.
"""

from dataclasses import replace

from router.base.tokens import Tokens
from router.base.types import BackendId, Request
from router.core.execution.deadline import deadline, reject_late
from router.core.execution.state import State
from router.core.model.jobs import (
    AtGate,
    DispatchStep,
    Job,
    PrefillStep,
)
from router.core.model.resident_updates import after_either
from router.core.model.server_placement import (
    Expected,
    SlotClaim,
    may_hold,
)
from router.core.model.slots import Phase, Resident, Slot
from router.core.model.tenancy import attracts


def needs_gate_now(job: Job) -> bool:
    """Return whether the job's next step is to send a request that needs the gate only then."""
    return job.claim is SlotClaim.STEERED and isinstance(job.steps[0], DispatchStep)


def is_free(state: State, job: Job) -> bool:
    """Return whether no other job has the gate and the server will take the job's slot."""
    backend = job.slot.backend
    if backend in state.fleet.gated and not job.gated:
        return False
    computed = _is_computed(state, job)
    others = (s for s in state.fleet.slots.of(backend) if job.lease_of(s.id) is None)
    return not any(_is_in_the_way(state, job, slot, computed) for slot in others)


def take(state: State, job: Job) -> None:
    """Give the gate to the job: nothing else is sent until its request is known to run."""
    job.take_gate()
    state.fleet.gated.add(job.slot.backend)


def wait(state: State, job: Job, now: float) -> None:
    """Let the job wait at the gate. Its prefill is over: no request waits for its end."""
    slot = state.fleet.slots[job.slot]
    slot.end_permit()
    slot.stop_sharing()
    slot.expect_end(now)
    if job.gated:
        job.leave_gate()
        state.fleet.gated.discard(job.slot.backend)
    job.do(AtGate())
    job.begin_wait(now)
    state.at_gate.append(job.id)
    _tell(state)


def next_through(state: State, now: float) -> Job | None:
    """Return the first gated job that may be sent or that is past its deadline.

    A job past its deadline is rejected and has no steps left. None: all keep waiting.
    """
    found = None
    for job in _waiting(state):
        if is_free(state, job):
            found = job
        elif (ends := deadline(state, job)) is not None and ends <= now:
            reject_late(state, job, "the placement gate")
            job.drop_steps()
            found = job
        if found is not None:
            found.end_wait(now)
            state.at_gate.remove(found.id)
            break
    _tell(state)
    return found


def next_end(state: State) -> float | None:
    """Return when the next deadline at the gate passes, in clock seconds."""
    ends = (deadline(state, job) for job in _waiting(state))
    return min((end for end in ends if end is not None), default=None)


def reuses_nothing_foreign(state: State, job: Job) -> bool:
    """Return True if the request can be sent without reusing another tenant's tokens.

    If all went as planned, it can. Where the server picks the slot, a failed prefill or restore
    leaves the leased slot with less of the prompt than others may have. Others may have it now, or
    when their answers end, which may be before the request is there.
    """
    request = _request(job)
    leased = [state.fleet.slots[lease.slot] for lease in (job.lease, *job.others)]
    if any(slot.tenant != request.tenant for slot in leased):
        return False
    if job.claim not in (SlotClaim.STEERED, SlotClaim.SERVER_PLACED):
        return True
    computed = leased[0].resident.covers(request.prompt)
    slots = state.fleet.slots.of(job.slot.backend)
    return not any(attracts(slot, request, computed_first=computed) for slot in slots)


def swap_leases(state: State, job: Job, other: Job) -> None:
    """Swap slots with a job that waits at the gate: the server put the request in its slot.

    Nothing is under way in that slot. From now on each job has the other's slot.
    """
    actual = state.fleet.slots[other.slot]
    meant, request = state.fleet.slots[job.slot], _request(job)
    ours, theirs = meant.work, actual.work
    job.runs_on(actual.resident)
    meant.release(job.lease, meant.resident, meant.last_used)
    actual.release(other.lease, actual.resident, actual.last_used)
    job.move(actual.lease(job.id))
    actual.start(job.lease)
    actual.take_over(ours, request.tenant)
    other.move(meant.lease(other.id))
    meant.lend(_request(other).tenant)
    meant.expect(theirs.pending, shared=False, until=theirs.busy_until)


def mix(state: State, job: Job) -> None:
    """Doubt the content of gated jobs' slots: the job's request may have run in one.

    The router did not see in which slot that request ran.
    """
    request = _request(job)
    computed = job.resident_at_dispatch.covers(request.prompt)
    for slot in state.fleet.slots.of(job.slot.backend):
        if waits_in(state, slot) is None:
            continue
        if computed and not may_hold(slot.resident, request.prompt):
            continue
        slot.hold(after_either(slot.resident, request.prompt))
        slot.mix(request)


def _is_in_the_way(state: State, job: Job, slot: Slot, computed: bool) -> bool:
    """Return True if the slot is an obstacle: the server may take it instead of the job's.

    1. Idle: no obstacle. The lease moves there.
    2. Running: no obstacle.
    3. Used from outside the router: nothing of the router is sent there.
    4. The job's prompt is not computed: any slot that is not in use is an obstacle.
    5. Held by another gated job: the two swap slots, unless the other job would lose by it.
    6. The slot has, or is getting, as much of the prompt as the job's.
    """
    request = _request(job)
    if slot.phase in (Phase.IDLE, Phase.LOST, Phase.RUNNING):  # (1), (2)
        return False
    holder = state.holder(slot)
    if holder is None or not holder.is_ours:  # (3)
        return not computed
    other = waits_in(state, slot)
    if not computed:  # (4)
        return other is None
    if other is not None:  # (5)
        own = state.fleet.slots[job.slot].resident
        theirs = _request(other).prompt
        loses = slot.resident.covers(theirs) and not may_hold(own, theirs)
        return may_hold(slot.resident, request.prompt) and loses
    if holder.request is None and holder.doing is None:
        return True  # a probe may write anything there
    held = slot.resident
    if isinstance(holder.doing, PrefillStep):  # in use, and not known to have it
        held = replace(held, may_hold_more=False)
    return may_hold(held, request.prompt) or any(  # (6)
        Resident(tokens).covers(request.prompt)
        for tokens in (slot.pending, *_restored(state, holder))
    )


def _restored(state: State, job: Job) -> list[Tokens]:
    """Return the tokens that are restored into the job's slot, now or in a later step."""
    fleet = state.fleet
    # The source of a copy is a slot that the job holds, until it is a snapshot.
    tokens = [fleet.slots[lease.slot].resident.tokens for lease in job.others]
    return tokens if job.using is None else [*tokens, fleet.catalog[job.using].tokens]


def _request(job: Job) -> Request:
    assert job.request is not None
    return job.request


def _is_computed(state: State, job: Job) -> bool:
    """Return True if the job's slot has most of its prompt, and steers the server."""
    resident = state.fleet.slots[job.slot].resident
    return job.claim is SlotClaim.STEERED and resident.covers(_request(job).prompt)


def waits_in(state: State, slot: Slot) -> Job | None:
    """Return the job that waits at the gate with this slot. None: there is none."""
    job = state.holder(slot)
    waits = job is not None and isinstance(job.doing, AtGate) and job.slot == slot.id
    return job if waits else None


def _waiting(state: State) -> list[Job]:
    """Return the gated jobs in order of arrival; forget jobs that have ended."""
    if not state.at_gate:
        return []
    jobs = [job for name in state.at_gate if (job := state.jobs.get(name)) is not None]
    jobs = [job for job in jobs if isinstance(job.doing, AtGate)]
    state.at_gate = [job.id for job in jobs]
    return jobs


def _tell(state: State) -> None:
    """Tell the fleet which requests are gated: one in their way gets no slot there."""
    if not (state.at_gate or state.fleet.at_gate):
        return
    expected: dict[BackendId, list[Expected]] = {}
    for job in _waiting(state):
        one = Expected(_request(job), _is_computed(state, job))
        expected.setdefault(job.slot.backend, []).append(one)
    state.fleet.at_gate = expected
