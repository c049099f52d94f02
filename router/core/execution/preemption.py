"""Preemption: a request that can wait gives its slot to one that cannot, at its next boundary.

The boundaries are the ends of prefill chunks, and of the slices of an answer (`llama/slices.py`).
What was computed stays in the slot, is saved when another request displaces it, and the rest of the
request is queued before all other background requests (docs/adr/0028).
"""

from msgspec.structs import replace

from router.base.types import RequestId
from router.core.execution.job_ends import end, keep_for_rest
from router.core.execution.state import State
from router.core.model.jobs import RequestJob
from router.core.planning.displacement import keeps_snapshots


def must_yield(state: State, request: RequestId) -> bool:
    """Return whether a running request is to give its slot to another at its next boundary.

    Only if another one gets further by it: it cannot wait, and no slot is free for it; and only if
    the state can be saved, so that nothing of it is computed again.
    """
    job = state.request_job(request)
    if job is None or not job.request.background or state.stopping:
        return False
    if not state.inventory.slots.holds(job.lease):
        return False
    backend = state.backend_of(job)
    if not keeps_snapshots(state.inventory, backend):
        return False
    free = backend.slots.has_idle and backend.may_run_more
    return any(
        not waiting.request.background
        and not (free and waiting.request.takes_one_slot)
        and state.inventory.serves(backend, waiting.request)
        for waiting in state.queue
    )


def put_back(state: State, job: RequestJob, now: float) -> None:
    """Queue a request again that is not sent yet, and release its slot."""
    end(state, job, now)
    keep_for_rest(state, job)
    state.queue.add(replace(job.request, goes_on=True), now, job.prefilled)
