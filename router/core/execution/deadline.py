"""The deadline of a request (`queue.deadline`): it counts waiting, and not computing.

A request waits in three places: the request queue, the prefill queue, the placement gate. The
request queue has the same rule in `Queue.overdue`: nothing is computed before.
"""

from router.base.errors import DeadlineError
from router.core.execution.state import State
from router.core.model.jobs import Job


def deadline(state: State, job: Job) -> float | None:
    """Return when a job that waits will have waited too long, in clock seconds.

    None: there is no limit, or it does not wait.
    """
    limit_s = state.queue.limits.deadline_s
    if limit_s is None or job.wait_since is None:
        return None
    return job.wait_since + limit_s - job.waited_s - job.past_waits_s


def reject_late(state: State, job: Job, what: str) -> None:
    """Reject a request that has waited too long; `what` it waited for."""
    limit_s = state.queue.limits.deadline_s
    error = DeadlineError(f"the request waited {limit_s:g} s for {what} (queue.deadline)")
    state.reject(job.id, error)
