"""Run the steps between admission and the client's request, one after the other.

A failed step does not fail the request, except an erase: what is left of the plan is a cold prefill
on the same lease.
"""

from math import inf
from typing import assert_never

from msgspec.structs import replace

from router.base.errors import NoBackendError
from router.base.tokens import EMPTY, Tokens, common_prefix, count, head, media_of
from router.base.types import (
    NO_KEEP,
    MemoryKind,
    Reported,
    RequestId,
    Snapshot,
    Stall,
)
from router.core.execution import deadline, placement_gate, prefill_queue
from router.core.execution.job_ends import end
from router.core.execution.resident_updates import after_prefill, after_quiet, compare
from router.core.execution.spending import computed_since
from router.core.execution.state import State
from router.core.model import events as ev
from router.core.model.backend import Slot
from router.core.model.effects import (
    Cut,
    Dispatch,
    Erase,
    Prefill,
    Quarantine,
    Restore,
    Save,
    SaveReason,
)
from router.core.model.events import Blame
from router.core.model.jobs import (
    CutStep,
    DispatchStep,
    EraseStep,
    PrefillStep,
    RequestJob,
    RestoreStep,
    SaveStep,
)
from router.core.model.memory_kinds import goes_back
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import EMPTY_SLOT, NOTHING, UNKNOWN, Content, Resident
from router.core.model.tenancy import model_of, namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.early_saves import branch_save_pays
from router.core.planning.prefill import piece, remaining_prefill_s
from router.core.planning.pricing import can_save


def next_step(state: State, job: RequestJob, now: float) -> None:  # noqa: C901 - an arm for each step
    """Start the job's next step, or end the job if there is none."""
    if not job.steps:
        end(state, job, now)
        return
    if _may_save_branch(state, job) and branch_save_pays(state.inventory, job):
        job.insert(SaveStep(job.slot, SaveReason.BRANCH))
    if placement_gate.needs_gate_now(job):
        if not placement_gate.is_free(state, job):
            placement_gate.wait(state, job, now)
            return
        placement_gate.take(state, job)
    step = job.take_step()
    match step:
        case SaveStep():
            # A request for this very content can wait for the save.
            slot = state.inventory.slots[step.slot]
            save_s = state.inventory.backends[step.slot.backend].rates.save_s(
                len(slot.content.resident)
            )
            prefill_queue.save(state, job, save_s, now)
            save(state, job.id, slot, step.reason)
        case CutStep():
            if state.inventory.catalog.is_forgotten(step.snapshot):
                next_step(state, job, now)  # the restore deals with it
            else:
                state.out.append(Cut(job.id, state.inventory.catalog[step.snapshot], step.n_tokens))
        case EraseStep():
            state.out.append(Erase(job.id, step.slot))
        case RestoreStep(snapshot=None):
            next_step(state, job, now)  # the copy failed
        case RestoreStep(snapshot=snapshot):
            assert snapshot is not None
            if state.inventory.catalog.is_forgotten(snapshot):
                state.restore_over(job.id)
                job.went_cold("the snapshot turned out to be unusable")
                next_step(state, job, now)
                return
            held = job.own.content.resident
            erase = len(held) > 0 or held.may_hold_more
            state.out.append(Restore(job.id, job.slot, state.inventory.catalog[snapshot], erase))
        case PrefillStep():
            if prefill_queue.must_wait(state, job, step.tokens, now):
                prefill_queue.wait(state, job, step.tokens, now)
            else:
                prefill_queue.enter(state, job, step.tokens, now)
                _prefill(state, job, step.tokens, now)
        case DispatchStep():
            if placement_gate.reuses_nothing_foreign(state, job):
                _dispatch(state, job, now)
            else:
                _refuse(state, job)
                next_step(state, job, now)
        case _:  # pragma: no cover - mypy sees to it
            assert_never(step)


def _may_save_branch(state: State, job: RequestJob) -> bool:
    """Return whether the slot holds now what a sibling of the prompt could use.

    That is the prompt, just before it is sent. For kinds that cannot go back it is what the prompt
    goes on from, before anything more is computed. A save or a wait just before rules it out: the
    save has been made, or was decided against.
    """
    if job.doing is not None and not isinstance(job.doing, PrefillStep | RestoreStep | EraseStep):
        return False
    if goes_back(job.own.backend.info.memory_kind):
        return isinstance(job.steps[0], DispatchStep)
    return not isinstance(job.doing, PrefillStep) and isinstance(
        job.steps[0], PrefillStep | DispatchStep
    )


