"""Detach backends, one at a time or because the configuration was read again."""

from math import inf

from msgspec.structs import replace

from router.base.types import BackendId
from router.core.admission.backend_attach import probe_name, prove
from router.core.execution.job_ends import lose_backend
from router.core.execution.state import State
from router.core.model.effects import Detach, StopServer
from router.core.model.policy import Policy, SnapshotLimits
from router.core.model.request_queue import QueueLimits
from router.core.model.servers import ServerPhase
from router.core.model.slots import Phase


def begin(state: State, backend: BackendId) -> None:
    """Begin to drain a backend: it gets nothing new, and is detached once its jobs are over.

    Its slots are considered for a save once more: now or never.
    """
    state.inventory.draining.add(backend)
    state.idle_saves_at = -inf
    for slot in state.inventory.slots.of(backend):
        slot.hold(replace(slot.content, save_decided=False))


def detach(state: State) -> None:
    """Detach the drained backends that are done: no slot is held, and no save is left to do.

    Called after the idle saves: were one left to do, its job would hold a slot now. To the
    scheduler a detached backend is like one that is down.
    """
    ours = (job for job in state.inventory.jobs.values() if job.is_ours)  # others may never end
    held = {slot.id.backend for job in ours for slot in job.held}
    for backend in sorted(state.inventory.draining - held):
        if (there := state.inventory.up.get(backend)) is not None:
            prove(state, there)
            if probe_name(backend) in state.inventory.jobs:
                continue
        state.inventory.draining.remove(backend)
        lose_backend(state, backend)
        state.out.append(Detach(backend))
        server = state.inventory.servers.by_name.get(backend)
        if server is not None and server.phase is ServerPhase.LEAVING:
            server.stop(state.now)
            state.out.append(StopServer(backend))


def prove_all(state: State) -> None:
    """Order probes of what was not probed before the router stops, where nothing runs any more."""
    for backend in state.inventory.up.values():
        phases = backend.phases
        if phases[Phase.IDLE] == len(backend.slots):
            prove(state, backend)


def undrained(state: State, backend: BackendId) -> None:
    """Keep a backend that is still draining."""
    state.inventory.draining.discard(backend)


def removed(state: State, backend: BackendId) -> None:
    """Forget a detached backend: its name may be used for another one."""
    state.inventory.forget(backend)


def configured(state: State, policy: Policy, limits: SnapshotLimits, queue: QueueLimits) -> None:
    """Adopt another policy and other limits.

    What exceeds the limits is evicted little by little.
    """
    state.inventory.policy = policy
    state.queue.limits = queue
    state.inventory.catalog.limits = limits
    state.delete(state.inventory.catalog.shrink())
