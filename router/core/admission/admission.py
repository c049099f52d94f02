"""Who comes in, who waits, and who gets a slot."""

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

from router.base.errors import (
    ContextTooLongError,
    DeadlineError,
    NoBackendError,
    QueueFullError,
)
from router.base.tokens import head
from router.base.types import BackendId, Request, RequestId, Source
from router.core.admission.deferral import Decision, decide
from router.core.admission.locality_priority import heir
from router.core.execution import prefill_queue
from router.core.execution.job_steps import is_wanted, next_step
from router.core.execution.state import State
from router.core.model.effects import SaveReason, StopWork
from router.core.model.jobs import (
    AtGate,
    CutStep,
    DispatchStep,
    EraseStep,
    InLine,
    Job,
    LookStep,
    PrefillStep,
    RestoreStep,
    SaveStep,
    Stage,
    Step,
)
from router.core.model.plan import Plan
from router.core.model.policy import PolicyName
from router.core.model.request_queue import Waiting
from router.core.planning.baseline_policies import sticky_key
from router.core.planning.displacement import saving_pays
from router.core.reporting.miss_reasons import look

# Waiting requests looked at when something has changed: planning one costs tens of microseconds.
# The first few in turn each time, and of the rest, who may all wait by choice, the next few; soon
# again, until all were.
_LOOKED_AT = 16
_LOOK_ON_AFTER_S = 0.05
_SERVED_AT = 32  # of each model, whether any backend could serve them
_STICKY_KEYS = 100_000


def arrived(state: State, request: Request, now: float) -> None:
    """(1) It fits nowhere: say so. (2) Wait, perhaps for no time."""
    if too_long := _too_long(state, request):
        state.reject(request.id, too_long)
    elif state.stopping:
        state.reject(request.id, NoBackendError("the router is stopping"))
    else:
        state.queue.add(request, now)


def _too_long(state: State, request: Request) -> ContextTooLongError | None:
    """The answer to a prompt for which all backends of its model that are up are too small."""
    longest = max(
        (
            info.n_ctx
            for info in state.fleet.infos.values()
            if info.answers_to(request.model)
            # One without KV is not meant; others are avoided because they failed.
            if info.generates or info.id not in request.avoid
        ),
        default=None,
    )
    if longest is None or len(request.prompt) < longest:
        return None
    return ContextTooLongError(len(request.prompt), longest)


def cancelled(state: State, request: RequestId, now: float) -> None:
    """The client left before its request was sent."""
    if state.queue.remove(request) is not None:
        _stop_for_nobody(state)
        return
    job = state.jobs.get(request)
    if job is None or job.stage is not Stage.PREPARING:
        return
    # A slot action cannot be called back; the job ends with the step that is under way.
    job.cancelled = True
    # What its prefill may have emptied has to be looked at all the same.
    job.steps = deque(step for step in job.steps if isinstance(step, LookStep))
    step, sharing = job.doing, state.fleet.slots[job.slot].sharing
    if isinstance(step, PrefillStep) and sharing and is_wanted(state, job, step.tokens):
        # Others wait for this very prefill: it goes on, for them.
        job.steps.append(SaveStep(job.slot, SaveReason.SHARED))
    elif isinstance(job.doing, InLine | AtGate):
        state.fleet.slots[job.slot].sharing = False
        next_step(state, job, now)  # somebody else may have the slot, and compute it
    else:
        _break_off(state, job)


def _break_off(state: State, job: Job) -> None:
    """Nothing will come of what the job does; what there is of a prefill stays."""
    slot = state.fleet.slots[job.slot]
    slot.sharing, slot.leaving = False, isinstance(job.doing, PrefillStep)
    if slot.leaving:
        prefill_queue.broke_off(slot)
    state.out.append(StopWork(job.id))


