"""Admission: which requests are queued, rejected, or given a slot."""

from collections.abc import Callable, Hashable, Iterator
from math import inf

from msgspec.structs import replace

from router.base.errors import ContextTooLongError, NoBackendError, QueueFullError
from router.base.tokens import head
from router.base.types import BackendId, Request, RequestId, SlotId, Source
from router.core.admission import server_swaps
from router.core.execution import idle_saves, prefill_queue
from router.core.execution.job_ends import end
from router.core.execution.preparation import begin, is_wanted, prepare
from router.core.execution.spending import Budgets
from router.core.execution.state import State
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Slot
from router.core.model.effects import Prefill, StopWork
from router.core.model.jobs import AtGate, InPrefillQueue, RequestJob
from router.core.model.plan import Candidate, Plan
from router.core.model.policy import PolicyName
from router.core.model.request_queue import Waiting
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import Work
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.baseline_policies import sticky_key
from router.core.planning.planner import decide
from router.core.planning.wait_candidates import trust_ends
from router.core.reporting.miss_reasons import coverage_of


def arrived(state: State, request: Request) -> None:
    """Queue the request, perhaps for no time; reject it if it fits no backend."""
    state.inventory.servers.unread.pop(request.id, None)
    if too_long := _too_long(state, request):
        state.reject(request.id, too_long)
    elif state.stopping:
        state.reject(request.id, NoBackendError("the router is stopping"))
    elif state.inventory.servers.by_name and (failed := server_swaps.refusal(state, request)):
        state.reject(request.id, failed)
    elif request.caller and (used := state.budget.refusal(request.caller.tenant)):
        state.reject(request.id, used)
    elif state.queue.waiting or not _starts_at_once(state, request):
        state.queue.add(request, state.now)
        if not state.inventory.slots.any_idle():
            _keep_prefix(state.inventory, request, state.now)


def _starts_at_once(state: State, request: Request) -> bool:
    """Grant a request that finds no queue, if it can start now; return whether it could.

    Jobs that wait for their turn come first: then it is queued, for no time perhaps.
    """
    inventory = state.inventory
    if state.turns or not inventory.has_idle(request.model):
        return False
    if state.budget.limits and Budgets(state).pick(request) is None:
        return False
    decision = decide(inventory, request, state.now, 0.0)
    if decision is None or decision.plan.chosen.wait_for is not None:
        return False
    _grant(state, Waiting(request, state.now), decision.plan, pinnable=decision.request.pinnable)
    return True


def _keep_prefix(inventory: Inventory, request: Request, now: float) -> None:
    """Keep what a request in the queue will be restored from.

    Other requests are saved meanwhile, the one whose slot it gets among them: their states would
    evict it.
    """
    if request.prompt.unknown or not request.reuse:
        return
    catalog, tokens = inventory.catalog, request.prompt.tokens
    answering = inventory.answering(request.model)
    for namespace in {namespace_of(info, request.tenant) for info in answering}:
        for match in catalog.match(namespace, tokens, limit=1):
            if match.common >= catalog.limits.min_tokens:
                catalog.protect(match.item, now + TUNING.queued_prefix_kept_s, request.owner)


def _too_long(state: State, request: Request) -> ContextTooLongError | None:
    """Return the error for a prompt that is too long for every backend of its model.

    Only backends that are up count. None: it fits one, or no such backend is up.
    """
    longest, n_prompt = 0, request.prompt.n_tokens
    for info in state.inventory.answering(request.model):
        # A backend without KV is avoided as unfit; others are avoided because they failed.
        if info.generates or info.id not in request.avoid:
            longest = max(longest, info.n_ctx)
    if n_prompt < longest or not longest:
        return None
    return ContextTooLongError(n_prompt, longest)


def cancelled(state: State, request: RequestId) -> None:
    """Drop a request that was not sent yet: its client disconnected."""
    if state.queue.remove(request) is not None:
        stop_for_nobody(state)
        return
    job = state.request_job(request)
    if job is None or job.is_sent:
        return
    # A slot action cannot be cancelled; the job ends with the step that is under way.
    job.cancel()
    step, slot = job.doing, job.own
    if isinstance(step, Prefill) and slot.work.sharing and is_wanted(state, job, job.wanted):
        # Other requests wait for this very prefill: it goes on.
        job.go_on_for_others(wanted=True)
    elif isinstance(job.doing, InPrefillQueue | AtGate):
        slot.do(replace(slot.work, sharing=False))
        end(state, job)  # another job may have the slot, and compute it
    else:
        _break_off(state, job)


