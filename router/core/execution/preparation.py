"""What a job does before its request is sent, as one line of orders that are awaited.

`prepare` has the whole way. Each order goes to the engine, and its result comes back to where it
was awaited; in between, anything may happen to the job (`_still`). A failed step does not fail the
request, except an erase: what is left of the plan is a cold prefill on the same lease.
"""

from collections.abc import Coroutine, Generator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec.structs import replace

from router.base.errors import NoBackendError
from router.base.tokens import EMPTY, Tokens, common_prefix, count, head, media_of
from router.base.types import MemoryKind, Reported, RequestId, Snapshot, SnapshotId, Source, Stall
from router.core.execution import deadline, placement_gate, prefill_queue
from router.core.execution.job_ends import end
from router.core.execution.resident_updates import after_prefill, after_quiet, compare
from router.core.execution.spending import computed_since
from router.core.execution.state import State
from router.core.model.backend import LeaseHolder, Slot
from router.core.model.effects import (
    Blame,
    Cut,
    Dispatch,
    Erase,
    Failed,
    Order,
    Prefill,
    Prefilled,
    PrefillFailed,
    Quarantine,
    Restore,
    Restored,
    Save,
    Saved,
    SaveReason,
)
from router.core.model.jobs import RequestJob, SaveJob
from router.core.model.plan import Candidate
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import NOTHING, UNKNOWN, Content, Resident
from router.core.model.tenancy import model_of, namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.early_saves import branch_save_pays
from router.core.planning.prefill import piece, remaining_prefill_s
from router.core.planning.pricing import can_save, saving_pays

Steps = Coroutine[Any, Any, None]