def _stop_for_nobody(state: State) -> None:
    """Who waited has left: a prompt that was computed on for him alone is not any more."""
    for job in list(state.jobs.values()):
        step = job.doing
        if not (job.cancelled and isinstance(step, PrefillStep)):
            continue
        if state.fleet.slots[job.slot].sharing and not is_wanted(state, job, step.tokens):
            job.steps = deque(step for step in job.steps if isinstance(step, LookStep))
            _break_off(state, job)


def expire(state: State, now: float) -> None:
    """Time is up for some of those who wait."""
    limits = state.queue.limits
    for waiting in state.queue.overdue(now):
        state.queue.remove(waiting.request.id)
        state.reject(
            waiting.request.id, DeadlineError(f"no slot came free within {limits.deadline_s:g} s")
        )
    for waiting, since in _unserved(state):
        if now - since >= limits.no_backend_s:
            state.queue.remove(waiting.request.id)
            # What it came for may have come back with a shorter context.
            nobody = NoBackendError("no backend for this model is up")
            state.reject(waiting.request.id, _too_long(state, waiting.request) or nobody)


def note_unserved(state: State, now: float) -> None:
    """Since when there is somebody whom no backend could serve, for each model."""
    gone = {waiting.request.model for waiting in _nobodys(state)}
    state.unserved = {model: state.unserved.get(model, now) for model in gone}


def next_giving_up(state: State) -> float | None:
    """When somebody has waited long enough for a backend to come up, in clock seconds."""
    limit_s = state.queue.limits.no_backend_s
    return min((since + limit_s for _, since in _unserved(state)), default=None)


def _unserved(state: State) -> list[tuple[Waiting, float]]:
    """Those that no backend could serve, and since when; as of the last event."""
    if not state.unserved:
        return []
    return [
        (waiting, max(waiting.since, since))
        for waiting in _nobodys(state)
        if (since := state.unserved.get(waiting.request.model)) is not None
    ]


def _nobodys(state: State) -> list[Waiting]:
    """Of the first, those that no backend could serve; the rest have their turn later."""
    return [w for w in state.queue.oldest(_SERVED_AT) if not state.is_served(w.request)]


def stop(state: State, *, save: bool) -> None:
    """Admit nobody any more."""
    state.stopping, state.saves_on_stop = True, save
    for waiting in state.queue:
        state.queue.remove(waiting.request.id)
        state.reject(waiting.request.id, NoBackendError("the router is stopping"))


def patience_ends(state: State, now: float) -> float | None:
    """When the next request has waited for a busy slot for as long as it may, in clock seconds."""
    ends = (waiting.since + state.fleet.policy.max_wait_s for waiting in state.queue)
    return next((end for end in ends if end > now), None)


def serve_queue(state: State, now: float) -> None:
    """Give free slots to those who wait, in the order of the queue.

    1. There is a way to start now: grant.
    2. Waiting for a busy slot is cheaper: let others pass.
    3. It needs all slots of a backend, or the choice of them: nobody behind it may take slots on
       the one it will get, or it would starve. Where somebody else uses the backend, though, it
       may not get it for hours.
    4. There is no room for it: nor for others of its kind, and all of them are one to look at.
    5. So many were looked at: the rest have their turn soon.
    6. Somebody behind it has come for what it would displace: he is granted that, and it is looked
       at again.
    """
    state.look_on_at = None
    if not state.fleet.slots.any_idle():
        state.looked_at.clear()
        return
    idle = {model for model in state.queue.models if state.fleet.has_idle(model)}
    if not idle:
        return
    reserved: set[BackendId] = set()
    full: set[Hashable] = set()

    def asked(waiting: Waiting) -> Request | None:
        """None: it need not be looked at."""
        request = waiting.request
        if request.model not in idle:
            return None
        if reserved:
            request = replace(request, avoid=request.avoid | reserved)
        return None if full and state.fleet.kind(request) in full else request

    for waiting, request in _some(state, asked, now):
        if request.id not in state.queue:
            continue  # it went before somebody
        decision = _give(state, waiting, request, asked, now)
        if not state.fleet.slots.any_idle():
            state.looked_at.clear()  # what comes free next is another matter
            return
        if decision is None:
            if not state.fleet.room(request):
                full.add(state.fleet.kind(request))
            if request.whole_backend or not request.pinnable:
                reserved.update(_to_reserve(state, request))


