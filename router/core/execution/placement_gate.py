"""The gate before the requests that the server places: when one may be sent.

Its prompt is computed in our slot beside whatever else goes on, and only then it needs the gate:
nothing new begins on the backend until it is known to run. Where another slot that the server may
take for idle has as much of the prompt, it waits for the end of that.
"""

from collections import deque
from dataclasses import replace

from router.base.errors import DeadlineError
from router.base.tokens import Tokens, common_prefix
from router.base.types import NOBODY, BackendId, Request
from router.core.execution.state import State
from router.core.model.effects import SaveReason
from router.core.model.jobs import (
    AtGate,
    DispatchStep,
    EraseStep,
    Job,
    PrefillStep,
    SaveStep,
    Step,
)
from router.core.model.resident_updates import after_either
from router.core.model.server_placement import (
    Expected,
    can_be_steered,
    is_computed,
    may_hold,
    will_hold,
)
from router.core.model.slots import Phase, Slot
from router.core.model.tenancy import tempts
from router.core.planning.displacement import saving_pays


def keeps_waiting(state: State, job: Job, now: float) -> bool:
    """The job's next step is to send its request, and it may not be sent yet. Else it has the gate;
    what another tenant has left meanwhile is emptied first."""
    if not (job.late and isinstance(job.steps[0], DispatchStep)):
        return False
    fleet, backend = state.fleet, job.slot.backend
    if not _is_free(state, job):
        slot = fleet.slots[job.slot]
        # Nobody waits for what is computed already, nor for a turn of who computes nothing.
        slot.turn_until, slot.sharing, slot.busy_until = 0.0, False, now
        if job.gated:
            job.gated = False
            fleet.gated.discard(backend)
        job.doing = AtGate()
        state.at_gate.append(job.id)
        _tell(state)
        return True
    job.gated = True
    fleet.gated.add(backend)
    request = _request(job)
    if _is_computed(state, job):
        _empty(state, job, fleet.tempting(backend, request))
    return False


def next_through(state: State, now: float) -> Job | None:
    """Who waits no longer: nothing is in the way of his request, or it waited for too long."""
    found = None
    for job in _waiting(state):
        if _is_free(state, job):
            found = job
        elif (ends := _ends(state, job)) is not None and ends <= now:
            limit_s = state.queue.limits.deadline_s
            state.reject(job.id, DeadlineError(f"it could not be sent within {limit_s:g} s"))
            job.steps.clear()
            found = job
        if found is not None:
            state.at_gate.remove(found.id)
            break
    _tell(state)
    return found


def next_end(state: State) -> float | None:
    """When the next one has waited for too long, in clock seconds."""
    ends = (_ends(state, job) for job in _waiting(state))
    return min((end for end in ends if end is not None), default=None)


def meets_nobody(state: State, job: Job) -> bool:
    """The request can be sent and reuse nothing of another tenant. If all went as planned it can;
    but where the server picks the slot, a prefill or a restore that failed leaves the one that we
    mean with less of the prompt than others may have: now, or when their answers end, which may
    be before the request is there."""
    request = _request(job)
    leased = [state.fleet.slots[lease.slot] for lease in (job.lease, *job.others)]
    if any(slot.tenant != request.tenant for slot in leased):
        return False
    generates = state.fleet.generates(job.slot.backend)
    if request.pinnable or request.whole_backend or not generates:
        return True
    held, wanted = leased[0].resident.tokens, request.prompt.tokens
    computed = common_prefix(held, wanted) >= len(request.prompt) - 1
    for slot in state.fleet.slots.of(job.slot.backend):
        other = _waits_in(state, slot)
        if job.late and computed and other is not None:
            # It is not sent before this request is seen to run.
            if slot.tenant != request.tenant and may_hold(slot.resident, request.prompt):
                return False
        elif tempts(slot, request, computed_first=computed):
            return False
    return True


def change_places(state: State, job: Job, index: int) -> bool:
    """The server put the job's request into a slot of one that waits at the gate, where nothing is
    under way: each has the other's slot from now on."""
    slots = state.fleet.slots.of(job.slot.backend)
    actual = next((slot for slot in slots if slot.id.index == index), None)
    other = _waits_in(state, actual) if actual is not None else None
    if actual is None or other is None:
        return False
    meant, request = state.fleet.slots[job.slot], _request(job)
    kept = meant.pending, meant.busy_until, meant.turn_until
    lost, job.sent_over = actual.pending, actual.resident
    meant.release(job.lease, meant.resident, meant.last_used)
    actual.release(other.lease, actual.resident, actual.last_used)
    job.lease = actual.lease(job.id)
    actual.start(job.lease)
    actual.tenant = actual.taker = request.tenant
    actual.pending, actual.busy_until, actual.turn_until = kept
    other.lease = meant.lease(other.id)
    meant.taker, meant.pending = _request(other).tenant, lost
    return True


def note_place(state: State, job: Job, index: int) -> None:
    """A request that we meant for a slot is in this one. If it was not the one that has most of
    the prompt, the server goes by something else (`-sps 0`), and gets no more of them so late."""
    backend, request = job.slot.backend, _request(job)
    if not is_computed(job.sent_over, request.prompt) or not can_be_steered(
        request, state.fleet.infos[backend]
    ):
        return
    slots = state.fleet.slots.of(backend)
    if index != job.slot.index:
        if not any(s.id.index == index and may_hold(s.resident, request.prompt) for s in slots):
            state.fleet.wayward.add(backend)
    elif job.prefilled is not None and any(slot.is_idle for slot in slots):
        state.fleet.wayward.discard(backend)  # by age it would have been another


