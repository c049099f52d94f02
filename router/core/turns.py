"""Of several long prompts on one backend the router has one computed at a time.

llama-server puts the prompts of all its slots into the same batches, and nobody gets a token
before a batch is over. Two prompts at once are both ready when the second could be; and one that
the router computes first is handed to its client just when the next batch has begun, and waits for
that as well. One after the other, the first is ready in half the time.

Who has the turn has it for a piece, while that is saved for others, and until the first token; and
it ends by itself: `Slot.turn_until`.
"""

from router.core.fleet import Fleet
from router.core.jobs import InLine, Job, PrefillStep
from router.core.slots import Slot
from router.core.state import State
from router.tokens import Tokens, common_prefix, count
from router.types import BackendId, RequestId

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
    slot.turn_until = 0.0
    own_s = seconds_left(fleet, slot, step.tokens)
    is_long, is_free = fleet.policy.is_long(own_s), _ends(fleet, backend) <= now
    if not is_long or (is_free and backend not in _lines(state)):
        if is_free and (is_long or job.prefilled is not None):
            _call(slot, job, now)
        return False
    slot.busy_until = now + fleet.line_s(backend, now, slot) + own_s
    job.doing = InLine(step.tokens, now)
    state.in_line.append(job.id)
    return True


def take_next(state: State, now: float) -> list[tuple[Job, PrefillStep]]:
    """Call the next on each backend where nobody has the turn: who needs least, less what he has
    waited here. Who came with little does not wait for much, nor he who came with much for ever."""
    taken: list[tuple[Job, PrefillStep]] = []
    for backend, line in _lines(state).items():
        if _ends(state.fleet, backend) > now:
            continue
        job = min(line, key=lambda job: _left_s(state.fleet, job) - _stood_s(job, now))
        assert isinstance(job.doing, InLine)
        state.in_line.remove(job.id)
        job.stood_s = _stood_s(job, now)
        _call(state.fleet.slots[job.slot], job, now)
        taken.append((job, PrefillStep(job.doing.tokens)))
    return taken


def begin(job: Job, slot: Slot, piece_s: float, now: float) -> None:
    """The job computes what is predicted to take `piece_s`."""
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


def next_end(state: State) -> float | None:
    """When the next turn ends that somebody waits for, in clock seconds; perhaps it has."""
    return min((_ends(state.fleet, backend) for backend in _lines(state)), default=None)


def seconds_left(fleet: Fleet, slot: Slot, tokens: Tokens) -> float:
    """What computing these takes on top of what the slot holds of them."""
    n, common = count(tokens), common_prefix(slot.resident.tokens, tokens)
    there = fleet.reusable(slot, n, common)
    return fleet.rates[slot.id.backend].prefill_s(n - there, there)


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


def _ends(fleet: Fleet, backend: BackendId) -> float:
    """When the backend's turn ends, in clock seconds; 0 if nobody has it."""
    return max((slot.turn_until for slot in fleet.slots.of(backend)), default=0.0)


def _left_s(fleet: Fleet, job: Job) -> float:
    assert isinstance(job.doing, InLine)
    return seconds_left(fleet, fleet.slots[job.slot], job.doing.tokens)


def _stood_s(job: Job, now: float) -> float:
    assert isinstance(job.doing, InLine)
    return job.stood_s + now - job.doing.since