def _break_off(state: State, job: RequestJob) -> None:
    """Break off what the job does; a prefill's result so far stays in the slot."""
    slot = job.own
    abandoned = isinstance(job.doing, Prefill)
    slot.do(replace(slot.work, sharing=False, prefill_abandoned=abandoned))
    if abandoned:
        prefill_queue.broke_off(state, job)
    state.out.append(StopWork(job.id))


def stop_for_nobody(state: State) -> None:
    """Break off abandoned prefills that no queued request waits for any more."""
    for job in list(state.inventory.jobs.values()):
        if not (isinstance(job, RequestJob) and job.cancelled):
            continue
        if not isinstance(job.doing, Prefill):
            continue
        if job.own.work.sharing and not is_wanted(state, job, job.wanted):
            job.go_on_for_others(wanted=False)
            _break_off(state, job)


def save_unasked(state: State, slot: SlotId) -> None:
    """Note that no other host waits any more for what a slot computes."""
    idle_saves.not_for_host(state, slot)
    stop_for_nobody(state)


def give_up_unserved(state: State) -> None:
    """Reject the queued requests that have waited too long for a backend to come up."""
    for waiting, since in _unserved(state, state.now):
        if state.now - since >= _patience_s(state, waiting):
            state.queue.remove(waiting.request.id)
            # Its backend may have come back with a shorter context.
            no_backend = NoBackendError("no backend for this model is up")
            state.reject(waiting.request.id, _too_long(state, waiting.request) or no_backend)


def _patience_s(state: State, waiting: Waiting) -> float:
    """Return how long a request waits for a backend to come up."""
    return 0.0 if waiting.request.may_leave else state.queue.limits.no_backend_s


def note_unserved(state: State) -> None:
    """Note for each model since when no backend could serve a queued request."""
    gone = {waiting.request.model for waiting in _nobodys(state, state.now)}
    state.unserved = {model: state.unserved.get(model, state.now) for model in gone}


def wakeup(state: State, now: float) -> float:
    """Return when the queue is to be served again, though nothing else happens.

    In clock seconds; inf: never. The reasons:

    1. The rest of the queue is still to be planned.
    2. A request has waited as long as it may for a busy slot.
    3. An abandoned slot or a shared prefill is no longer waited for.
    4. A request has waited long enough for a backend to come up.
    5. The last slot of a backend is no longer kept free of background requests.
    6. A tenant's budget begins anew.
    """
    if not state.queue:
        return inf
    max_wait_s = state.inventory.policy.max_wait_s
    patience = (waiting.since + max_wait_s for waiting in state.queue)
    return min(
        inf if state.resume_scan_at is None else state.resume_scan_at,
        next((end for end in patience if end > now), inf),
        trust_ends(state.inventory, now),
        min((since + _patience_s(state, w) for w, since in _unserved(state, now)), default=inf),
        _not_kept_free_at(state, now),
        now + state.budget.window_left_s if _waits_for_budget(state) else inf,
    )


def _waits_for_budget(state: State) -> bool:
    limits = state.budget.limits
    return bool(limits) and any(
        w.request.caller is not None and w.request.caller.tenant in limits for w in state.queue
    )


def _not_kept_free_at(state: State, now: float) -> float:
    """Return when a slot that is kept free now may go to a queued background request.

    In clock seconds; inf: never.
    """
    waiting = {w.request.tasks: w.request for w in state.queue if w.request.background}
    backends = state.inventory.up.values()
    ends = (backend.kept_free_until(one) for one in waiting.values() for backend in backends)
    return min((end for end in ends if end > now), default=inf)


def _unserved(state: State, now: float) -> list[tuple[Waiting, float]]:
    """Return the requests that no backend could serve as of the last event, and since when."""
    if not state.unserved:
        return []
    return [
        (waiting, max(waiting.since, since))
        for waiting in _nobodys(state, now)
        if (since := state.unserved.get(waiting.request.model)) is not None
    ]


def _nobodys(state: State, now: float) -> list[Waiting]:
    """Return those of the oldest requests that no backend could serve; the rest come later.

    A request for a model that is being loaded, or waits for room, is not among them.
    """
    return [
        w
        for w in state.queue.oldest(TUNING.checked_for_backend)
        if not state.inventory.is_served(w.request) and not _will_be_loaded(state, w.request, now)
    ]


def _will_be_loaded(state: State, request: Request, now: float) -> bool:
    inventory = state.inventory
    return inventory.servers.may_serve(request.model, now) and not inventory.is_loaded(
        request.model
    )


def stop(state: State, save: bool) -> None:
    """Admit no more requests, and reject those in the queue; `save` what pays off."""
    state.stopping, state.saves_on_stop = True, save
    for waiting in state.queue:
        state.queue.remove(waiting.request.id)
        state.reject(waiting.request.id, NoBackendError("the router is stopping"))
    server_swaps.reject_all(state, NoBackendError("the router is stopping"))


