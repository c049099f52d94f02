"""End jobs: after success, failure, or the loss of their backend. Release every lease."""

from collections.abc import Collection, Mapping
from math import inf

from msgspec.structs import replace

from router.base.errors import BackendError
from router.base.tokens import Tokens
from router.base.types import (
    NO_KEEP,
    NO_TENANT,
    BackendId,
    BackendInfo,
    Cost,
    Lease,
    MemoryKind,
    Outcome,
    Reported,
    Request,
    RequestId,
    RequestProgress,
    SlotId,
    Tenant,
)
from router.core.execution import placement_gate
from router.core.execution.resident_updates import (
    after_answer,
    after_either,
    after_finish,
    after_quiet,
    compare,
    is_exact,
)
from router.core.execution.spending import (
    charge,
    charge_rest,
    charge_unseen,
    charge_unsent,
    cost_of,
)
from router.core.execution.state import State
from router.core.model.backend import Slot
from router.core.model.effects import (
    Account,
    AnswerEnd,
    Cut,
    Prefill,
    Quiet,
    Restore,
    Save,
    StopWork,
    WatchSlot,
)
from router.core.model.jobs import Job, ProbeLoan, RequestJob, SaveJob, SlotWatch
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import NOTHING, UNKNOWN, Resident, Work
from router.core.model.tuning import TUNING
from router.core.reporting.miss_reasons import avoided_s

_OVER = (Outcome.OK, Outcome.REFUSED)  # such a request will not start any more


def lose_backend(state: State, backend: BackendId) -> None:
    """Drop a backend's slots, and end its jobs at whatever step they are.

    Requests in preparation are rejected to the web layer, which may try another backend. Requests
    that run end by themselves: the connection breaks.
    """
    state.inventory.lose(backend)
    for job in list(state.inventory.jobs.values()):
        if job.slot.backend != backend:
            if isinstance(job, RequestJob):
                _lose_source(job, backend)
            continue
        match job:
            case RequestJob(is_sent=True):  # `Finished` and the account are still to come
                known = job.knows_slot and not job.others
                _forbid_saves_of(state, job.request, job.slot if known else None, job)
            case RequestJob():
                if not job.cancelled:
                    state.reject(job.id, BackendError("the backend went down"))
                _leave_to_itself(state, job, backend)
            case SlotWatch(request=Request() as request):
                _forbid_saves_of(state, request, None if job.is_elsewhere else job.slot, job)
                if job.counted is not None and job.plan is not None:
                    charge_unseen(state, request, job.plan, job.own.backend, job.counted)
                end(state, job)
            case _:
                end(state, job)


def _forbid_saves_of(state: State, request: Request, only: SlotId | None, job: Job) -> None:
    """Keep what the request may have left, in that slot or any, from being saved."""
    for slot in job.own.backend.slots:
        if only is None or slot.id == only:
            slot.hold(slot.content.touched_by(request))


def _leave_to_itself(state: State, job: RequestJob, backend: BackendId) -> None:
    """End a job of a lost backend; its save under way elsewhere keeps its slot."""
    step, saving = job.doing, None
    if isinstance(step, Prefill):
        state.out.append(StopWork(job.id))  # a hanging prefill would go on in vain
    if isinstance(step, Save) and step.slot.backend != backend:
        saving = job.slot_at(step.slot)
    if saving is not None:
        job.give_back([saving])
    end(state, job)
    if saving is not None:
        state.inventory.jobs[job.id] = save = SaveJob(id=job.id, own=saving)
        saving.hand_over(job, save)


def _lose_source(job: RequestJob, backend: BackendId) -> None:
    """Continue cold if the source of the job's copy was on the lost backend.

    A save under way reports its own failure.
    """
    lost = [slot for slot in job.others if slot.id.backend == backend]
    if not lost:
        return
    job.give_back(lost)
    job.went_cold("the backend of the copy's source went down")


def launched(state: State, request: RequestId, index: int, others: Collection[int]) -> None:
    """Open the gate of a server-placed request that runs, and note its slot, or its slots."""
    job = state.request_job(request)
    if job is None or not job.is_sent or job.own.job is not job:
        return
    if job.claim is SlotClaim.SEVERAL:
        _release_unused(state, job, {index, *others})
        return
    job.own.backend.gate.leave(job)
    slots = job.own.backend.slots
    actual = next((slot for slot in slots if slot.id.index == index), None)
    waits = placement_gate.waits_in(actual) if actual is not None else None
    known = index == job.slot.index or bool(job.others)
    if not known and waits is not None:
        placement_gate.swap_leases(state, job, waits)
    elif not known and actual is not None and actual.is_idle:
        _follow(state, job, actual)
    elif not known:
        _doubt_watched(state, job)  # it runs in one that was idle unnoticed
        return
    job.confirm_slot()


