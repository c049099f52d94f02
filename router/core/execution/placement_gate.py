"""Placement gate: decide when a server-placed request may be sent.

Its prompt is computed in the leased slot beside other work. Only the send needs the gate: nothing
new begins on the backend until the request is known to run. While another slot that the server may
take for idle has as much of the prompt, the request waits at the gate.
"""

from msgspec.structs import replace

from router.base.tokens import Tokens
from router.core.execution.resident_updates import after_either
from router.core.execution.state import State
from router.core.model.backend import Slot
from router.core.model.effects import Prefill
from router.core.model.jobs import AtGate, ProbeLoan, RequestJob
from router.core.model.server_placement import SlotClaim, may_hold
from router.core.model.slots import Phase, Resident
from router.core.model.tenancy import attracts


def is_free(state: State, job: RequestJob) -> bool:
    """Return whether no other job has the gate and the server will take the job's slot."""
    inventory, backend = state.inventory, job.own.backend
    if backend.gate.holder not in (None, job.id):
        return False
    computed = inventory.is_computed(job)
    held = job.held
    others = (s for s in backend.slots if s not in held)
    return not any(_is_in_the_way(state, job, slot, computed) for slot in others)


def wait(state: State, job: RequestJob) -> None:
    """Let the job wait at the gate. Its prefill is over: no request waits for its end."""
    slot = job.own
    slot.do(replace(slot.work, sharing=False, busy_until=state.now))
    job.own.backend.prefills.leave(job)
    job.own.backend.gate.wait(job)
    job.do(AtGate(state.now))


def next_through(state: State) -> RequestJob | None:
    """Return the first waiting job that may be sent. None: all keep waiting."""
    backends = state.inventory.up.values()
    jobs = (job for backend in backends for job in backend.gate.waiting)
    return next((job for job in jobs if is_free(state, job)), None)


def reuses_nothing_foreign(job: RequestJob) -> bool:
    """Return True if the request can be sent without reusing another tenant's tokens.

    If all went as planned, it can. Where the server picks the slot, a failed prefill or restore
    leaves the leased slot with less of the prompt than others may have. Others may have it now, or
    when their answers end, which may be before the request is there.
    """
    request = job.request
    leased = job.held
    if any(slot.content.tenant != request.tenant for slot in leased):
        return False
    if job.claim not in (SlotClaim.STEERED, SlotClaim.SERVER_PLACED):
        return True
    computed = leased[0].content.resident.covers(request.prompt)
    slots = job.own.backend.slots
    return not any(attracts(slot, request, computed_first=computed) for slot in slots)


def swap_leases(state: State, job: RequestJob, other: RequestJob) -> None:
    """Swap slots with a job that waits at the gate: the server put the request in its slot.

    Nothing is under way in that slot. From now on each job has the other's slot.
    """
    actual, meant, request = other.own, job.own, job.request
    ours, theirs = meant.work, actual.work
    job.runs_on(actual.content.resident)
    meant.release(job, replace(meant.content, save_decided=False), meant.last_used)
    content = replace(actual.content, tenant=request.tenant, save_decided=False)
    actual.release(other, content, actual.last_used)
    job.move(actual.lease(job, ours))
    actual.start(job)
    other.move(meant.lease(other, theirs))


def mix(state: State, job: RequestJob) -> None:
    """Doubt the content of gated jobs' slots: the job's request may have run in one.

    The router did not see in which slot that request ran.
    """
    request = job.request
    computed = job.resident_at_dispatch.covers(request.prompt)
    for slot in job.own.backend.slots:
        if waits_in(slot) is None:
            continue
        if computed and not may_hold(slot.content.resident, request.prompt):
            continue
        either = after_either(slot.content.resident, request.prompt)
        slot.hold(replace(slot.content.mixed_with(request), resident=either))


def _is_in_the_way(state: State, job: RequestJob, slot: Slot, computed: bool) -> bool:
    """Return True if the slot is an obstacle: the server may take it instead of the job's.

    1. Idle: no obstacle. The lease moves there.
    2. Running: no obstacle.
    3. Used from outside the router: nothing of the router is sent there.
    4. The job's prompt is not computed: any slot that is not in use is an obstacle.
    5. Held by another gated job: the two swap slots, unless the other job would lose by it.
    6. The slot has, or is getting, as much of the prompt as the job's.
    """
    request = job.request
    if slot.phase in (Phase.IDLE, Phase.LOST, Phase.RUNNING):  # (1), (2)
        return False
    holder = slot.job
    if holder is None or not holder.is_ours:  # (3)
        return not computed
    other = waits_in(slot)
    if not computed:  # (4)
        return other is None
    if other is not None:  # (5)
        own = job.own.content.resident
        theirs = other.request.prompt
        loses = slot.content.resident.covers(theirs) and not may_hold(own, theirs)
        return may_hold(slot.content.resident, request.prompt) and loses
    if isinstance(holder, ProbeLoan):
        return True  # it may write anything there
    held, coming = slot.content.resident, [slot.work.pending]
    if isinstance(holder, RequestJob):
        coming += _restored(state, holder)
        if isinstance(holder.doing, Prefill):  # in use, and not known to have it
            held = replace(held, may_hold_more=False)
    return may_hold(held, request.prompt) or any(  # (6)
        Resident(tokens).covers(request.prompt) for tokens in coming
    )


def _restored(state: State, job: RequestJob) -> list[Tokens]:
    """Return the tokens that are restored into the job's slot, now or in a later step."""
    inventory = state.inventory
    # The source of a copy is a slot that the job holds, until it is a snapshot.
    tokens = [slot.content.resident.tokens for slot in job.others]
    return tokens if job.using is None else [*tokens, inventory.catalog[job.using].tokens]


def waits_in(slot: Slot) -> RequestJob | None:
    """Return the job that waits at the gate with this slot. None: there is none."""
    job = slot.job
    if not (isinstance(job, RequestJob) and isinstance(job.doing, AtGate)):
        return None
    return job if job.slot == slot.id else None