class _LeftError(Exception):
    """The job is over, or its client has gone: no further step is taken."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """Awaited by a job in the prefill queue or at the gate; `go_on` resumes it."""

    job: RequestJob

    def __await__(self) -> Generator[Any, Any, None]:
        yield self


def begin(state: State, steps: Steps) -> None:
    """Take steps up to their first order."""
    _advance(state, steps, None)


def resume(state: State, order: Order[Any], result: object) -> None:
    """Go on with the steps that await an order, now that its result is known."""
    _, steps = state.under_way.pop(id(order))
    _advance(state, steps, result)


def _advance(state: State, steps: Steps, result: object) -> None:
    try:
        awaited = steps.send(result)
    except StopIteration:
        return
    if isinstance(awaited, _Turn):
        state.turns[awaited.job] = steps
    else:
        state.under_way[id(awaited)] = awaited, steps
        state.out.append(awaited)


# -- the way of a request ----------------------------------------------------------------------


async def prepare(state: State, job: RequestJob, crowding: Sequence[Slot]) -> None:
    """Do what the plan of a job says, then send its request.

    `crowding`: slots of unified KV that are emptied for room.
    """
    plan, request = job.plan, job.request
    n_prompt = request.prompt.n_tokens
    stops: list[tuple[int, SaveReason | None]]
    stops = [(length, SaveReason.BOUNDARY) for length in plan.boundary_saves]
    # All but one token: the state is then a strict prefix of every prompt like it. The client's own
    # request has one token left to compute, and none is computed twice.
    n_first = n_prompt if request.warms else n_prompt - 1
    last: SaveReason | None = None
    backend, copied = job.own.backend, plan.chosen.copy_from
    source = None if copied is None else job.slot_at(copied)
    # Of kinds that cannot go back, the boundary saves are those that others can use.
    if request.warms and backend.info.memory_kind.goes_back:
        last = SaveReason.WARM if can_save(state.inventory, backend, n_first) else None
    try:
        await _make_room(state, job, plan.chosen, crowding)
        if source is not None:
            await _copy(state, job, source)
        elif plan.chosen.cut is not None:
            await _cut(state, job, plan.chosen.cut)
        if job.using is not None:
            await _restore(state, job, job.using)
        if plan.prefill_first and n_first not in plan.boundary_saves:
            stops.append((n_first, last))
        elif last is not None:
            await _save_step(state, job, job.own, last)
        await _compute(state, job, stops)
        await _send(state, job)
    except _LeftError:
        if not (job.is_over or job.is_sent):
            end(state, job)


def _still(job: RequestJob) -> None:
    """Raise `_LeftError` if the job has ended, with its backend perhaps, or its client has gone."""
    if job.is_over or job.cancelled:
        raise _LeftError


async def _make_room(
    state: State, job: RequestJob, chosen: Candidate, crowding: Sequence[Slot]
) -> None:
    """Save what is displaced, where that pays, and erase what the server must not find."""
    held, whole = job.held, job.claim is SlotClaim.SEVERAL
    tenant = job.request.tenant
    foreign = [slot for slot in held if slot.content.tenant != tenant or slot in crowding]
    displaced = held if whole else [slot for slot in foreign if slot is not job.own]
    saved = [job.own] if chosen.save_displaced and not whole else []
    saved += [slot for slot in displaced if saving_pays(state.inventory, slot)[2]]
    erased = [*foreign]
    if job.own not in foreign and _must_be_emptied(job.own, chosen):
        erased.append(job.own)
    for slot in saved:
        await _save_step(state, job, slot, SaveReason.DISPLACED)
    for slot in erased:
        await _erase(state, job, slot)


def _must_be_emptied(slot: Slot, chosen: Candidate) -> bool:
    """Return whether the server must not find the slot's content, which the plan does not use.

    Of an opaque state it is not known how far back it is right (a window with `--swa-full`), and
    the server goes back as far as it likes.
    """
    opaque = slot.backend.info.memory_kind is MemoryKind.OPAQUE
    return opaque and chosen.source is Source.COLD and len(slot.content.resident) > 0


async def _erase(state: State, job: RequestJob, slot: Slot) -> None:
    """Empty a slot, which then belongs to the tenant of the request that holds it.

    A slot that was only to be out of the server's way is released at once. If the erase failed, the
    request ends here: another tenant's tokens may still be in the slot.
    """
    job.do(order := Erase(job.id, slot.id))
    result = await order
    if job.is_over:
        raise _LeftError
    failed, own = isinstance(result, Failed), slot is job.own
    # A slot of the same tenant was only to make room.
    refuse = failed and (own or slot.content.tenant != job.request.tenant)
    if not own:  # noted already for the job's own slot
        state.inventory.note_displaced(slot)
    if failed:
        slot.hold(Content(UNKNOWN, savable=slot.content.savable))
    else:
        slot.hold(Content(tenant=job.request.tenant))
    if not own and job.claim is not SlotClaim.SEVERAL:
        job.give_back([slot])
        slot.release(job, replace(slot.content, save_decided=False), slot.last_used)
    if refuse:
        _refuse(state, job)
    _still(job)


def _refuse(state: State, job: RequestJob) -> None:
    """Drop the request unsent: its client gets 503, and no further step is taken."""
    if not job.cancelled:
        state.reject(job.id, NoBackendError("no slot could be emptied for the request; try again"))
    raise _LeftError


async def _copy(state: State, job: RequestJob, source: Slot) -> None:
    """Save the slot that has the content, release it, and use the snapshot; cold without one."""
    if source not in job.others:
        return  # lost with its backend, and noted then
    snapshot = await _save_step(state, job, source, SaveReason.COPY)
    if job.is_over:
        raise _LeftError
    if source in job.others:
        job.give_back([source])
        source.release(job, replace(source.content, save_decided=True), source.last_used)
    _still(job)
    catalog = state.inventory.catalog
    usable = catalog.equal(snapshot.namespace, snapshot.tokens) if snapshot else None
    if usable is None:
        job.went_cold("the copy failed")
    else:
        catalog.add_reference(usable, state.now)
        job.use(usable)


async def _cut(state: State, job: RequestJob, n_tokens: int) -> None:
    """Make a snapshot of the first tokens of the one to restore, and use that instead."""
    catalog = state.inventory.catalog
    assert job.using is not None
    if catalog.is_forgotten(job.using):
        return  # the restore deals with it
    job.do(order := Cut(job.id, catalog[job.using], n_tokens))
    result = await order
    if isinstance(result, Saved):
        # No other kind can be cut.
        state.keep(result.snapshot, MemoryKind.FULL, now=state.now, keep=job.request.keep)
        if not job.is_over:
            rates = job.own.backend.rates
            rates.rewrite.observe(1.0, result.snapshot.size_bytes, result.seconds)
    elif not job.is_over:
        state.write_failed(job.slot.backend, state.now, result.reason)
    if job.is_over or job.cancelled:
        state.release_snapshot(job)
    _still(job)
    if isinstance(result, Failed):
        _keep_the_whole(state, job, f"cutting failed: {result.reason}")
        return
    trunk = result.snapshot
    usable = catalog.equal(trunk.namespace, trunk.tokens)
    if usable is None:
        _keep_the_whole(state, job, "the snapshot limits leave no room for the cut prefix")
    else:
        state.release_snapshot(job)  # the long snapshot will not be read
        catalog.add_reference(usable, state.now)
        job.use(usable)


def _keep_the_whole(state: State, job: RequestJob, reason: str) -> None:
    """Keep to the snapshot as it is; go on cold if the slot is too short for it."""
    assert job.using is not None
    if len(state.inventory.catalog[job.using]) > job.own.backend.info.n_ctx:
        state.release_snapshot(job)
        job.went_cold(reason)


async def _restore(state: State, job: RequestJob, name: SnapshotId) -> None:
    """Restore a snapshot that the job has a reference to; go on cold if that fails."""
    catalog = state.inventory.catalog
    if catalog.is_forgotten(name):
        state.release_snapshot(job)
        job.went_cold("the snapshot turned out to be unusable")
        return
    snapshot, held = catalog[name], job.own.content.resident
    erase = len(held) > 0 or held.may_hold_more
    job.do(order := Restore(job.id, job.slot, snapshot, erase))
    result = await order
    if isinstance(result, Restored):
        catalog.note_restore(name, failed=False)
        if not job.is_over:
            _note_restored(state, job, snapshot, result)
    else:
        _suspect(state, job, name, result)
        if not job.is_over:
            job.own.hold(replace(job.own.content, resident=NOTHING))
            job.went_cold(f"restore failed: {result.reason}")
    state.release_snapshot(job)
    _still(job)


def _note_restored(state: State, job: RequestJob, snapshot: Snapshot, result: Restored) -> None:
    """Note that the job's slot holds the snapshot."""
    slot = job.own
    state.stalled(slot.id.backend, Stall.RESTORE, result.seconds)
    rates = slot.backend.rates
    rates.restore.observe(1.0, snapshot.size_bytes, result.seconds)
    if result.rewrite_s:
        rates.rewrite.observe(1.0, snapshot.size_bytes, result.rewrite_s)
    whole = Resident(snapshot.tokens, 0, snapshot.shape.checkpoints)
    # A medium takes up many positions of the slot, and is one id here.
    as_saved = result.n_tokens == len(snapshot) or snapshot.shape.media
    slot.hold(slot.content.replaced_by(whole if as_saved else UNKNOWN, job.request.keep))
    slot.follow(job.fate)