def mix(state: State, job: Job) -> None:
    """It was not seen where the job's request ran: perhaps in a slot of one that waits."""
    request = _request(job)
    computed = is_computed(job.sent_over, request.prompt)
    for slot in state.fleet.slots.of(job.slot.backend):
        if _waits_in(state, slot) is None:
            continue
        if computed and not may_hold(slot.resident, request.prompt):
            continue
        slot.resident = after_either(slot.resident, request.prompt)
        slot.declined = slot.declined or not request.reuse
        if slot.tenant != request.tenant:
            slot.tenant = NOBODY


def _is_free(state: State, job: Job) -> bool:
    """Nobody has the gate, and the server will take the slot that we mean."""
    backend = job.slot.backend
    if backend in state.fleet.gated and not job.gated:
        return False
    computed = _is_computed(state, job)
    others = (s for s in state.fleet.slots.of(backend) if job.lease_of(s.id) is None)
    return not any(_is_in_the_way(state, job, slot, computed) for slot in others)


def _is_in_the_way(state: State, job: Job, slot: Slot, computed: bool) -> bool:
    """The server may take this slot instead of the job's, and that would not do.

    1. Idle: the lease is moved there, if it is nobody else's.
    2. It runs: only until its answer ends, and only another tenant's.
    3. Somebody unknown uses it: nothing of ours is sent there.
    4. The job's prompt is not computed: it may be any that is not in use.
    5. Another who waits here: they change places, unless the other would lose by it.
    6. It has, or is getting, as much of the prompt as ours.
    """
    request = _request(job)
    if slot.is_idle or slot.phase is Phase.LOST:  # (1)
        return False
    if slot.phase is Phase.RUNNING:  # (2)
        return computed and tempts(slot, request, computed_first=True)
    holder = state.holder(slot)
    if holder is None or not holder.is_ours:  # (3)
        return not computed or tempts(slot, request, computed_first=True)
    other = _waits_in(state, slot)
    if not computed:  # (4)
        return other is None
    if other is not None:  # (5)
        own = state.fleet.slots[job.slot].resident
        theirs = _request(other).prompt
        loses = is_computed(slot.resident, theirs) and not may_hold(own, theirs)
        foreign = slot.tenant != request.tenant
        return may_hold(slot.resident, request.prompt) and (
            loses or (foreign and not may_hold(own, theirs))
        )
    is_probe = holder.request is None and holder.doing is None  # it may write anything there
    if is_probe or tempts(slot, request, computed_first=True):
        return True
    held = slot.resident
    if isinstance(holder.doing, PrefillStep):  # the slot is in use, and was not known to have it
        held = replace(held, unsure=False)
    return may_hold(held, request.prompt) or any(  # (6)
        will_hold(tokens, request.prompt) for tokens in (slot.pending, *_restored(state, holder))
    )


def _restored(state: State, job: Job) -> list[Tokens]:
    """What is restored into the job's slot, now or in a later step."""
    fleet = state.fleet
    # What is copied is in a slot that the job holds, until it is a snapshot.
    tokens = [fleet.slots[lease.slot].resident.tokens for lease in job.others]
    return tokens if job.using is None else [*tokens, fleet.catalog[job.using].tokens]


def _empty(state: State, job: Job, slots: list[Slot]) -> None:
    """Another tenant's tokens are emptied before the request is sent, and saved if that pays."""
    steps: deque[Step] = deque()
    for slot in slots:
        job.others.append(slot.lease(job.id))
        slot.taker = _request(job).tenant
        if saving_pays(state.fleet, slot)[2]:
            steps.append(SaveStep(slot.id, SaveReason.DISPLACED))
        steps.append(EraseStep(slot.id))
    job.steps = steps + job.steps


def _request(job: Job) -> Request:
    assert job.request is not None
    return job.request


def _is_computed(state: State, job: Job) -> bool:
    """The job's slot has most of its prompt, and the server would go by that."""
    fleet, request, backend = state.fleet, _request(job), job.slot.backend
    steers = fleet.gates_late(backend, request)
    return steers and is_computed(fleet.slots[job.slot].resident, request.prompt)


def _waits_in(state: State, slot: Slot) -> Job | None:
    """Whose slot it is, if that is one who waits at the gate."""
    job = state.holder(slot)
    waits = job is not None and isinstance(job.doing, AtGate) and job.slot == slot.id
    return job if waits else None


def _waiting(state: State) -> list[Job]:
    """Who waits at a gate, in the order in which they came; jobs that have ended are forgotten."""
    if not state.at_gate:
        return []
    jobs = [job for name in state.at_gate if (job := state.jobs.get(name)) is not None]
    jobs = [job for job in jobs if isinstance(job.doing, AtGate)]
    state.at_gate = [job.id for job in jobs]
    return jobs


def _tell(state: State) -> None:
    """Whoever would be in the way of these gets no slot there."""
    if not (state.at_gate or state.fleet.at_gate):
        return
    expected: dict[BackendId, list[Expected]] = {}
    for job in _waiting(state):
        one = Expected(_request(job), _is_computed(state, job))
        expected.setdefault(job.slot.backend, []).append(one)
    state.fleet.at_gate = expected


def _ends(state: State, job: Job) -> float | None:
    limit_s = state.queue.limits.deadline_s
    return None if limit_s is None else job.since - job.waited_s + limit_s
