"""Volatile slots: idle slots that a backend clears at every start.

See llama-server.md section 0.6. Their content is saved before a start. Slots that came free
meanwhile are checked after it.
"""

from collections.abc import Iterator

from router.base.tokens import count
from router.base.types import BackendId
from router.core.execution.state import State
from router.core.fleet.fleet import Fleet
from router.core.model.effects import SaveReason
from router.core.model.events import Quiet
from router.core.model.jobs import CheckSlotStep, Job, SaveStep
from router.core.model.slots import UNKNOWN, Phase, Slot
from router.core.model.tenancy import namespace_of
from router.core.planning.displacement import first_to_save

# Seconds. A slot not known as idle so soon is usually still at work: no start clears it.
_MOMENT_S = 0.1


def save_before_start(state: State, job: Job, now: float) -> None:
    """Make a save the job's next step, if its start would clear a slot worth saving.

    One slot at a time, until none is left.
    """
    backend = job.slot.backend
    if state.fleet.infos[backend].keeps_idle_slots or state.gives_up_content:
        return
    slot = first_to_save(state.fleet, backend, now)
    if slot is not None:
        job.others.append(slot.lease(job.id))
        job.steps.appendleft(SaveStep(slot.id, SaveReason.IDLE))


def check_before_start(state: State, job: Job) -> None:
    """Check the slots that came free since the job's prefill was sent.

    The prefill may have cleared them. Those that are intact stay so until the job's next start.
    """
    for slot in state.volatile_slots(job.slot.backend):
        job.others.append(slot.lease(job.id))
        job.steps.appendleft(CheckSlotStep(slot.id))


def slot_checked(state: State, job: Job, step: CheckSlotStep, event: Quiet) -> None:
    """Keep the content of a checked slot if its length is as before; else drop it."""
    lease = job.lease_of(step.slot)
    assert lease is not None
    job.others.remove(lease)
    slot = state.fleet.slots[step.slot]
    if event.n_tokens == len(slot.resident):
        slot.release(lease, slot.resident, slot.last_used)
    else:
        state.fleet.give_up(slot)
        slot.release(lease, UNKNOWN, slot.last_used)


def awaits_abandoned_slot(fleet: Fleet, backend: BackendId, now: float) -> bool:
    """Return True if a slot is about to be known as idle, and is worth the wait for that.

    A start now would clear the slot if it is idle already. Waiting costs less than computing its
    content again.
    """
    info, rates = fleet.infos[backend], fleet.rates[backend]
    for slot in about_to_be_idle(fleet, backend, now):
        namespace = namespace_of(info, slot.next_tenant)
        kept = fleet.catalog.covered(namespace, slot.pending)
        loss_s = rates.prefill_s(count(slot.pending) - kept, kept)
        if slot.busy_until - now < fleet.policy.reuse_probability * loss_s:
            return True
    return False


def abandoned_wait_ends(fleet: Fleet, now: float) -> float | None:
    """Return when the wait for the next such slot ends, in clock seconds."""
    slots = (slot for backend in fleet.infos for slot in about_to_be_idle(fleet, backend, now))
    return min((slot.busy_until for slot in slots), default=None)


def about_to_be_idle(fleet: Fleet, backend: BackendId, now: float) -> Iterator[Slot]:
    """Yield the slots that are about to be known as idle.

    Only on a backend that clears idle slots.
    """
    if fleet.infos[backend].keeps_idle_slots or not fleet.slots.phases(backend)[Phase.ABANDONED]:
        return
    for slot in fleet.slots.of(backend):
        if slot.phase is Phase.ABANDONED and now < slot.busy_until <= now + _MOMENT_S:
            yield slot