def _suspect(state: State, job: RequestJob, name: SnapshotId, result: Failed) -> None:
    """Suspect a snapshot that could not be restored.

    1. The file is to blame: no request gets it again.
    2. The file could not be made ready for this backend (a full disk, say): it stays.
    3. The backend refused it, or died of it (llama-server.md section 0.3): quarantine it the second
       time.
    """
    if result.blame is Blame.DISK:
        if not job.is_over:
            state.write_failed(job.slot.backend, state.now, result.reason)
        return
    failures = state.inventory.catalog.note_restore(name, failed=True)
    unusable = result.blame is Blame.FILE or failures >= TUNING.restore_strikes
    if unusable and (forgotten := state.inventory.catalog.forget(name)):
        state.out.append(Quarantine(forgotten, result.reason))


def _may_save_branch(state: State, job: RequestJob, *, is_sent_next: bool) -> bool:
    """Return whether the slot holds now what a sibling of the prompt could use.

    That is the prompt, just before it is sent. For kinds that cannot go back it is what the prompt
    goes on from, before anything more is computed. A save or a wait just before rules it out: the
    save has been made, or was decided against.
    """
    slot = job.own
    if count(slot.content.resident.tokens) < state.inventory.catalog.limits.min_tokens:
        return False
    if slot.backend.info.memory_kind.goes_back is not is_sent_next:
        return False
    return job.doing is None or isinstance(job.doing, Prefill | Restore | Erase)