def _release_unused(state: State, job: RequestJob, used: Collection[int]) -> None:
    """Release the slots that the server took for none of a request's tasks: they are unchanged.

    It may have taken one whose request ended meanwhile. If that is in use again, the gate stays
    closed until the end.
    """
    slots, work = job.own.backend.slots, job.own.work
    more = [s for s in slots if s.id.index in used and s not in job.held]
    if not all(slot.is_idle for slot in more):
        return
    job.own.backend.gate.leave(job)
    for slot in more:
        job.hold_also([slot.lease(job, work)])
        slot.start(job)
    taken = [slot for slot in job.held if slot.id.index in used]
    for slot in job.held:
        if slot in taken:
            state.inventory.note_displaced(slot)
        elif slot.job is job:
            slot.release(job, slot.content, slot.last_used)
    job.move(taken[0])
    job.give_back(job.others)
    job.hold_also(taken[1:])
    job.confirm_slot()


def _follow(state: State, job: RequestJob, actual: Slot) -> None:
    """Move the job's lease to the idle slot where the server put its request."""
    leased = job.own
    work = leased.work
    leased.release(job, replace(leased.content, save_decided=False), leased.last_used)
    leased.invalidate_lease()  # the answer is read under this lease, and is elsewhere
    job.move(actual.lease(job, work))
    job.runs_on(actual.content.resident)
    actual.start(job)
    actual.hold(replace(actual.content, tenant=work.tenant, keep=leased.content.keep))


def finished(state: State, request: RequestId, end_: AnswerEnd, index: int | None) -> None:
    """Learn from a finished response, and release its slot or watch it until idle.

    `index`: the slot that the backend chose, if the request ended before a poll saw it run. To
    report that before would admit requests while this slot still counts as busy.
    """
    job = state.request_job(request)
    if job is None or not job.is_sent:
        return
    if index is not None:
        launched(state, request, index, ())
    job.own.backend.gate.leave(job)
    cost = cost_of(state, job, end_)
    charge(state, job.request, cost)
    state.out.append(
        Account(
            request=job.request,
            slot=job.own.id,
            plan=job.plan,
            end=end_,
            waited_s=job.waited_s,
            prepared_s=job.prepared_s,
            prefill_queue_s=job.past_queue_s,
            prefilled=job.prefilled,
            cost=cost,
            avoided_s=avoided_s(job.own.backend.rates, end_.reported, job.prefilled),
        )
    )
    _learn(state, job, end_)
    server = state.inventory.servers.by_name.get(job.own.id.backend)
    if server is not None and end_.outcome is Outcome.BACKEND_ERROR:
        server.lost_request_at = state.now
    if server is not None and end_.outcome is Outcome.OK:
        server.has_answered = True  # it works, however soon it ends
    if end_.outcome is Outcome.OK:
        state.inventory.note_home(job.request, job.own.id.backend)
    if end_.outcome is Outcome.OK and job.request.prompt.is_exact:
        tokens = job.request.prompt.tokens
        compare(state, job, job.resident_at_dispatch, tokens, end_.reported)
    if job.own.job is not job:
        end(state, job)  # the backend went down meanwhile
    elif end_.outcome is Outcome.OK and not _is_to_be_wiped(state, job, end_):
        end(state, job, _content_after(state, job, end_))
    else:
        _abandon(state, job, end_, cost)


def _content_after(state: State, job: RequestJob, end_: AnswerEnd) -> Resident:
    """Return the content of the job's slot after a complete answer.

    1. Nothing, on a backend that is not managed.
    2. Unknown: the server used several slots as it liked.
    3. Server-placed, and over before its slot was seen: any idle slot may have been used.
    4. Prompt and answer.
    """
    if not job.own.backend.info.is_managed:
        return NOTHING
    if job.claim is SlotClaim.SEVERAL:
        if not job.slot_confirmed:
            for slot in job.held:
                state.inventory.note_displaced(slot)
        return UNKNOWN
    if job.knows_slot:
        slot = job.own
        slot.hold(replace(slot.content, savable=True))  # what it held before is gone
        info, before = job.own.backend.info, job.resident_at_dispatch
        limit, by_length = info.checkpoints, info.unified
        prompt = job.request.prompt
        return after_finish(prompt, end_.reported, before, limit, by_length=by_length)
    _doubt_watched(state, job)
    placement_gate.mix(state, job)
    for slot in job.own.backend.slots:
        if slot.is_idle:
            either = after_either(slot.content.resident, job.request.prompt)
            slot.hold(replace(slot.content.mixed_with(job.request), resident=either))
    return after_either(job.resident_at_dispatch, job.request.prompt)