def _give(
    state: State,
    waiting: Waiting,
    request: Request,
    asked: Callable[[Waiting], Request | None],
    now: float,
) -> Decision | None:
    """Grant a slot to those who go before it, and to itself if there is one left for it; returns
    what is to be done with it."""
    while True:
        decision = decide(state, request, now, now - waiting.since)
        if decision is None or decision.plan.chosen.wait_for is not None:
            return decision
        first = heir(state, waiting, decision.plan, asked, now)
        who, its = first or (waiting, decision)
        _grant(state, who, its.plan, now, pinnable=its.request.pinnable)
        if first is None:
            return decision
        waiting.passed_over += 1


def _some(
    state: State, asked: Callable[[Waiting], Request | None], now: float
) -> Iterator[tuple[Waiting, Request]]:
    """Of those who wait, some: who comes first in turn, and who was not looked at for longest."""
    first = more = skipped = 0
    n_waiting = len(state.queue)
    for waiting in state.queue.in_turn():
        if (request := asked(waiting)) is None:
            continue
        if first < _LOOKED_AT:
            first += 1
        elif request.id in state.looked_at:
            skipped += 1
            continue
        elif more == _LOOKED_AT:
            granted = len(state.queue) < n_waiting
            state.look_on_at = now if granted else now + _LOOK_ON_AFTER_S
            return
        else:
            more += 1
            state.looked_at.add(request.id)
        yield waiting, request
    if skipped and state.changed:  # since they were looked at
        state.look_on_at = now + _LOOK_ON_AFTER_S
    state.looked_at.clear()


def _to_reserve(state: State, request: Request) -> list[BackendId]:
    """Of the backends that are not open to a request but will be, the one that is so first."""
    fleet = state.fleet
    shut = [
        backend
        for backend in fleet.infos
        if fleet.serves(backend, request)
        and not fleet.is_open(backend, request)
        and not fleet.gates_late(backend, request)  # it needs neither
        and all(job.is_ours or job.slot.backend != backend for job in state.jobs.values())
    ]
    return sorted(shut, key=fleet.running)[:1]


def look_back(state: State) -> None:
    """Note what was known of the prompts that were granted last, and what they displace.

    It explains and decides nothing, so it waits until the requests are on their way; nothing else
    may have changed by then.
    """
    granted, state.unexplained = state.unexplained, []
    for job in granted:
        assert job.request is not None
        assert job.plan is not None
        fleet, chosen = state.fleet, job.plan.chosen
        job.plan = replace(job.plan, sight=look(job.request, job.plan, fleet), shared=None)
        kept = chosen.reused_tokens if chosen.source is Source.RESIDENT else 0
        fleet.give_up(fleet.slots[job.slot], kept)
        if job.request.whole_backend:
            for lease in job.others:
                fleet.give_up(fleet.slots[lease.slot])


def turn_away(state: State) -> None:
    """More wait than may: who sent the most loses the last one. Nobody could be served at once."""
    while len(state.queue) > state.queue.limits.max_requests:
        last = state.queue.last()
        state.queue.remove(last)
        state.reject(last, QueueFullError("too many requests are waiting; try again later"))