async def _compute(
    state: State, job: RequestJob, stops: Sequence[tuple[int, SaveReason | None]]
) -> None:
    """Compute the prompt up to each of these lengths, and save there where there is a reason.

    For kinds that cannot go back, what the prompt goes on from is saved before, where a sibling
    could use it.
    """
    tokens = job.request.prompt.tokens
    if _may_save_branch(state, job, is_sent_next=False) and branch_save_pays(state.inventory, job):
        await _save_step(state, job, job.own, SaveReason.BRANCH)
    for length, reason in stops:
        # Other requests may as well wait for the last of several prefills.
        whole = head(tokens, stops[-1][0])
        if not await _prefill(state, job, head(tokens, length), whole, is_saved=reason is not None):
            return  # there is nothing to save, also not for the requests that wait for it
        if reason is not None:
            await _save_step(state, job, job.own, reason)


async def _prefill(
    state: State, job: RequestJob, tokens: Tokens, whole: Tokens, *, is_saved: bool
) -> bool:
    """Compute tokens in the job's slot, chunk by chunk; return whether they are there.

    The result is saved if other requests wait for it and it is not `is_saved` anyway.
    """
    while True:
        if prefill_queue.must_wait(state, job, tokens):
            prefill_queue.wait(state, job)
            await _Turn(job)
            if job.cancelled and not is_wanted(state, job, tokens):
                raise _LeftError  # no request waits for it any more
        else:
            prefill_queue.enter(state, job, tokens)
        slot, upto = job.own, piece(state.inventory, job.slot, tokens)
        part = tokens if upto is None else head(tokens, upto)
        job.do(order := Prefill(job.id, job.slot, part))
        job.want(tokens)
        whole_s = remaining_prefill_s(state.inventory, slot, whole)
        slot.do(replace(slot.work, pending=whole, sharing=True, busy_until=state.now + whole_s))
        piece_s = remaining_prefill_s(state.inventory, slot, part)
        prefill_queue.begin(state, job, piece_s)
        result = await order
        if job.is_over:
            raise _LeftError
        if isinstance(result, PrefillFailed):
            _prefill_failed(job, result)
            _still(job)
            return False
        _note_prefilled(state, job, part, result)
        if job.cancelled and not job.for_others:
            raise _LeftError
        if upto is None:
            break
        if job.cancelled and not is_wanted(state, job, tokens):
            raise _LeftError  # no request waits for it any more
    if job.for_others or (not is_saved and is_wanted(state, job, tokens)):
        slot.do(replace(slot.work, for_host=False))
        await _save_step(state, job, slot, SaveReason.SHARED)
    return True


