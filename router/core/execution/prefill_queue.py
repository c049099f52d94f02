"""Prefill queue: of several long prompts on one backend, compute one at a time.

llama-server puts the prompts of all its slots into the same batches, and no client gets a token
before a batch is over. Two prompts at once are both ready when the second could be. A prompt that
the router computes first is handed over just when the next batch has begun, and waits for that
batch as well. One after the other, the first prompt is ready in half the time.

A job holds the prefill permit for one prefill chunk, while the slot is saved for others, and until
the first token. The permit ends by itself: `Slot.permit_until`.

Shortest remaining prefill first, with aging: rank = remaining seconds - `PATIENCE` x seconds
waited. A later job never overtakes one that has waited for `remaining / PATIENCE`, so no job
starves. Counting all seconds waited would be too much: a chunk advances its own prompt by as much
as it advances the waiting ones. Equal prompts would stay equal, alternate chunk by chunk, and all
be ready when the last could be.
"""

from router.base.types import BackendId, RequestId
from router.core.execution.deadline import deadline, reject_late
from router.core.execution.state import State
from router.core.fleet.fleet import Fleet
from router.core.model.jobs import InPrefillQueue, Job, PrefillStep
from router.core.model.slots import Slot
from router.core.model.tuning import TUNING
from router.core.planning.prefill_wait import (
    before_s,
    prefill_ahead,
    prefill_queue_s,
    remaining_prefill_s,
    slot_ahead,
)


def end_last(state: State, job: Job) -> None:
    """End the last permit of a job that is about to compute another chunk."""
    if state.fleet.policy.coalesce_above_s is not None:
        slot = state.fleet.slots[job.slot]
        slot.end_permit()
        slot.begin_chunk(0.0)


def must_wait(state: State, job: Job, step: PrefillStep, now: float) -> bool:
    """Return whether a job without permit has to wait for it before it computes a chunk.

    It goes on if one of these holds:

    1. The chunk does not take long.
    2. No job holds the permit or waits for it.
    """
    fleet, backend = state.fleet, job.slot.backend
    if fleet.policy.coalesce_above_s is None or not _is_long(fleet, job, step):
        return False
    return _ends(fleet, backend) > now or any(
        one.slot.backend == backend for one in _waiting(state)
    )


def wait(state: State, job: Job, step: PrefillStep, now: float) -> None:
    """Let a job wait in the prefill queue."""
    job.do(InPrefillQueue(step.tokens))
    job.begin_wait(now)
    state.fleet.slots[job.slot].queue_prefill(now)
    state.in_prefill_queue.append(job.id)
    _foretell(state.fleet, _waiting_by_backend(state)[job.slot.backend], now)


def enter(state: State, job: Job, step: PrefillStep, now: float) -> None:
    """Give the permit to a job that need not wait, if it is free and the whole prompt is long."""
    fleet = state.fleet
    if fleet.policy.coalesce_above_s is None or _ends(fleet, job.slot.backend) > now:
        return
    if job.prefilled is not None or _is_long(fleet, job, step):
        _call(fleet.slots[job.slot], job, now)


def _is_long(fleet: Fleet, job: Job, step: PrefillStep) -> bool:
    own_s = remaining_prefill_s(fleet, fleet.slots[job.slot], step.tokens)
    return fleet.policy.is_long(own_s)


def take_next(state: State, now: float) -> list[tuple[Job, PrefillStep]]:
    """Give the permit to the next job where it is free; return these jobs and steps."""
    taken: list[tuple[Job, PrefillStep]] = []
    for backend, waiting_here in _waiting_by_backend(state).items():
        if _ends(state.fleet, backend) > now:
            continue
        job = _foretell(state.fleet, waiting_here, now)
        assert isinstance(job.doing, InPrefillQueue)
        state.in_prefill_queue.remove(job.id)
        slot = state.fleet.slots[job.slot]
        job.end_wait(now)
        job.stood(prefill_queue_s(slot, now))
        slot.leave_prefill_queue(job.prefill_queue_s)
        _call(slot, job, now)
        taken.append((job, PrefillStep(job.doing.tokens)))
    return taken


