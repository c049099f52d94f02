"""Prefill queue: of several long prompts on one backend, compute one at a time.

llama-server puts the prompts of all its slots into the same batches, and no client gets a token
before a batch is over. Two prompts at once are both ready when the second could be. A prompt that
the router computes first is handed over just when the next batch has begun, and waits for that
batch as well. One after the other, the first prompt is ready in half the time.

A job holds the prefill permit for one prefill chunk, while the slot is saved for others, and until
the first token. The permit ends by itself (`PrefillQueue.permit_until`).

Shortest remaining prefill first, with aging: rank = remaining seconds - `PATIENCE` x seconds
waited. A later job never overtakes one that has waited for `remaining / PATIENCE`, so no job
starves. Counting all seconds waited would be too much: a chunk advances its own prompt by as much
as it advances the waiting ones. Equal prompts would stay equal, alternate chunk by chunk, and all
be ready when the last could be.
"""

from math import inf

from msgspec.structs import replace

from router.base.tokens import Tokens
from router.base.types import RequestId
from router.core.execution.state import State
from router.core.inventory.inventory import Inventory
from router.core.model.backend import PrefillQueue
from router.core.model.jobs import InPrefillQueue, RequestJob
from router.core.model.tuning import TUNING
from router.core.planning.prefill import before_s, prefill_ahead, remaining_prefill_s, slot_ahead


def must_wait(state: State, job: RequestJob, tokens: Tokens) -> bool:
    """Return whether a job has to wait for the permit before it computes a chunk.

    It goes on if one of these holds:

    1. The chunk does not take long.
    2. No other job holds the permit, and none waits for it.
    """
    inventory, queue = state.inventory, _queue(job)
    if not _is_long(inventory, job, tokens):
        return False
    taken = queue.holder != job.id and state.now < queue.permit_until
    return taken or bool(queue.waiting)


def wait(state: State, job: RequestJob) -> None:
    """Let a job wait in the prefill queue; the permit of its last chunk ends."""
    queue = _queue(job)
    job.begin_chunk(0.0)
    job.do(InPrefillQueue(state.now))
    queue.wait(job)
    _predict_order(state, queue)


def take_next(state: State) -> list[RequestJob]:
    """Give the permit to the next job where it is free; return these jobs."""
    taken: list[RequestJob] = []
    for backend in state.inventory.up.values():
        queue = backend.prefills
        if queue.waiting and queue.permit_until <= state.now:
            job = _predict_order(state, queue)
            queue.grant(job, state.now + TUNING.permit_longest_s)
            job.leave_prefill_queue(state.now)
            taken.append(job)
    return taken


def enter(state: State, job: RequestJob, tokens: Tokens) -> None:
    """Give the permit to a job that need not wait, if it is free and the whole prompt is long."""
    queue = _queue(job)
    if state.inventory.policy.coalesce_above_s is None:
        return
    queue.end_permit(job)  # of its last chunk
    long = job.prefilled is not None or _is_long(state.inventory, job, tokens)
    if long and queue.permit_until <= state.now:
        queue.grant(job, state.now + TUNING.permit_longest_s)


def begin(state: State, job: RequestJob, piece_s: float) -> None:
    """Note that the job starts to compute what is predicted to take `piece_s`.

    Its permit, if it has one, ends then, or a little later.
    """
    queue = _queue(job)
    job.begin_chunk(state.now + piece_s)
    if queue.has_permit(job, state.now):
        least_s, most_s = TUNING.chunk_overrun_least_s, TUNING.chunk_overrun_most_s
        overrun_s = min(max(piece_s, least_s), most_s)
        queue.grant(job, state.now + min(piece_s + overrun_s, TUNING.permit_longest_s))


def save(state: State, job: RequestJob, save_s: float) -> None:
    """Extend the permit: the slot is saved for others before its request is sent."""
    queue = _queue(job)
    if queue.has_permit(job, state.now):
        queue.grant(job, queue.permit_until + save_s)


def hand_over(state: State, job: RequestJob) -> None:
    """Note that the client's request is sent.

    Unless it streams, the first token is not seen, so the permit ends now.
    """
    queue = _queue(job)
    if queue.has_permit(job, state.now):
        queue.grant(job, state.now + TUNING.handed_over_s if job.request.streams else 0.0)


def begun(state: State, request: RequestId) -> None:
    """End the permit of a request that has its first token."""
    if (job := state.request_job(request)) is not None:
        _queue(job).end_permit(job)


def broke_off(state: State, job: RequestJob) -> None:
    """End the permit with the chunk: the server computes no more than all of it."""
    _queue(job).end_permit(job, job.chunk_until)


def wakeup(state: State) -> float:
    """Return when the next permit that jobs wait for ends, in clock seconds; inf: never."""
    queues = [backend.prefills for backend in state.inventory.up.values()]
    return min((queue.permit_until for queue in queues if queue.waiting), default=inf)


def _queue(job: RequestJob) -> PrefillQueue:
    return job.own.backend.prefills


def _is_long(inventory: Inventory, job: RequestJob, tokens: Tokens) -> bool:
    return inventory.policy.is_long(remaining_prefill_s(inventory, job.own, tokens))


def _predict_order(state: State, queue: PrefillQueue) -> RequestJob:
    """Return the next of a backend's waiting jobs, and predict when each has its prompt.

    The prediction (`busy_until`) is for requests that want the same prompt, if no other job comes.
    """
    inventory = state.inventory
    entries = [(prefill_ahead(inventory, job.own, state.now), job) for job in queue.waiting]
    entries.sort(key=lambda entry: entry[0].rank_s)
    others = [
        part
        for slot in queue.waiting[0].own.backend.prefilling
        if slot.job not in queue.waiting
        for part in slot_ahead(inventory, slot, state.now)
    ]
    total_s = 0.0
    for (rank_s, remaining_s), job in entries:
        total_s += remaining_s
        slot = job.own
        slot.do(replace(slot.work, busy_until=state.now + before_s(others, rank_s) + total_s))
    return entries[0][1]