def _note_prefilled(state: State, job: RequestJob, part: Tokens, result: Prefilled) -> None:
    """Note what the job's slot holds now, and learn from what was reported."""
    slot, reported = job.own, result.reported
    state.stalled(slot.id.backend, Stall.PREFILL, reported.prompt_s or 0.0)
    compare(state, job, slot.content.resident, part, reported)
    limit = slot.backend.info.checkpoints
    held = after_prefill(slot.content.resident, part, reported, limit)
    slot.hold(slot.content.replaced_by(held, job.request.keep))
    slot.follow(job.fate)
    job.note_prefill(reported)
    slot.backend.rates.observe_prompt(reported)


def _prefill_failed(job: RequestJob, result: PrefillFailed) -> None:
    """Note what a failed prefill left in the job's slot."""
    slot, prompt = job.own, job.request.prompt
    slot.do(replace(slot.work, prefill_abandoned=False))
    if result.began:
        if lost := computed_since(slot.content.resident, prompt, result):
            job.note_prefill(Reported(prompt_tokens=lost, cached_tokens=0))
        left = after_quiet(slot.content.resident, prompt, result.n_tokens)
        slot.hold(replace(slot.content, resident=left))


async def _send(state: State, job: RequestJob) -> None:
    """Send the client's request, once the server will take the job's slot for it."""
    slot = job.own
    if _may_save_branch(state, job, is_sent_next=True) and branch_save_pays(state.inventory, job):
        await _save_step(state, job, slot, SaveReason.BRANCH)
    if job.claim is SlotClaim.STEERED:
        while not placement_gate.is_free(state, job):
            placement_gate.wait(state, job)
            await _Turn(job)
        job.own.backend.gate.take(job)
    job.do(None)
    if not placement_gate.reuses_nothing_foreign(job):
        _refuse(state, job)
    _dispatch(state, job)


def _dispatch(state: State, job: RequestJob) -> None:
    now, slot, backend = state.now, job.own, job.own.backend
    ends_at = now + backend.rates.generation_s(job.request.max_new_tokens)
    for used in job.held:
        used.start(job)
        used.do(replace(used.work, busy_until=ends_at))
    slot.do(replace(slot.work, pending=job.request.prompt.tokens, sharing=False))
    if slot.content.keep != job.request.keep:
        slot.hold(replace(slot.content, keep=job.request.keep))
    if backend.prefills.holder == job.id:
        prefill_queue.hand_over(state, job)
    slot.follow(job.fate)
    job.dispatch(slot.content.resident, now)
    if not backend.info.is_managed:
        backend.note_sent(job.request)
    pin = job.claim is SlotClaim.PINNED
    gated = backend.gate.holder == job.id
    lease = slot.as_lease()
    state.out.append(Dispatch(lease, job.plan, pin, job.waited_s, job.prefilled, gated))


# -- saves -------------------------------------------------------------------------------------


async def _save_step(
    state: State, job: RequestJob, slot: Slot, reason: SaveReason
) -> Snapshot | None:
    """Save a slot of a job that prepares. A request for this very content can wait for it."""
    save_s = slot.backend.rates.save_s(len(slot.content.resident))
    prefill_queue.save(state, job, save_s)
    snapshot = await save(state, job, slot, reason)
    if reason is not SaveReason.COPY:  # of which the source is still to be released
        _still(job)
    return snapshot


async def save_alone(state: State, job: SaveJob, reason: SaveReason) -> None:
    """Save a slot that is held for that alone."""
    await save(state, job, job.own, reason)
    if not job.is_over:
        end(state, job)


async def save(state: State, job: LeaseHolder, slot: Slot, reason: SaveReason) -> Snapshot | None:
    """Save a slot that a job holds; return the snapshot. None: it was not saved."""
    tokens = slot.content.resident.tokens
    slot.do(replace(slot.work, saving=tokens))
    namespace = namespace_of(slot.backend.info, slot.content.tenant)
    order = Save(job.id, slot.id, namespace, reason, media_of(tokens))
    if isinstance(job, RequestJob):
        job.do(order)
    result = await order
    snapshot = None
    if isinstance(result, Saved):
        snapshot = result.snapshot
        _take_saved(state, slot, result)
    else:
        state.write_failed(slot.id.backend, state.now, result.reason)
    if (holder := slot.job) is not None:
        slot.do(replace(slot.work, saving=EMPTY))
        if holder is not job and isinstance(holder, SaveJob):  # what is left of a job that is over
            end(state, holder)
    return snapshot