def serve_queue(state: State) -> None:
    """Give free slots to queued requests, in the order of the queue.

    1. The request can start now: admit it.
    2. Waiting for a busy slot is cheaper: let others pass.
    3. It needs several slots of a backend, or the choice of them: no later request may take slots
       on the backend that it will get, or it would starve. A backend that unknown clients use is
       not kept for it: they may use it for hours.
    4. There is no room for it: nor for others of its kind, so only the first of a kind is planned.
    5. Enough requests were planned: the rest are planned soon.
    """
    state.resume_scan_at = None
    if not state.inventory.slots.any_idle():
        state.scanned.clear()
        return
    idle = {model for model in state.queue.models if state.inventory.has_idle(model)}
    if not idle:
        return
    reserved: set[BackendId] = set()
    full: set[Hashable] = set()

    budgets = Budgets(state)

    def asked(waiting: Waiting) -> Request | None:
        """Return the request to plan. None: it need not be planned."""
        request = waiting.request
        if request.model not in idle or budgets.pick(request) is None:
            return None
        if reserved:
            request = replace(request, avoid=request.avoid | reserved)
        return None if full and state.inventory.kind(request) in full else request

    for waiting, request in _some(state, asked):
        decision = decide(state.inventory, request, state.now, state.now - waiting.since)
        if decision is not None and decision.plan.chosen.wait_for is None:
            _grant(state, waiting, decision.plan, pinnable=decision.request.pinnable)
            budgets.granted()
        if not state.inventory.slots.any_idle():
            state.scanned.clear()  # plan all again when a slot comes free
            return
        if decision is None:
            if not state.inventory.room(request, state.now):
                full.add(state.inventory.kind(request))
            if not request.takes_one_slot:
                reserved.update(_to_reserve(state, request))
            reserved.update(
                state.inventory.lacks_cells(request)
            )  # else shorter ones would starve it


def _some(
    state: State, asked: Callable[[Waiting], Request | None]
) -> Iterator[tuple[Waiting, Request]]:
    """Yield a few queued requests: the first in order, then those unplanned for longest."""
    first = more = skipped = 0
    n_waiting = len(state.queue)
    for waiting in state.queue.in_turn():
        if (request := asked(waiting)) is None:
            continue
        if first < TUNING.scanned_at_once:
            first += 1
        elif request.id in state.scanned:
            skipped += 1
            continue
        elif more == TUNING.scanned_at_once:
            granted = len(state.queue) < n_waiting
            state.resume_scan_at = state.now if granted else state.now + TUNING.resume_scan_after_s
            return
        else:
            more += 1
            state.scanned.add(request.id)
        yield waiting, request
    if skipped and state.dirty:  # since they were planned
        state.resume_scan_at = state.now + TUNING.resume_scan_after_s
    state.scanned.clear()


def _to_reserve(state: State, request: Request) -> list[BackendId]:
    """Return the backend, if any, that is the first to open to the request."""
    inventory = state.inventory
    shut = [
        backend
        for backend in inventory.serving(request)
        if not inventory.is_open(backend, request)
        and inventory.claim(backend, request) is not SlotClaim.STEERED  # it takes one slot of any
        and all(job.is_ours or job.slot.backend != backend.id for job in inventory.jobs.values())
    ]
    return [backend.id for backend in sorted(shut, key=lambda one: one.running)[:1]]


def explain_admitted(state: State) -> None:
    """Note what was known of the prompts admitted last, and what they displace.

    The note explains and decides nothing, so it waits until the requests are on their way. Nothing
    else may have changed by then.
    """
    granted, state.unexplained = state.unexplained, []
    for job in granted:
        inventory, chosen = state.inventory, job.plan.chosen
        coverage = coverage_of(job.request, job.plan, inventory)
        job.explain(replace(job.plan, coverage=coverage, shared=None))
        kept = chosen.reused_tokens if chosen.source is Source.RESIDENT else 0
        if job.claim is not SlotClaim.SEVERAL:  # else its slots are seen later
            inventory.note_displaced(job.own, kept)


def turn_away(state: State) -> None:
    """Reject requests over the queue's limit: the last one of the client with the most.

    None of the queued requests could be served at once.
    """
    while len(state.queue) > state.queue.limits.max_requests:
        last = state.queue.last()
        state.queue.remove(last)
        state.reject(last, QueueFullError("too many requests are waiting; try again later"))


# Share of a content that a request has to go on from, or it has not come back.
_RETURNED = 0.5


