"""Backends that are let go of, one at a time or because the configuration was read again."""

from router.base.types import BackendId
from router.core.execution.completion import lose_backend
from router.core.execution.state import State
from router.core.model import events as ev
from router.core.model.effects import Release


def begin(state: State, backend: BackendId) -> None:
    """Nothing new for a backend. What its slots hold is worth a file now or never."""
    state.fleet.draining.add(backend)
    for slot in state.fleet.slots.of(backend):
        slot.saved = False


def release(state: State, now: float) -> None:
    """Let go of the backends that are done: nobody holds a slot, and no save is left to do.

    Called when the saves in the background have had their turn: were there one to do, its job
    would hold a slot now. To the scheduler such a backend is like one that is down.
    """
    ours = (job for job in state.jobs.values() if job.is_ours)  # others may never be done
    leases = (x for job in ours for x in (job.lease, *job.others))
    held = {lease.slot.backend for lease in leases}
    for backend in sorted(state.fleet.draining - held):
        state.fleet.draining.remove(backend)
        lose_backend(state, backend, now)
        state.out.append(Release(backend))


def configured(state: State, event: ev.Configured) -> None:
    """Decide by another policy and other limits; what is over them goes, little by little."""
    state.fleet.policy = event.policy
    state.queue.limits = event.queue
    state.fleet.catalog.limits = event.limits
    state.delete(state.fleet.catalog.shrink())
