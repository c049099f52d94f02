"""Preemption: a request that can wait gives its slot to one that cannot, at its next boundary.

The boundaries are the ends of prefill chunks, and of the slices of an answer (`llama/slices.py`).
What was computed stays in the slot, is saved when another request displaces it, and the rest of the
request is queued before all other background requests (docs/adr/0028).
"""

from msgspec.structs import replace

from router.base.types import RequestId, SlotId
from router.core.execution.job_ends import end, keep_for_rest
from router.core.execution.state import State
from router.core.model.jobs import RequestJob


def is_kept_from(state: State, slot: SlotId) -> bool:
    """Return whether a request that cannot wait is queued, and could use the slot's backend."""
    backend = state.inventory.backend_of(slot)
    return any(
        not waiting.request.background and state.inventory.serves(backend, waiting.request)
        for waiting in state.queue
    )


def must_yield(state: State, request: RequestId) -> bool:
    """Return whether a running request is to give its slot to another at its next boundary."""
    job = state.request_job(request)
    if job is None or not job.request.background or not state.inventory.slots.holds(job.lease):
        return False
    return is_kept_from(state, job.slot)


def put_back(state: State, job: RequestJob, now: float) -> None:
    """Queue a request again that is not sent yet, and release its slot."""
    end(state, job, now)
    keep_for_rest(state, job)
    state.queue.add(replace(job.request, goes_on=True), now, job.prefilled)
