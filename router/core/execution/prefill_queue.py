"""Prefill queue: of several long prompts on one backend, compute one at a time.

llama-server puts the prompts of all its slots into the same batches, and no client gets a token
before a batch is over. Two prompts at once are both ready when the second could be. A prompt that
the router computes first is handed over just when the next batch has begun, and waits for that
batch as well. One after the other, the first prompt is ready in half the time.

A job holds the prefill permit for one prefill chunk, while the slot is saved for others, and until
the first token. The permit ends by itself: `Slot.turn_until`.

Shortest remaining prefill first, with aging: rank = remaining seconds - `PATIENCE` x seconds
waited. A later job never overtakes one that has waited for `remaining / PATIENCE`, so no job
starves. Counting all seconds waited would be too much: a chunk advances its own prompt by as much
as it advances the waiting ones. Equal prompts would stay equal, alternate chunk by chunk, and all
be ready when the last could be.
"""

from router.base.errors import DeadlineError
from router.base.types import BackendId, RequestId
from router.core.execution.state import State
from router.core.fleet.fleet import Fleet
from router.core.model.jobs import InLine, Job, PrefillStep
from router.core.model.slots import Slot
from router.core.planning.prefill_wait import (
    before_s,
    prefill_ahead,
    seconds_left,
    slot_ahead,
    stood_s,
)

# A chunk may be late by as much as it was predicted to take, within these limits in seconds.
_LATE_S = 0.5, 5.0
# No job waits longer than this for another's prefill: then both are computed side by side.
_LONGEST_S = 10.0
# From the end of a prefill to the first token; a longer delay has another cause.
_HANDED_OVER_S = 0.5


def get_in_line(state: State, job: Job, step: PrefillStep, now: float) -> bool:
    """Queue a job that is about to compute a prefill chunk; its last permit is over.

    Return True if the job has to wait. It goes on if one of these holds:

    1. The job was given the permit.
    2. The chunk does not take long. The job gets the permit if the whole prompt does.
    3. No job holds the permit or waits for it.
    """
    fleet, slot, backend = state.fleet, state.fleet.slots[job.slot], job.slot.backend
    if job.called or fleet.policy.coalesce_above_s is None:
        return False
    slot.turn_until, slot.piece_until = 0.0, 0.0
    own_s = seconds_left(fleet, slot, step.tokens)
    is_long, is_free = fleet.policy.is_long(own_s), _ends(fleet, backend) <= now
    if not is_long or (is_free and backend not in _lines(state)):
        if is_free and (is_long or job.prefilled is not None):
            _call(slot, job, now)
        return False
    job.doing, slot.stands_since = InLine(step.tokens), now
    state.in_line.append(job.id)
    _foretell(fleet, _lines(state)[backend], now)
    return True


def take_next(state: State, now: float) -> list[tuple[Job, PrefillStep]]:
    """Give the permit to the next job where it is free; return these jobs and steps."""
    taken: list[tuple[Job, PrefillStep]] = []
    for backend, line in _lines(state).items():
        if _ends(state.fleet, backend) > now:
            continue
        job = _foretell(state.fleet, line, now)
        assert isinstance(job.doing, InLine)
        state.in_line.remove(job.id)
        slot = state.fleet.slots[job.slot]
        job.stood_s = slot.stood_s = stood_s(slot, now)
        slot.stands_since = None
        _call(slot, job, now)
        taken.append((job, PrefillStep(job.doing.tokens)))
    return taken


def begin(job: Job, slot: Slot, piece_s: float, now: float) -> None:
    """Note that the job starts to compute what is predicted to take `piece_s`."""
    slot.piece_until = now + piece_s
    if job.called:
        job.called = False
        least_s, most_s = _LATE_S
        late_s = min(max(piece_s, least_s), most_s)
        slot.turn_until = now + min(piece_s + late_s, _LONGEST_S)


def save(slot: Slot, save_s: float, now: float) -> None:
    """Extend the permit: the slot is saved for others before its request is sent."""
    if slot.turn_until > now:
        slot.turn_until += save_s