def _abandon(state: State, job: RequestJob, end_: AnswerEnd, cost: Cost) -> None:
    """Watch the slot, and every slot that the request may use, until the backend is done.

    After a complete answer the first poll decides. After a refusal most slots hold what they held,
    for any tenant: a client that sends nonsense must not empty the slots of others.

    A request pinned to a busy slot can destroy an answer (llama-server.md section 0.1). A
    server-placed request that was not seen in a slot therefore keeps all idle slots out of use.

    To the server, KV of a request's own adapter looks like any other. The server would reuse that
    KV for any request with the same first tokens (section 1.7), so the slot is wiped. A slot is
    wiped too if the server may have moved KV there (2.3), or if several answers may have shared its
    state. In the last case each slot is wiped, after a token is computed in it.

    On a backend that is not managed there is nothing to destroy, and the slot is not known: the
    server makes other requests wait by itself.
    """
    if not job.own.backend.info.is_managed:
        if end_.outcome not in _OVER:
            charge_unseen(state, job.request, job.plan, job.own.backend, cost)
        end(state, job, NOTHING)
        return
    refused = end_.outcome is Outcome.REFUSED
    flush = _shares_state(state, job, end_.reported) and not refused
    wipe = job.request.adapted or (_is_to_be_wiped(state, job, end_) and not refused)
    unseen = not job.knows_slot
    answered = end_.outcome in _OVER
    progress = (
        RequestProgress.ANSWERED
        if answered
        else RequestProgress.BEGUN
        if end_.begun and not unseen
        else RequestProgress.SENT
    )
    _let_go(state, job)
    state.inventory.jobs[job.id] = left = SlotWatch(
        id=job.id,
        own=job.own,
        request=job.request,
        before=job.resident_at_dispatch,
        plan=job.plan,
        prefilled=0 if job.prefilled is None else job.prefilled.tokens,
        counted=None if answered else cost,
        has_begun=progress is RequestProgress.BEGUN,
        is_elsewhere=unseen,
        is_doubtful=unseen or bool(job.others),
    )
    own = job.own
    own.abandon(job)
    own.hand_over(job, left)
    busy_until = inf if wipe else state.now + TUNING.abandoned_s(progress)
    own.do(replace(own.work, busy_until=busy_until))
    state.out.append(WatchSlot(job.id, job.slot, progress, wipe, flush))
    watched = list(job.others)
    before = {slot.id: slot.content.resident for slot in job.own.backend.slots}
    for slot in watched:
        held = slot.content.resident if refused else UNKNOWN
        slot.release(job, replace(slot.content, resident=held, save_decided=False), state.now)
    if unseen:
        _doubt_watched(state, job)
        placement_gate.mix(state, job)
        watched = [slot for slot in job.own.backend.slots if slot.is_idle]
        progress = RequestProgress.ANSWERED if answered else RequestProgress.UNSEEN
    for slot in watched:
        if unseen and not refused:
            slot.hold(slot.content.mixed_with(job.request))
        watch(
            state,
            slot,
            progress=progress,
            wipe=wipe,
            flush=flush,
            likely_unchanged=refused,
            tenant=slot.content.tenant,
            payer=job.request if job.request.takes_several and not answered else None,
            counted=cost,
            before=before[slot.id],
        )


def _is_to_be_wiped(state: State, job: RequestJob, end_: AnswerEnd) -> bool:
    """Return True if what the request left is not exactly what its tokens say."""
    if end_.outcome not in _OVER and _may_have_outgrown(state, job, end_):
        return True
    n_ctx = job.own.backend.info.n_ctx
    pinned = job.claim is SlotClaim.PINNED
    # The counts of several tasks are sums: they say nothing of one slot.
    told = Reported() if job.request.takes_several else end_.reported
    exact = is_exact(job.request, job.resident_at_dispatch, told, n_ctx, pinned=pinned)
    return job.request.adapted or not exact or _shares_state(state, job, end_.reported)


