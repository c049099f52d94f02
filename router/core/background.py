"""Saving what idle slots hold while nobody is kept waiting by it."""

from router.core.effects import SaveReason
from router.core.jobs import Job, SaveStep
from router.core.planner import saving_pays
from router.core.slots import Phase, Slot
from router.core.state import State
from router.core.steps import next_step
from router.types import BackendId, RequestId


def save_idle(state: State, now: float) -> None:
    """Save slots whose content is worth it, one a backend at a time.

    1. Idle for long enough on a backend where nothing runs: costs nobody anything.
    2. On a backend whose idle slots are emptied by the next start: at once, or never.
    3. The router is stopping: all that is worth it.
    """
    if state.stopping and not state.saves_on_stop:
        return
    after_s = state.fleet.policy.idle_save_after_s
    for backend, info in state.fleet.infos.items():
        if backend in state.fleet.gated or not _is_calm(state, backend):
            continue
        for slot in state.fleet.slots.of(backend):
            due = after_s is not None and now - slot.last_used >= after_s
            if not (due or state.stopping or not info.keeps_idle_slots):
                continue
            if _is_open(slot):
                if saving_pays(state.fleet, slot)[2]:
                    _save(state, slot, now)
                    break
                slot.saved = True


def wakeup(state: State) -> float | None:
    """When the next slot has been idle for long enough, in clock seconds."""
    after_s = state.fleet.policy.idle_save_after_s
    if after_s is None or state.stopping or not state.fleet.policy.moves_kv:
        return None
    times = [
        slot.last_used + after_s
        for backend in state.fleet.infos
        if _is_calm(state, backend)
        for slot in state.fleet.slots.of(backend)
        if _is_open(slot)
    ]
    return min(times, default=None)


def _is_open(slot: Slot) -> bool:
    return slot.is_idle and not slot.saved and len(slot.resident) > 0


def _is_calm(state: State, backend: BackendId) -> bool:
    """No stream would be stopped by a save, and no preparation disturbed."""
    return not any(
        slot.phase in (Phase.RUNNING, Phase.PREPARING) for slot in state.fleet.slots.of(backend)
    )


def _save(state: State, slot: Slot, now: float) -> None:
    state.saves += 1
    job = Job(
        id=RequestId(f"save-{state.saves}"), lease=slot.lease(RequestId(f"save-{state.saves}"))
    )
    job.since = now
    # Who wants this very content can wait the moment that it takes.
    slot.pending, slot.sharing = slot.resident.tokens, True
    slot.busy_until = now + state.fleet.rates[slot.id.backend].save_s(len(slot.resident))
    job.steps.append(SaveStep(slot.id, SaveReason.IDLE))
    state.jobs[job.id] = job
    next_step(state, job, now)