def _take_saved(state: State, slot: Slot, result: Saved) -> None:
    """Keep a new snapshot; its tokens are the truth about the slot."""
    snapshot, backend = result.snapshot, slot.backend
    info = state.inventory.info(slot.id.backend)
    if info is None or info.namespace != model_of(snapshot.namespace) or not slot.content.savable:
        # The backend went away during the save, so nothing vouches for the file, or its tenant was
        # purged.
        state.delete([snapshot])
    else:
        backend.backoff.succeed()
        state.stalled(info.id, Stall.SAVE, result.seconds)
        n_positions = result.n_positions or len(snapshot)
        backend.rates.observe_save(
            n_positions, snapshot.size_bytes, result.seconds, result.handling_s
        )
        state.inventory.returns.saved(snapshot.id, slot.fate, state.now)
        state.keep(snapshot, info.memory_kind, now=state.now, keep=slot.content.keep)
        if not snapshot.shape.useful:
            # Shorter than the window, which the probe has not seen to its end: save none so short.
            backend.info = replace(info, window=max(info.window, len(snapshot)))
        elif snapshot.shape.extendable:
            backend.outgrown = min(backend.outgrown, len(snapshot))
    if slot.job is not None:
        read = Resident(snapshot.tokens, 0, slot.content.resident.checkpoints)
        slot.hold(replace(slot.content, resident=read))


# -- waiting, and who waits for it -------------------------------------------------------------


def go_on(state: State) -> None:
    """Go on with the jobs that need not wait any more, and end those that waited too long."""
    while called := prefill_queue.take_next(state):
        for job in called:
            _advance(state, state.turns.pop(job), None)
    pass_gate(state)
    if late := deadline.reject_late(state):
        for job in late:
            end(state, job)
        pass_gate(state)


def pass_gate(state: State) -> int:
    """Let jobs at the gate send their requests; return how many did."""
    passed = 0
    while (job := placement_gate.next_through(state)) is not None:
        _advance(state, state.turns.pop(job), None)
        passed += 1
    return passed


def prefill_broke(state: State, request: RequestId) -> None:
    """Note that a prefill has no result to share, though it may go on.

    Its connection broke or was closed. Unless its client disconnected, its end is not known.
    """
    job = state.request_job(request)
    if job is not None and isinstance(job.doing, Prefill):
        slot = job.own
        slot.do(replace(slot.work, sharing=False))
        prefill_queue.broke_off(state, job)
        if not slot.work.prefill_abandoned:
            slot.do(replace(slot.work, busy_until=inf))
            if (server := state.inventory.servers.by_name.get(slot.id.backend)) is not None:
                server.lost_request_at = state.now


def is_wanted(state: State, job: RequestJob, held: Tokens) -> bool:
    """Return True if a queued request shares more with `held` than with any snapshot.

    The shared prefix has to be long enough for a snapshot. So does what another host waits for.
    """
    backend = job.own.backend
    if not can_save(state.inventory, backend, count(held)):
        return False
    if job.own.work.for_host:
        return True
    namespace, catalog = namespace_of(backend.info, job.request.tenant), state.inventory.catalog
    # A request that shares no more than a snapshot holds needs no other: few are compared.
    enough = max(catalog.covered(namespace, held) + 1, catalog.limits.min_tokens)
    beginning = head(held, enough)
    if count(beginning) < enough:
        return False
    for waiting in state.queue:
        tokens = waiting.request.prompt.tokens
        shares = waiting.request.tenant == job.request.tenant and tokens.startswith(beginning)
        if shares and common_prefix(held, tokens) > catalog.covered(namespace, tokens):
            return True
    return False