def hand_over(slot: Slot, now: float, *, streams: bool) -> None:
    """Note that the client's request is sent.

    Without `streams` the first token is not seen, so the permit ends now.
    """
    if slot.turn_until > now:
        slot.turn_until = now + _HANDED_OVER_S if streams else 0.0


def begun(state: State, request: RequestId) -> None:
    """End the permit of a request that has its first token."""
    job = state.jobs.get(request)
    if job is not None and state.fleet.slots.holds(job.lease):
        state.fleet.slots[job.slot].turn_until = 0.0


def broke_off(slot: Slot) -> None:
    """End the permit with the chunk: the server computes no more than all of it."""
    slot.turn_until = min(slot.turn_until, slot.piece_until)


def give_up(state: State, now: float) -> list[Job]:
    """Reject the jobs past their deadline, and remove them from the prefill queue."""
    late = [job for ends, job in _deadlines(state) if ends <= now]
    for job in late:
        state.in_line.remove(job.id)
        limit_s = state.queue.limits.deadline_s
        state.reject(
            job.id,
            DeadlineError(f"the request waited {limit_s:g} s for its prefill (queue.deadline)"),
        )
    return late


def next_end(state: State) -> float | None:
    """Return when the next permit that jobs wait for ends, or a job's deadline passes.

    In clock seconds, and perhaps in the past. None: no job waits.
    """
    turns = [_ends(state.fleet, backend) for backend in _lines(state)]
    return min([*turns, *(ends for ends, _ in _deadlines(state))], default=None)


def _call(slot: Slot, job: Job, now: float) -> None:
    """Give the permit to the job; what is saved before its prefill falls under it."""
    job.called = True
    slot.turn_until = now + _LONGEST_S


def _lines(state: State) -> dict[BackendId, list[Job]]:
    """Return the waiting jobs by backend; forget jobs that have ended."""
    lines: dict[BackendId, list[Job]] = {}
    if not state.in_line:
        return lines
    waiting = [job for name in state.in_line if (job := state.jobs.get(name)) is not None]
    waiting = [job for job in waiting if isinstance(job.doing, InLine)]
    state.in_line = [job.id for job in waiting]
    for job in waiting:
        lines.setdefault(job.slot.backend, []).append(job)
    return lines


def _deadlines(state: State) -> list[tuple[float, Job]]:
    """Return the waiting jobs with their deadlines, in clock seconds.

    Time in the queue and in the prefill queue counts, and prefill time does not. An abandoned job
    waits for the sake of other requests: it is dropped when it gets the permit, if no request wants
    its result any more.
    """
    limit_s = state.queue.limits.deadline_s
    if limit_s is None or not state.in_line:
        return []
    jobs = [job for line in _lines(state).values() for job in line if not job.cancelled]
    return [(_waited_from(state.fleet.slots[job.slot], job) + limit_s, job) for job in jobs]


def _waited_from(slot: Slot, job: Job) -> float:
    """Return when the wait would have begun in one stretch, in clock seconds."""
    return (slot.stands_since or 0.0) - slot.stood_s - job.waited_s


def _ends(fleet: Fleet, backend: BackendId) -> float:
    """Return when the backend's permit ends, in clock seconds; 0 if no job holds it."""
    return max((slot.turn_until for slot in fleet.slots.of(backend)), default=0.0)


def _foretell(fleet: Fleet, line: list[Job], now: float) -> Job:
    """Return the next of a backend's waiting jobs, and predict when each has its prompt.

    The prediction (`busy_until`) is for requests that want the same prompt, if no other job comes.
    """
    places = [(prefill_ahead(fleet, fleet.slots[job.slot], now), job) for job in line]
    places.sort(key=lambda place: place[0].rank_s)
    slots = fleet.prefilling(line[0].slot.backend)
    others = [
        a for slot in slots if slot.stands_since is None for a in slot_ahead(fleet, slot, now)
    ]
    line_s = 0.0
    for (rank_s, left_s), job in places:
        line_s += left_s
        fleet.slots[job.slot].busy_until = now + before_s(others, rank_s) + line_s
    return places[0][1]