def _may_have_outgrown(state: State, job: RequestJob, end_: AnswerEnd) -> bool:
    """Return True if an answer that was not read to its end may have outgrown its slot.

    With `--context-shift` the server then dropped tokens in the middle and moved the others
    (llama-server.md section 2.3). Of an abandoned answer only its time is known.
    """
    request, backend = job.request, job.own.backend
    room = backend.info.n_ctx - request.prompt.n_tokens
    if request.max_new_tokens is not None and request.max_new_tokens <= room:
        return False
    if request.streams and not end_.begun:
        return False
    rates = backend.rates
    usual_s = rates.output_s_per_token.value / TUNING.output_fastest
    token_s = min(usual_s, rates.output_fastest_s / 2)  # never seen twice as fast
    prompt_s = 0.0 if job.prefilled is not None else job.plan.chosen.price.prefill_s
    return state.now - job.since - job.prepared_s - prompt_s > room * token_s


def _shares_state(state: State, job: RequestJob, reported: Reported) -> bool:
    """Return True if a copy of a state may still be due in a slot of several answers to a prompt.

    The server copies that state from slot to slot with the next batch that it computes, and not
    before: into whatever is restored there meanwhile (llama-server.md section 2.1). One answer of
    two tokens shows that there was such a batch.
    """
    request, info = job.request, job.own.backend.info
    if request.answers == 1:
        return False
    is_copied = request.tasks == request.answers < (reported.generated_tokens or 0)
    # How many streams an opaque state has is not known.
    return not is_copied and (info.n_stream > 1 or info.memory_kind is MemoryKind.OPAQUE)


def _doubt_watched(state: State, job: RequestJob) -> None:
    """Doubt the watched slots of the job's backend: the server may have put its request there.

    A watched slot may have been idle already. Nothing will be known of its content, so no request
    waits for it.
    """
    for other in state.inventory.jobs.values():
        if isinstance(other, SlotWatch) and other.own.backend is job.own.backend:
            other.doubt()
            slot = other.own
            slot.do(replace(slot.work, busy_until=inf))
            slot.hold(slot.content.touched_by(job.request))


def watch(
    state: State,
    slot: Slot,
    *,
    progress: RequestProgress = RequestProgress.UNSEEN,
    wipe: bool = False,
    flush: bool = False,
    likely_unchanged: bool = False,
    tenant: Tenant = NO_TENANT,
    payer: Request | None = None,
    counted: Cost | None = None,
    before: Resident = NOTHING,
) -> None:
    """Keep a slot out of use until it is known to be idle: an unknown client may use it.

    `wipe`: empty the slot before releasing it. `flush`: compute one token first.
    `likely_unchanged`: if the slot's length is unchanged then, its content is too.
    `tenant`: of what may run there. Nothing is known of its end. `payer`: who pays for that, of
    which `counted` is paid; `before`: what the slot held until then.
    """
    name = RequestId(f"stranger-{slot.id}-{slot.generation}")
    state.inventory.jobs[name] = job = SlotWatch(
        id=name,
        own=slot,
        likely_unchanged=likely_unchanged,
        payer=payer,
        counted=counted,
        before=before,
    )
    slot.lease(job, Work(tenant, busy_until=inf))
    slot.abandon(job)
    state.out.append(WatchSlot(name, slot.id, progress, wipe, flush))


def found_busy(state: State, slots: Mapping[SlotId, int]) -> None:
    """Keep slots that an unknown client uses out of use; `slots` were idle at these generations.

    While the gate is closed, the router's own request may be the one in the slot. On a backend that
    is not managed, any of the router's requests may be in any slot.
    """
    for slot_id, generation in slots.items():
        slot = next((s for s in state.inventory.slots.of(slot_id.backend) if s.id == slot_id), None)
        if slot is None or slot.backend.gate.is_closed:
            continue
        if not state.inventory.backends[slot_id.backend].info.is_managed:
            continue
        if slot.is_idle and slot.generation == generation:
            state.inventory.note_displaced(slot)
            watch(state, slot)


def quiet(state: State, request: RequestId, seen: Quiet) -> None:
    """Release a watched slot that is idle at last."""
    watch = state.inventory.jobs.get(request)
    if not isinstance(watch, SlotWatch):
        return
    charge_rest(state, watch, seen)
    slot, n_tokens = watch.own, None if seen.wiped else seen.n_tokens
    if watch.likely_unchanged and not watch.is_doubtful and n_tokens == len(slot.content.resident):
        end(state, watch)
    elif watch.request is None or watch.is_doubtful:
        if watch.likely_unchanged:
            state.inventory.note_displaced(slot)
        # An unknown client may have used it.
        slot.hold(replace(slot.content, tenant=NO_TENANT, keep=NO_KEEP))
        end(state, watch, UNKNOWN if n_tokens is None else Resident(unread=n_tokens))
    else:
        prompt, begun = watch.request.prompt, watch.has_begun
        end(state, watch, after_quiet(watch.before, prompt, n_tokens, begun=begun))