def save(state: State, job: RequestId, slot: Slot, reason: SaveReason) -> None:
    """Begin to save a slot that the job holds."""
    namespace = namespace_of(slot.backend.info, slot.content.tenant)
    slot.do(replace(slot.work, saving=slot.content.resident.tokens))
    media = media_of(slot.content.resident.tokens)
    state.out.append(Save(job, slot.id, namespace, reason, media))


def _prefill(state: State, job: RequestJob, tokens: Tokens, now: float) -> None:
    """Begin to compute tokens in the job's slot, or a chunk of them."""
    slot = job.own
    step = PrefillStep(tokens, piece(state.inventory, job.slot, tokens))
    job.do(step)
    # Other requests may as well wait for the last of several prefills.
    last = [s.tokens for s in job.steps if isinstance(s, PrefillStep)][-1:]
    whole = last[0] if last else tokens
    whole_s = remaining_prefill_s(state.inventory, slot, whole)
    slot.do(replace(slot.work, pending=whole, sharing=True, busy_until=now + whole_s))
    piece_s = remaining_prefill_s(state.inventory, slot, step.now)
    prefill_queue.begin(state, job, piece_s, now)
    state.out.append(Prefill(job.id, job.slot, step.now))


def go_on(state: State, now: float) -> None:
    """Go on with the jobs that need not wait any more, and end those that waited too long."""
    while called := prefill_queue.take_next(state, now):
        for job, tokens in called:
            if job.cancelled and not is_wanted(state, job, tokens):
                end(state, job, now)  # no request waits for it any more
            else:
                _prefill(state, job, tokens, now)
    pass_gate(state, now)
    if late := deadline.reject_late(state, now):
        for job in late:
            end(state, job, now)
        pass_gate(state, now)


def pass_gate(state: State, now: float) -> int:
    """Let jobs at the gate send their requests; return how many did."""
    passed = 0
    while (job := placement_gate.next_through(state)) is not None:
        next_step(state, job, now)
        passed += 1
    return passed


def _dispatch(state: State, job: RequestJob, now: float) -> None:
    slot, backend = job.own, job.own.backend
    ends_at = now + backend.rates.generation_s(job.request.max_new_tokens)
    for used in job.held:
        used.start(job)
        used.do(replace(used.work, busy_until=ends_at))
    slot.do(replace(slot.work, pending=job.request.prompt.tokens, sharing=False))
    if slot.content.keep != job.request.keep:
        slot.hold(replace(slot.content, keep=job.request.keep))
    if backend.prefills.holder == job.id:
        prefill_queue.hand_over(state, job, now)
    slot.follow(job.fate)
    job.dispatch(slot.content.resident, now)
    if not backend.info.is_managed:
        backend.note_sent(job.request)
    pin = job.claim is SlotClaim.PINNED
    gated = backend.gate.holder == job.id
    state.out.append(
        Dispatch(job.id, job.own.as_lease(), job.plan, pin, gated, job.waited_s, job.prefilled)
    )


def saved(state: State, event: ev.Saved, now: float) -> None:
    """Note a new snapshot; its tokens are the truth about the slot."""
    snapshot = event.snapshot
    info = state.inventory.info(event.slot.backend)
    job = state.inventory.jobs.get(event.request)
    slot = None if job is None else job.slot_at(event.slot)
    # Without a lease the slot may be gone, or another one by now.
    content = EMPTY_SLOT if slot is None else slot.content
    if info is None or info.namespace != model_of(snapshot.namespace) or not content.savable:
        # The backend went away during the save, so nothing vouches for the file, or its tenant was
        # purged.
        state.delete([snapshot])
    else:
        backend = state.inventory.backends[info.id]
        backend.backoff.succeed()
        state.stalled(info.id, Stall.SAVE, event.seconds)
        backend.rates.observe_save(
            event.n_positions or len(snapshot),
            snapshot.size_bytes,
            event.seconds,
            event.handling_s,
        )
        state.inventory.returns.saved(snapshot.id, slot.fate if slot else None, now)
        state.keep(snapshot, info.memory_kind, now=now, keep=content.keep)
        if not snapshot.shape.useful:
            # Shorter than the window, which the probe has not seen to its end: save none so short.
            window = max(info.window, len(snapshot))
            backend.info = replace(info, window=window)
    if slot is not None:
        read = Resident(snapshot.tokens, 0, slot.content.resident.checkpoints)
        slot.hold(replace(slot.content, resident=read))
    _save_over(state, event, snapshot, now)