def begin(job: Job, slot: Slot, piece_s: float, now: float) -> None:
    """Note that the job starts to compute what is predicted to take `piece_s`."""
    slot.begin_chunk(now + piece_s)
    if job.has_permit:
        job.use_permit()
        least_s, most_s = TUNING.chunk_overrun_least_s, TUNING.chunk_overrun_most_s
        overrun_s = min(max(piece_s, least_s), most_s)
        slot.grant_permit(now + min(piece_s + overrun_s, TUNING.permit_longest_s))


def save(slot: Slot, save_s: float, now: float) -> None:
    """Extend the permit: the slot is saved for others before its request is sent."""
    if slot.permit_until > now:
        slot.extend_permit(save_s)


def hand_over(slot: Slot, now: float, *, streams: bool) -> None:
    """Note that the client's request is sent.

    Without `streams` the first token is not seen, so the permit ends now.
    """
    if slot.permit_until > now:
        slot.grant_permit(now + TUNING.handed_over_s if streams else 0.0)


def begun(state: State, request: RequestId) -> None:
    """End the permit of a request that has its first token."""
    job = state.jobs.get(request)
    if job is not None and state.fleet.slots.holds(job.lease):
        state.fleet.slots[job.slot].end_permit()


def broke_off(slot: Slot) -> None:
    """End the permit with the chunk: the server computes no more than all of it."""
    slot.end_permit(slot.chunk_until)


def give_up(state: State, now: float) -> list[Job]:
    """Reject the jobs past their deadline, and remove them from the prefill queue."""
    expired = [job for ends, job in _deadlines(state) if ends <= now]
    for job in expired:
        state.in_prefill_queue.remove(job.id)
        reject_late(state, job, "its prefill")
    return expired


def next_end(state: State) -> float | None:
    """Return when the next permit that jobs wait for ends, or a job's deadline passes.

    In clock seconds, and perhaps in the past. None: no job waits.
    """
    turns = [_ends(state.fleet, backend) for backend in _waiting_by_backend(state)]
    return min([*turns, *(ends for ends, _ in _deadlines(state))], default=None)


def _call(slot: Slot, job: Job, now: float) -> None:
    """Give the permit to the job; what is saved before its prefill falls under it."""
    job.call()
    slot.grant_permit(now + TUNING.permit_longest_s)


def _waiting_by_backend(state: State) -> dict[BackendId, list[Job]]:
    """Return the waiting jobs by backend; forget jobs that have ended."""
    by_backend: dict[BackendId, list[Job]] = {}
    if not state.in_prefill_queue:
        return by_backend
    waiting = _waiting(state)
    state.in_prefill_queue = [job.id for job in waiting]
    for job in waiting:
        by_backend.setdefault(job.slot.backend, []).append(job)
    return by_backend


def _waiting(state: State) -> list[Job]:
    """Return the jobs that wait in the prefill queue of any backend."""
    jobs = (state.jobs.get(name) for name in state.in_prefill_queue)
    return [job for job in jobs if job is not None and isinstance(job.doing, InPrefillQueue)]


def _deadlines(state: State) -> list[tuple[float, Job]]:
    """Return the waiting jobs with their deadlines, in clock seconds.

    An abandoned job waits for the sake of other requests: it is dropped when it gets the permit, if
    no request wants its result any more.
    """
    jobs = [job for job in _waiting(state) if not job.cancelled]
    return [(ends, job) for job in jobs if (ends := deadline(state, job)) is not None]


def _ends(fleet: Fleet, backend: BackendId) -> float:
    """Return when the backend's permit ends, in clock seconds; 0 if no job holds it."""
    return max((slot.permit_until for slot in fleet.slots.of(backend)), default=0.0)


def _foretell(fleet: Fleet, waiting_here: list[Job], now: float) -> Job:
    """Return the next of a backend's waiting jobs, and predict when each has its prompt.

    The prediction (`busy_until`) is for requests that want the same prompt, if no other job comes.
    """
    entries = [(prefill_ahead(fleet, fleet.slots[job.slot], now), job) for job in waiting_here]
    entries.sort(key=lambda entry: entry[0].rank_s)
    slots = fleet.prefilling(waiting_here[0].slot.backend)
    others = [
        a
        for slot in slots
        if slot.prefill_queued_since is None
        for a in slot_ahead(fleet, slot, now)
    ]
    total_s = 0.0
    for (rank_s, remaining_s), job in entries:
        total_s += remaining_s
        fleet.slots[job.slot].expect_end(now + before_s(others, rank_s) + total_s)
    return entries[0][1]
