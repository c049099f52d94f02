"""Of several long prompts on one backend the router has one computed at a time.

llama-server puts the prompts of all its slots into the same batches, and nobody gets a token
before a batch is over. Two prompts at once are both ready when the second could be; and one that
the router computes first is handed to its client just when the next batch has begun, and waits for
that as well. One after the other, the first is ready in half the time and the second no later.

A turn lasts until the first token, and ends by itself: `Slot.turn_until`.
"""

from router.core.fleet import Fleet
from router.core.jobs import Job, PrefillStep, TurnStep
from router.core.slots import Slot
from router.core.state import State
from router.tokens import Tokens, common_prefix, count
from router.types import BackendId, RequestId

# Nobody waits for longer than that for somebody else's piece: then both are computed side by side.
_LONGEST_S = 5.0
# A piece may take so many times as long as predicted.
_LATE = 2.0
# From when a prompt is computed to its first token; what takes longer is held up by something else.
_HANDED_OVER_S = 0.5


def get_in_line(state: State, job: Job, step: PrefillStep, now: float) -> bool:
    """The job is about to compute a prompt. Where that takes long and is not its turn, it waits."""
    above_s = state.fleet.policy.coalesce_above_s
    slot, backend = state.fleet.slots[job.slot], job.slot.backend
    if above_s is None or _has_turn(slot, now) or _left_s(state.fleet, slot, step.tokens) < above_s:
        return False
    if _taken_until(state.fleet, backend, now) is None and backend not in _lines(state):
        slot.turn_until = now + _LONGEST_S
        return False
    job.doing = TurnStep(step.tokens)
    state.in_line.append(job.id)
    return True


def next_ones(state: State, now: float) -> list[tuple[Job, PrefillStep]]:
    """Whose turn it is, one on each backend where nobody's is, and what they compute: who needs
    least, less what it has waited."""
    taken: list[tuple[Job, PrefillStep]] = []
    for backend, line in _lines(state).items():
        if _taken_until(state.fleet, backend, now) is None:
            job = min(line, key=lambda job: _need_s(state.fleet, job, now))
            assert isinstance(job.doing, TurnStep)
            state.in_line.remove(job.id)
            state.fleet.slots[job.slot].turn_until = now + _LONGEST_S
            taken.append((job, PrefillStep(job.doing.tokens)))
    return taken


def begin(slot: Slot, piece_s: float, now: float) -> None:
    """A slot whose turn it may be computes what is predicted to take `piece_s`."""
    if _has_turn(slot, now):
        slot.turn_until = now + min(_LATE * piece_s, _LONGEST_S)


def hand_over(slot: Slot, now: float, *, streams: bool) -> None:
    """The client's request is sent; nobody sees the first token of one that is no stream."""
    if _has_turn(slot, now):
        slot.turn_until = now + _HANDED_OVER_S if streams else 0.0


def begun(state: State, request: RequestId) -> None:
    """The first token is there."""
    job = state.jobs.get(request)
    if job is not None and state.fleet.slots.holds(job.lease):
        state.fleet.slots[job.slot].turn_until = 0.0


def next_end(state: State, now: float) -> float | None:
    """When the next turn ends that somebody waits for, in clock seconds."""
    ends = (_taken_until(state.fleet, backend, now) for backend in _lines(state))
    return min((end for end in ends if end is not None), default=None)


def _lines(state: State) -> dict[BackendId, list[Job]]:
    """Who waits, by backend; jobs that have ended are forgotten."""
    lines: dict[BackendId, list[Job]] = {}
    if not state.in_line:
        return lines
    waiting = [job for name in state.in_line if (job := state.jobs.get(name)) is not None]
    state.in_line = [job.id for job in waiting]
    for job in waiting:
        lines.setdefault(job.slot.backend, []).append(job)
    return lines


def _has_turn(slot: Slot, now: float) -> bool:
    return slot.turn_until > now


def _taken_until(fleet: Fleet, backend: BackendId, now: float) -> float | None:
    """When the backend's turn ends. None: nobody has it."""
    return max((s.turn_until for s in fleet.slots.of(backend) if _has_turn(s, now)), default=None)


def _need_s(fleet: Fleet, job: Job, now: float) -> float:
    """Who came with little is not to wait for who came with much, nor he forever."""
    assert isinstance(job.doing, TurnStep)
    return _left_s(fleet, fleet.slots[job.slot], job.doing.tokens) - (now - job.since)


def _left_s(fleet: Fleet, slot: Slot, tokens: Tokens) -> float:
    """Seconds to compute what a slot does not hold of `tokens`."""
    held = common_prefix(slot.resident.tokens, tokens)
    return fleet.rates[slot.id.backend].prefill_s(count(tokens) - held, held)
