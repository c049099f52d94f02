"""Where every start empties the idle slots (llama-server.md section 0.6): what they hold is saved
before, and what came free meanwhile is looked for after.
"""

from collections.abc import Iterator

from router.base.tokens import count
from router.base.types import BackendId
from router.core.execution.state import State
from router.core.fleet.fleet import Fleet
from router.core.model.effects import SaveReason
from router.core.model.events import Quiet
from router.core.model.jobs import Job, LookStep, SaveStep
from router.core.model.slots import UNKNOWN, Phase, Slot
from router.core.model.tenancy import namespace_of
from router.core.planning.displacement import first_to_save

# What is not known so soon is still at work as a rule, and no start empties it.
_MOMENT_S = 0.1


def save_before_start(state: State, job: Job, now: float) -> None:
    """The job is about to start something: if that empties a slot whose content is worth a save,
    the save is its next step. One after the other, until there is none."""
    backend = job.slot.backend
    if state.fleet.infos[backend].keeps_idle_slots or state.gives_up_content:
        return
    slot = first_to_save(state.fleet, backend, now)
    if slot is not None:
        job.others.append(slot.lease(job.id))
        job.steps.appendleft(SaveStep(slot.id, SaveReason.IDLE))


def look_before_start(state: State, job: Job) -> None:
    """The job's prefill is over. What came free since it was sent may have been emptied by it, or
    be there still, until the job starts the next thing: look first."""
    for slot in state.fleeting(job.slot.backend):
        job.others.append(slot.lease(job.id))
        job.steps.appendleft(LookStep(slot.id))


def looked(state: State, job: Job, step: LookStep, event: Quiet) -> None:
    """A slot that came free during the job's prefill is what it was, if it is as long."""
    lease = job.lease_of(step.slot)
    assert lease is not None
    job.others.remove(lease)
    slot = state.fleet.slots[step.slot]
    if event.n_tokens == len(slot.resident):
        slot.release(lease, slot.resident, slot.last_used)
    else:
        state.fleet.give_up(slot)
        slot.release(lease, UNKNOWN, slot.last_used)


def is_settling(fleet: Fleet, backend: BackendId, now: float) -> bool:
    """A slot is about to be known to be idle, and a start would empty it if it is idle already:
    waiting costs less than computing again what it holds."""
    info, rates = fleet.infos[backend], fleet.rates[backend]
    for slot in let_go(fleet, backend, now):
        namespace = namespace_of(info, slot.taker)
        kept = fleet.catalog.covered(namespace, slot.pending)
        loss_s = rates.prefill_s(count(slot.pending) - kept, kept)
        if slot.busy_until - now < fleet.policy.reuse_probability * loss_s:
            return True
    return False


def settled(fleet: Fleet, now: float) -> float | None:
    """When the next slot is not waited for any more, in clock seconds."""
    slots = (slot for backend in fleet.infos for slot in let_go(fleet, backend, now))
    return min((slot.busy_until for slot in slots), default=None)


def let_go(fleet: Fleet, backend: BackendId, now: float) -> Iterator[Slot]:
    """Where a start empties idle slots: those that are about to be known to be idle."""
    if fleet.infos[backend].keeps_idle_slots or not fleet.slots.phases(backend)[Phase.DRAINING]:
        return
    for slot in fleet.slots.of(backend):
        if slot.phase is Phase.DRAINING and now < slot.busy_until <= now + _MOMENT_S:
            yield slot