def _note_return(inventory: Inventory, request: Request, chosen: Candidate, now: float) -> None:
    """Note whose content a request goes on from."""
    slot, returns = inventory.slots[chosen.slot], inventory.returns
    goes_on = chosen.source is Source.RESIDENT
    if goes_on and chosen.reused_tokens >= _RETURNED * len(slot.content.resident):
        returns.came_back(slot.fate)
    if chosen.snapshot is not None:
        returns.restored(chosen.snapshot)
    if chosen.copy_from is not None:
        returns.came_back(inventory.slots[chosen.copy_from].fate)
    back_s = now - slot.last_used if goes_on else 0.0
    slot.hold(replace(slot.content, returned_after_s=back_s))


def _grant(state: State, waiting: Waiting, decision: Plan, *, pinnable: bool) -> None:
    """Lease the chosen slot to the request, then start its steps."""
    now = state.now
    inventory, request, chosen = state.inventory, waiting.request, decision.chosen
    if request.pinnable is not pinnable:
        request = replace(request, pinnable=pinnable)
    backend, slot = inventory.backends[chosen.slot.backend], inventory.slots[chosen.slot]
    claim = inventory.claim(backend, request)
    needs_s = decision.ttft_s + backend.rates.generation_s(request.max_new_tokens)
    # What the router computes first can be shared. A save or a restore before it does not matter to
    # requests that wait for it.
    tokens, shared = request.prompt.tokens, decision.prefill_first
    work = Work(
        request.tenant,
        pending=head(tokens, request.prompt.n_tokens - 1) if shared else tokens,
        sharing=shared,
        busy_until=now + (decision.ttft_s if shared else needs_s),
    )
    _note_return(inventory, request, chosen, now)
    job = RequestJob(
        id=request.id,
        own=slot,
        request=request,
        plan=decision,
        since=now,
        waited_s=now - waiting.since,
        claim=claim,
        fate=inventory.returns.begin(request),
    )
    slot.lease(job, work)
    inventory.jobs[job.id] = job
    state.unexplained.append(job)
    state.queue.serve(request, needs_s - chosen.price.wait_s)  # the wait is other clients' time
    crowding = _lease_others(inventory, job, slot)
    if not backend.info.is_managed:  # the router keeps no tokens there
        for used in job.held:
            used.hold(replace(used.content, tenant=request.tenant))
    inventory.has_tenants = inventory.has_tenants or bool(request.tenant)
    if claim in (SlotClaim.SERVER_PLACED, SlotClaim.SEVERAL) and backend.info.is_managed:
        backend.gate.take(job)
    if chosen.snapshot is not None:
        inventory.catalog.add_reference(chosen.snapshot, now)
        if request.keep_s:
            inventory.catalog.protect(chosen.snapshot, now + request.keep_s, request.keep.owner)
        job.use(chosen.snapshot)
    inventory.granted += 1
    if not request.background:
        backend.person_at = now
    if inventory.policy.name is PolicyName.STICKY:
        inventory.sticky.setdefault(sticky_key(request), chosen.slot)
        if len(inventory.sticky) > TUNING.sticky_keys:
            del inventory.sticky[next(iter(inventory.sticky))]
    begin(state, prepare(state, job, crowding))


def _lease_others(inventory: Inventory, job: RequestJob, slot: Slot) -> list[Slot]:
    """Lease what the job needs beside its slot; return the slots that are emptied for room."""
    request, chosen, backend = job.request, job.plan.chosen, slot.backend
    work = Work(request.tenant, busy_until=slot.work.busy_until)
    if job.claim is SlotClaim.SEVERAL:  # which of them it takes is seen when it runs
        job.hold_also([other.lease(job, work) for other in backend.slots if other.is_idle])
    if job.claim is SlotClaim.UNMANAGED and (backend.info.generates or request.whole_backend):
        idle = [other for other in backend.slots if other.is_idle]
        n_more = request.n_slots(backend.info.n_slots) - 1
        job.hold_also([other.lease(job, work) for other in idle[:n_more]])
    if chosen.copy_from is not None:
        job.hold_also([inventory.slots[chosen.copy_from].lease(job, work)])
    if job.claim in (SlotClaim.STEERED, SlotClaim.SERVER_PLACED):
        others = inventory.attracting(backend, request)
        job.hold_also([other.lease(job, work) for other in others])
    crowding: list[Slot] = []
    if backend.info.unified and backend.info.is_managed:
        held = len(inventory.catalog[chosen.snapshot]) if chosen.snapshot is not None else 0
        crowding = inventory.in_the_way(slot, request, held)
        job.hold_also([other.lease(job, work) for other in crowding])
    return crowding