def save_failed(state: State, event: ev.SaveFailed, now: float) -> None:
    """Go on without a snapshot; the slot is as it was."""
    state.write_failed(event.slot.backend, now, event.reason)
    _save_over(state, event, None, now)


def was_cut(state: State, event: ev.WasCut, now: float) -> None:
    """Keep the cut prefix as a snapshot of its own, and restore it."""
    trunk = event.snapshot
    job = state.request_job(event.request)
    keep = NO_KEEP if job is None else job.request.keep
    # No other kind can be cut.
    state.keep(trunk, MemoryKind.FULL, now=now, keep=keep)
    if job is None:
        return
    job.own.backend.rates.rewrite.observe(1.0, trunk.size_bytes, event.seconds)
    if job.steps:
        usable = state.inventory.catalog.equal(trunk.namespace, trunk.tokens)
        if usable is None:
            _restore_the_whole(state, job, "the snapshot limits leave no room for the cut prefix")
        else:
            state.restore_over(job.id)  # the long snapshot will not be read
            state.inventory.catalog.add_reference(usable, now)
            job.use(usable)
            job.replace_next(RestoreStep(usable))
    next_step(state, job, now)


def cut_failed(state: State, event: ev.CutFailed, now: float) -> None:
    """Restore the whole snapshot instead, if the slot can hold it."""
    if job := state.request_job(event.request):
        state.write_failed(job.slot.backend, now, event.reason)
        if job.steps:
            _restore_the_whole(state, job, f"cutting failed: {event.reason}")
        next_step(state, job, now)


def _restore_the_whole(state: State, job: RequestJob, reason: str) -> None:
    """Go on to the restore as it is, or cold if the slot is too short for it."""
    assert job.using is not None
    if len(state.inventory.catalog[job.using]) > job.own.backend.info.n_ctx:
        state.restore_over(job.id)
        job.went_cold(reason)
        job.drop_next()


def _save_over(
    state: State, event: ev.Saved | ev.SaveFailed, snapshot: Snapshot | None, now: float
) -> None:
    """Release a slot held for the save alone; a copy goes on with the snapshot."""
    job = state.inventory.jobs.get(event.request)
    if job is None:
        return
    slot = job.slot_at(event.slot)  # None: lost with its backend
    if slot is not None:
        slot.do(replace(slot.work, saving=EMPTY))
    if not isinstance(job, RequestJob):
        end(state, job, now)
        return
    if isinstance(job.doing, SaveStep) and job.doing.reason is SaveReason.COPY:
        _copy_over(state, job, slot, snapshot, now)
    next_step(state, job, now)


def _copy_over(
    state: State, job: RequestJob, source: Slot | None, snapshot: Snapshot | None, now: float
) -> None:
    """Release the source of a copy, and restore its snapshot next; cold without one."""
    if source in job.others:
        job.give_back([source])
        source.release(job, replace(source.content, save_decided=True), source.last_used)
    if job.steps and isinstance(job.steps[0], RestoreStep):
        catalog = state.inventory.catalog
        usable = catalog.equal(snapshot.namespace, snapshot.tokens) if snapshot else None
        job.replace_next(RestoreStep(usable))
        if usable is None:
            job.went_cold("the copy failed")
        else:
            state.inventory.catalog.add_reference(usable, now)
            job.use(usable)


def restored(state: State, event: ev.Restored, now: float) -> None:
    """Note that the slot holds the snapshot."""
    state.inventory.catalog.note_restore(event.snapshot, failed=False)
    job = state.request_job(event.request)
    if job is None:
        state.restore_over(event.request)
        return
    snapshot = state.inventory.catalog[event.snapshot]
    state.stalled(job.slot.backend, Stall.RESTORE, event.seconds)
    rates = job.own.backend.rates
    rates.restore.observe(1.0, snapshot.size_bytes, event.seconds)
    if event.rewrite_s:
        rates.rewrite.observe(1.0, snapshot.size_bytes, event.rewrite_s)
    slot = job.own
    whole = Resident(snapshot.tokens, 0, snapshot.shape.checkpoints)
    # A medium takes up many positions of the slot, and is one id here.
    as_saved = event.n_tokens == len(snapshot) or snapshot.shape.media
    read = whole if as_saved else UNKNOWN
    slot.hold(slot.content.replaced_by(read, job.request.keep))
    slot.follow(job.fate)
    state.restore_over(event.request)
    next_step(state, job, now)


