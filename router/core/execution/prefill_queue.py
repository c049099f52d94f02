"""Of several long prompts on one backend the router has one computed at a time.

llama-server puts the prompts of all its slots into the same batches, and nobody gets a token
before a batch is over. Two prompts at once are both ready when the second could be; and one that
the router computes first is handed to its client just when the next batch has begun, and waits for
that as well. One after the other, the first is ready in half the time.

Who has the turn has it for a piece, while that is saved for others, and until the first token; and
it ends by itself: `Slot.turn_until`.

Whoever needs least has the next turn, less a part of the time that he has stood in line: that is
his rank. Nobody who comes later goes before one who has stood for `needs / PATIENCE`, so nobody
waits for ever. All of the time would be too much: a piece brings its prompt just as far as it
brings forward those who wait, so equals would stay equal, take turns piece by piece, and all be
ready when the last could be.
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

# A piece may take twice as long as predicted, or as long as predicted and that many seconds.
_LATE_S = 0.5, 5.0
# Nobody waits for longer than that for somebody else's: then both are computed side by side.
_LONGEST_S = 10.0
# From when a prompt is computed to its first token; what takes longer is held up by something else.
_HANDED_OVER_S = 0.5


def get_in_line(state: State, job: Job, step: PrefillStep, now: float) -> bool:
    """The job is about to compute a prompt or a piece of it: the turn that it had is over.

    1. It was called: it goes on.
    2. It does not take long: it goes on, with a turn of its own if the prompt does.
    3. Nobody has the turn or waits for it: it goes on.
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
    """Call the next on each backend where nobody has the turn."""
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
    """The job computes what is predicted to take `piece_s`."""
    slot.piece_until = now + piece_s
    if job.called:
        job.called = False
        least_s, most_s = _LATE_S
        late_s = min(max(piece_s, least_s), most_s)
        slot.turn_until = now + min(piece_s + late_s, _LONGEST_S)


def save(slot: Slot, save_s: float, now: float) -> None:
    """What was computed is saved for others before it is handed over."""
    if slot.turn_until > now:
        slot.turn_until += save_s


def hand_over(slot: Slot, now: float, *, streams: bool) -> None:
    """The client's request is sent; nobody sees the first token of one that is no stream."""
    if slot.turn_until > now:
        slot.turn_until = now + _HANDED_OVER_S if streams else 0.0


def begun(state: State, request: RequestId) -> None:
    """The first token is there."""
    job = state.jobs.get(request)
    if job is not None and state.fleet.slots.holds(job.lease):
        state.fleet.slots[job.slot].turn_until = 0.0


def broke_off(slot: Slot) -> None:
    """Of the piece that is computed in it the server computes no more than all."""
    slot.turn_until = min(slot.turn_until, slot.piece_until)


def give_up(state: State, now: float) -> list[Job]:
    """Tell those who have waited for too long, and let them stand in line no more."""
    late = [job for ends, job in _deadlines(state) if ends <= now]
    for job in late:
        state.in_line.remove(job.id)
        limit_s = state.queue.limits.deadline_s
        state.reject(job.id, DeadlineError(f"its prompt had no turn within {limit_s:g} s"))
    return late


def next_end(state: State) -> float | None:
    """When the next turn ends that somebody waits for, or his patience, in clock seconds; perhaps
    it has."""
    turns = [_ends(state.fleet, backend) for backend in _lines(state)]
    return min([*turns, *(ends for ends, _ in _deadlines(state))], default=None)


def _call(slot: Slot, job: Job, now: float) -> None:
    """It is this job's turn; what is to be saved before it begins is saved in it."""
    job.called = True
    slot.turn_until = now + _LONGEST_S


def _lines(state: State) -> dict[BackendId, list[Job]]:
    """Who waits, by backend; jobs that have ended are forgotten."""
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
    """Until when each of those who stand in line may, in clock seconds: what counts is the time in
    the queue and in line, not that in which its prompt was computed. Who stands there for others,
    its own client gone, is dropped at its turn if nobody wants that any more."""
    limit_s = state.queue.limits.deadline_s
    if limit_s is None or not state.in_line:
        return []
    jobs = [job for line in _lines(state).values() for job in line if not job.cancelled]
    return [(_waited_from(state.fleet.slots[job.slot], job) + limit_s, job) for job in jobs]


def _waited_from(slot: Slot, job: Job) -> float:
    """Since when it has waited, if it had done so in one piece; in clock seconds."""
    return (slot.stands_since or 0.0) - slot.stood_s - job.waited_s


def _ends(fleet: Fleet, backend: BackendId) -> float:
    """When the backend's turn ends, in clock seconds; 0 if nobody has it."""
    return max((slot.turn_until for slot in fleet.slots.of(backend)), default=0.0)


def _foretell(fleet: Fleet, line: list[Job], now: float) -> Job:
    """Who of those who wait on a backend is next. For those who want the same: when each will have
    computed his prompt, if nobody comes."""
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
