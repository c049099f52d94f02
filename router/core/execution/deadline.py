"""Deadlines of the requests that wait: in the request queue, the prefill queue, at the gate.

`QueueLimits.deadline` is the rule.
"""

from math import inf

from router.base.errors import DeadlineError
from router.base.types import RequestId
from router.core.execution.state import State
from router.core.model.jobs import AtGate, InPrefillQueue, RequestJob

_WHAT: dict[type, str] = {InPrefillQueue: "its prefill", AtGate: "the placement gate"}


def reject_queued(state: State) -> None:
    """Reject the queued requests that have waited too long."""
    limit_s = state.queue.limits.deadline_s
    for waiting in state.queue.overdue(state.now):
        state.queue.remove(waiting.request.id)
        _reject(state, waiting.request.id, f"no slot came free within {limit_s:g} s")


def reject_late(state: State) -> list[RequestJob]:
    """Reject each request with a job that has waited too long; return the jobs, to be ended."""
    limit_s = state.queue.limits.deadline_s
    late = [job for job in _waiting(state) if _deadline(state, job) <= state.now]
    for job in late:
        what = _WHAT[type(job.doing)]
        _reject(state, job.id, f"the request waited {limit_s:g} s for {what}")
    return late


def wakeup(state: State) -> float:
    """Return when a job has waited too long, in clock seconds; inf: never."""
    ends = (_deadline(state, job) for job in _waiting(state))
    return min(ends, default=inf)


def _deadline(state: State, job: RequestJob) -> float:
    """Return when a job that waits will have waited too long."""
    assert isinstance(job.doing, InPrefillQueue | AtGate)
    return state.queue.limits.deadline(job.doing.since, job.waited_s + job.past_queue_s)


def _waiting(state: State) -> list[RequestJob]:
    """Return the jobs that wait, without the abandoned ones.

    An abandoned job waits for the sake of other requests: it is dropped when it gets the permit, if
    no request wants its result any more.
    """
    return [job for job in state.turns if not job.cancelled]


def _reject(state: State, request: RequestId, reason: str) -> None:
    state.reject(request, DeadlineError(f"{reason} (queue.deadline)"))