def restore_failed(state: State, event: ev.RestoreFailed, now: float) -> None:
    """Suspect the snapshot, and go on cold with an empty slot.

    1. The file is to blame: no request gets it again.
    2. The file could not be made ready for this backend (a full disk, say): it stays.
    3. The backend refused it, or died of it (llama-server.md section 0.3): quarantine it the second
       time.
    """
    job = state.request_job(event.request)
    if event.blame is Blame.DISK:
        if job is not None:
            state.write_failed(job.slot.backend, now, event.reason)
    else:
        failures = state.inventory.catalog.note_restore(event.snapshot, failed=True)
        unusable = event.blame is Blame.FILE or failures >= TUNING.restore_strikes
        if unusable and (forgotten := state.inventory.catalog.forget(event.snapshot)):
            state.out.append(Quarantine(forgotten, event.reason))
    state.restore_over(event.request)
    if job is not None:
        slot = job.own
        slot.hold(replace(slot.content, resident=NOTHING))
        job.went_cold(f"restore failed: {event.reason}")
        next_step(state, job, now)


def erased(state: State, event: ev.Erased | ev.EraseFailed, now: float) -> None:
    """Note that an erased slot belongs to the tenant of the request that holds it.

    A slot that was only to be out of the server's way is released at once. If the erase failed, the
    request ends here: another tenant's tokens may still be in the slot.
    """
    job = state.request_job(event.request)
    if job is None:
        return
    failed, slot = isinstance(event, ev.EraseFailed), job.slot_at(event.slot)
    refuse = failed
    if slot is not None:
        own = slot is job.own
        # A slot of the same tenant was only to make room.
        refuse = refuse and (own or slot.content.tenant != job.request.tenant)
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
    next_step(state, job, now)


def _refuse(state: State, job: RequestJob) -> None:
    """Drop the request unsent: its client gets 503, and no further step is taken."""
    if not job.cancelled:
        state.reject(job.id, NoBackendError("no slot could be emptied for the request; try again"))
    job.drop_steps()


def prefill_broke(state: State, request: RequestId, now: float) -> None:
    """Note that a prefill has no result to share, though it may go on.

    Unless its client disconnected, its end is not known.
    """
    job = state.request_job(request)
    if job is not None and isinstance(job.doing, PrefillStep):
        slot = job.own
        slot.do(replace(slot.work, sharing=False))
        prefill_queue.broke_off(state, job)
        if not slot.work.prefill_abandoned:
            slot.do(replace(slot.work, busy_until=inf))
            if (server := state.inventory.servers.by_name.get(slot.id.backend)) is not None:
                server.lost_request(now)


def prefilled(state: State, event: ev.Prefilled | ev.PrefillFailed, now: float) -> None:
    """Go on after a prefill; save it first if other requests wait for it."""
    job = state.request_job(event.request)
    if job is None or not isinstance(job.doing, PrefillStep):
        return
    slot = job.own
    if isinstance(event, ev.PrefillFailed):
        slot.do(replace(slot.work, prefill_abandoned=False))
        if event.began:
            if lost := computed_since(slot.content.resident, job.request.prompt, event):
                job.note_prefill(Reported(prompt_tokens=lost, cached_tokens=0))
            left = after_quiet(slot.content.resident, job.request.prompt, event.n_tokens)
            slot.hold(replace(slot.content, resident=left))
        # There is nothing to save, also not for the requests that wait for it.
        job.set_steps(step for step in job.steps if isinstance(step, DispatchStep))
        if job.cancelled:
            job.drop_steps()
    else:
        state.stalled(job.slot.backend, Stall.PREFILL, event.reported.prompt_s or 0.0)
        compare(state, job, slot.content.resident, job.doing.now, event.reported, now)
        limit = job.own.backend.info.checkpoints
        held = after_prefill(slot.content.resident, job.doing.now, event.reported, limit)
        slot.hold(slot.content.replaced_by(held, job.request.keep))
        slot.follow(job.fate)
        job.note_prefill(event.reported)
        job.own.backend.rates.observe_prompt(event.reported)
        saved_anyway = bool(job.steps) and isinstance(job.steps[0], SaveStep)
        if job.doing.upto is not None:
            if not job.cancelled or (job.steps and is_wanted(state, job, job.doing.tokens)):
                job.insert(PrefillStep(job.doing.tokens))
            else:
                job.drop_steps()  # no request waits for it any more
        elif not job.cancelled and not saved_anyway and is_wanted(state, job, job.doing.tokens):
            job.insert(SaveStep(job.slot, SaveReason.SHARED))
            slot = job.own
            slot.do(replace(slot.work, for_host=False))
    next_step(state, job, now)


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