def _grant(state: State, waiting: Waiting, decision: Plan, now: float, *, pinnable: bool) -> None:
    """Lease first, act after."""
    fleet, request, chosen = state.fleet, waiting.request, decision.chosen
    if request.pinnable is not pinnable:
        request = replace(request, pinnable=pinnable)
    backend = chosen.slot.backend
    slot = fleet.slots[chosen.slot]
    late = fleet.gates_late(backend, request)
    job = Job(
        id=request.id,
        lease=slot.lease(request.id),
        request=request,
        plan=decision,
        since=now,
        waited_s=now - waiting.since,
        gated=fleet.needs_gate(backend, request) and not late,
        late=late,
    )
    state.jobs[job.id] = job
    state.unexplained.append(job)
    needs_s = decision.ttft_s + fleet.rates[backend].generation_s(request.max_new_tokens)
    # What the router computes first can be shared; that a save or a restore comes before does not
    # matter to those who wait for it.
    tokens, slot.sharing = request.prompt.tokens, decision.prefill_first
    slot.pending = head(tokens, len(request.prompt) - 1) if slot.sharing else tokens
    slot.busy_until = now + (decision.ttft_s if slot.sharing else needs_s)
    state.queue.serve(request.id, needs_s - chosen.price.wait_s)  # that is others' time
    if request.whole_backend:
        rest = [other for other in fleet.slots.of(backend) if other.id != slot.id]
        job.others = [other.lease(request.id) for other in rest]
    if chosen.copy_from is not None:
        job.others = [fleet.slots[chosen.copy_from].lease(request.id)]
    generates = fleet.generates(backend)
    if generates and not request.pinnable and not request.whole_backend:
        others = fleet.tempting(backend, request)
        job.others += [other.lease(request.id) for other in others]
    for lease in (job.lease, *job.others):
        fleet.slots[lease.slot].taker = request.tenant
        if not generates:  # nobody's tokens are in there
            fleet.slots[lease.slot].tenant = request.tenant
    fleet.has_tenants = fleet.has_tenants or bool(request.tenant)
    if job.gated:
        fleet.gated.add(backend)
    if chosen.snapshot is not None:
        fleet.catalog.acquire(chosen.snapshot, now)
        job.using = chosen.snapshot
    fleet.granted += 1
    if fleet.policy.name is PolicyName.STICKY:
        fleet.sticky.setdefault(sticky_key(request), chosen.slot)
        if len(fleet.sticky) > _STICKY_KEYS:
            del fleet.sticky[next(iter(fleet.sticky))]
    job.steps = _steps_of(state, job, request, decision)
    next_step(state, job, now)


def _steps_of(state: State, job: Job, request: Request, decision: Plan) -> deque[Step]:
    """The plan as steps."""
    chosen = decision.chosen
    held = [state.fleet.slots[lease.slot] for lease in (job.lease, *job.others)]
    foreign = [slot for slot in held if slot.tenant != request.tenant]
    displaced = held if request.whole_backend else [s for s in foreign if s.id != chosen.slot]
    steps: deque[Step] = deque()
    if chosen.save_displaced and not request.whole_backend:
        steps.append(SaveStep(chosen.slot, SaveReason.DISPLACED))
    steps.extend(
        SaveStep(slot.id, SaveReason.DISPLACED)
        for slot in displaced
        if saving_pays(state.fleet, slot)[2]
    )
    steps.extend(EraseStep(slot.id) for slot in foreign)
    if chosen.copy_from is not None:
        steps += [SaveStep(chosen.copy_from, SaveReason.COPY), RestoreStep(None)]
    elif chosen.snapshot is not None:
        if chosen.cut is not None:
            steps.append(CutStep(chosen.snapshot, chosen.cut))
        steps.append(RestoreStep(chosen.snapshot))
    tokens = request.prompt.tokens
    for length in decision.pauses:
        steps += [PrefillStep(head(tokens, length)), SaveStep(chosen.slot, SaveReason.BOUNDARY)]
    # Less one token: the state is then a strict prefix of every prompt like it, and the
    # client's own request has one token left to compute, none of them twice.
    n_first = len(request.prompt) - 1
    if decision.prefill_first and n_first not in decision.pauses:
        steps.append(PrefillStep(head(tokens, n_first)))
    steps.append(DispatchStep())
    return steps