def answer_read(state: State, lease: Lease, prompt: Tokens, answer: Tokens) -> None:
    """Note the ids of an answer, unless the slot has been leased since."""
    slots = state.inventory.slots.of(lease.slot.backend)
    if lease.slot.index < len(slots):
        slot = slots[lease.slot.index]
        if slot.is_idle and slot.generation == lease.generation:
            read = after_answer(slot.content.resident, prompt, answer)
            slot.hold(replace(slot.content, resident=read))


def end(state: State, job: Job, resident: Resident | None = None) -> None:
    """End the job, and release all that it holds.

    `resident` None: its slots hold what they were believed to hold.
    """
    _let_go(state, job)
    state.dirty = state.dirty or bool(state.scanned)  # a slot comes free, perhaps on a Tick
    state.idle_saves_at = min(state.idle_saves_at, state.now)
    request = job.request if isinstance(job, RequestJob | SlotWatch) else None
    in_background = isinstance(job, SaveJob | ProbeLoan)
    was_left = isinstance(job, SlotWatch) or (isinstance(job, RequestJob) and job.cancelled)
    is_left_fill = was_left and request is not None and request.fills
    was_sent = isinstance(job, RequestJob) and job.is_sent
    if isinstance(job, RequestJob) and not was_sent:
        charge_unsent(state, job)
    if isinstance(job, RequestJob) and not job.request.background:
        job.own.backend.person_at = state.now
    for slot in job.held:
        if slot.job is not job:
            continue  # lost with its backend
        held = slot.content.resident if resident is None else resident
        if job.others and was_sent and held is not NOTHING:
            held = UNKNOWN  # the server chose the slots
        uncached = request is not None and resident is not None and not request.reuse
        savable = slot.content.savable and not uncached
        # Before it has touched the slot, the content is somebody else's.
        ruled_out = in_background or (is_left_fill and _has_used_slot(job))
        left = replace(slot.content, resident=held, savable=savable, save_decided=ruled_out)
        slot.release(job, left, slot.last_used if in_background else state.now)
        if slot is job.own and len(held) > 0 and _has_used_slot(job):
            state.inventory.note_use(slot)


def _has_used_slot(job: Job) -> bool:
    """Return whether the slot holds content of a request: it was sent or prefilled."""
    match job:
        case RequestJob():
            return job.request.reuse and (job.is_sent or job.prefilled is not None)
        case SlotWatch(request=Request() as request):
            return request.reuse
        case _:
            return False


def _let_go(state: State, job: Job) -> None:
    """Take a job out of all that it waits for or keeps, but for its leases."""
    state.inventory.jobs.pop(job.id, None)
    job.end()
    if isinstance(job, RequestJob):
        backend = job.own.backend
        backend.prefills.leave(job)
        backend.gate.leave(job)
        if (steps := state.turns.pop(job, None)) is not None:
            steps.close()
        if job.is_sent or not isinstance(job.doing, Restore | Cut):
            state.release_snapshot(job)  # else when its file is no longer read


def _learn(state: State, job: RequestJob, end_: AnswerEnd) -> None:
    """Learn the backend's rates from what was measured of one task."""
    if job.request.takes_several:
        return
    rates = job.own.backend.rates
    reported = end_.reported
    rates.observe_prompt(reported)
    if reported.generated_tokens and reported.generated_s:
        rates.observe_generation(reported.generated_tokens, reported.generated_s)
    if rates.prefill.n:
        _teach(state, job.own.id.backend)


def _teach(state: State, backend: BackendId) -> None:
    """Give the backend's rates to those of its kind that have computed nothing yet.

    All that is known of the others is a short probe, beside whatever ran then. A backend with a
    slow probe would stay unused while another is idle, and states on the other would be displaced.
    """
    inventory = state.inventory
    known = inventory.up.get(backend)
    if known is None:
        return
    for other in inventory.up.values():
        if other.rates.prefill.n or other.info.namespace != known.info.namespace:
            continue
        if _alike(other.info, known.info):
            other.rates.take_after(known.rates)


def _alike(one: BackendInfo, other: BackendInfo) -> bool:
    """Return True if two backends are equally fast, as far as their probes tell."""
    fast, slow = sorted((one.prefill_s_per_token or 0.0, other.prefill_s_per_token or 0.0))
    return not fast or slow <= TUNING.probes_differ * fast
