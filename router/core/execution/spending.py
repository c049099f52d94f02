"""What requests cost, however they end, and whether a tenant's next one may begin."""

from router.base.tokens import common_prefix
from router.base.types import BackendId, Cost, Outcome, Prompt, Request
from router.core.execution.state import State
from router.core.model.backend import Backend
from router.core.model.effects import AnswerEnd, PrefillFailed, Quiet, Spent
from router.core.model.jobs import RequestJob, SlotWatch
from router.core.model.plan import Plan
from router.core.model.slots import Resident
from router.core.model.tenancy import Limits


class Budgets:
    """Which tenants have tokens for one more request, summed up once for a walk of the queue."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._may_start: dict[str, bool] = {}

    def granted(self) -> None:
        """Note that a request was granted: it has reserved tokens."""
        self._may_start.clear()

    def pick(self, request: Request) -> Request | None:
        """Return a queued request if it may be planned; refuse it if nothing is left."""
        state, caller = self._state, request.caller
        if not state.budget.limits or caller is None:
            return request
        if caller.tenant not in self._may_start:
            self._may_start[caller.tenant] = _may_start(state, caller.tenant)
        if self._may_start[caller.tenant]:
            return request
        if used := state.budget.refusal(caller.tenant):  # its limit is lower now
            state.queue.remove(request.id)
            state.reject(request.id, used)
        return None


def _may_start(state: State, tenant: str) -> bool:
    """Return whether a tenant's requests in progress leave it tokens, whatever they still cost."""
    if (limits := state.budget.limits.get(tenant)) is None:
        return True
    reserved = sum(
        _most(state, job, limits)
        for job in state.inventory.jobs.values()
        if isinstance(job, RequestJob | SlotWatch)
        and job.request is not None
        and job.request.caller is not None
        and job.request.caller.tenant == tenant
    )
    return state.budget.left(tenant) > reserved


def _most(state: State, job: RequestJob | SlotWatch, limits: Limits) -> float:
    """Return the most tokens that a request in progress may still cost.

    One whose client left costs the rest of its prompt.
    """
    request, plan = job.request, job.plan
    backend = state.inventory.up.get(job.slot.backend)
    if request is None or plan is None or backend is None:
        return 0.0  # it is lost, and has been counted
    prompt = _unread(request, backend.info.n_ctx)
    reused = min(plan.chosen.reused_tokens, prompt)
    if isinstance(job, SlotWatch):
        return 0.0 if job.counted is None else max(prompt - reused - job.counted.computed, 0)
    if job.cancelled:
        return prompt - reused
    return prompt - reused + limits.reused * reused + _answers(request, backend.info.n_ctx)


def _answers(request: Request, n_ctx: int) -> int:
    """Return the most tokens that the answers to a request have."""
    left = n_ctx if request.prompt.unknown else max(n_ctx - request.prompt.n_tokens, 0)
    limit = request.max_new_tokens
    return (left if limit is None else min(limit, left)) * request.tasks


def _unread(request: Request, n_ctx: int) -> int:
    """Return the tokens of a prompt; of one that was not read, no fewer than it has."""
    return (
        min(request.body_bytes, n_ctx * request.tasks)
        if request.prompt.unknown
        else request.prompt.n_tokens
    )


def charge(state: State, request: Request, cost: Cost) -> None:
    """Count a cost; refuse the tenant's waiting requests once its tokens are used."""
    if request.caller is None:
        return
    tenant = request.caller.tenant
    state.budget.spend(tenant, cost)
    if tenant not in state.budget.limits or (error := state.budget.refusal(tenant)) is None:
        return
    for waiting in list(state.queue):
        caller = waiting.request.caller
        if caller is not None and caller.tenant == tenant:
            state.queue.remove(waiting.request.id)
            state.reject(waiting.request.id, error)


def cost_of(state: State, job: RequestJob, end: AnswerEnd) -> Cost:
    """Return the cost of a request, as reported, or else as far as it is sure.

    Once its answer has begun, its prompt was computed. What the answer does not tell costs a tenant
    with a limit the most that it can be: a client may leave the counts out.
    """
    request, n_ctx = job.request, job.own.backend.info.n_ctx
    limited = request.caller is not None and request.caller.tenant in state.budget.limits
    reported = end.reported.with_prefill(job.prefilled)
    own = 0 if job.prefilled is None else job.prefilled.tokens
    reused, computed = job.plan.chosen.reused_tokens, reported.computed_tokens
    if computed is None:
        refused = end.outcome is Outcome.REFUSED
        begun = end.partly or (not refused and (end.begun or end.outcome is Outcome.OK))
        whole = _unread(request, n_ctx) if limited else request.prompt.n_tokens
        computed = max(own, whole - reused) if begun else own
    generated = reported.generated_tokens
    if generated is None:
        generated = _answers(request, n_ctx) if limited and end.outcome is Outcome.OK else 0
    return Cost(max((reported.prompt_tokens or 0) - computed, 0), computed, generated)


def charge_rest(state: State, watch: SlotWatch, seen: Quiet) -> None:
    """Count what a request whose client left was still computing, once its slot is idle.

    Where the slot does not show it, the request counts as if its prompt was computed.
    """
    if watch.counted is None:
        return
    backend = watch.slot.backend
    if watch.payer is not None:
        answers = _answers_in(state, watch, watch.payer, seen)
        _charge_more(state, watch.payer, backend, watch.counted, 0, answers)
    request, plan = watch.request, watch.plan
    if request is None or plan is None:
        return
    prompt, reused = request.prompt, plan.chosen.reused_tokens
    n_ctx = watch.own.backend.info.n_ctx
    rest, generated = max(_unread(request, n_ctx) - reused, 0), 0
    if seen.n_tokens is not None and not watch.is_doubtful and prompt.unknown:
        rest = max(seen.n_tokens - watch.counted.generated, 0) if seen.ran else 0
    elif seen.n_tokens is not None and not watch.is_doubtful:
        held = min(common_prefix(watch.before.tokens, prompt.tokens), reused + watch.prefilled)
        here = computed_since(watch.before, prompt, seen, held, begun=watch.has_begun)
        rest = min(here, prompt.n_tokens - held)
        # In a slot that is as long as before and had no task, nothing but the prompt is sure.
        generated = here - rest if seen.ran or seen.n_tokens != len(watch.before) else 0
        rest += watch.prefilled
    elif request.takes_several:
        generated = _answers_in(state, watch, request, seen)
    _charge_more(state, request, backend, watch.counted, rest, generated)


def _answers_in(state: State, watch: SlotWatch, request: Request, seen: Quiet) -> int:
    """Return the tokens that a request of several tasks generated, as far as one slot shows.

    The server empties the slots of all answers to a prompt but the first, which they equal in
    length, unless one ended by itself.
    """
    if seen.n_tokens is None or not seen.ran:
        return 0
    prompts = _unread(request, watch.own.backend.info.n_ctx)
    return max(seen.n_tokens - prompts * request.answers // request.tasks, 0) * request.answers


def charge_unseen(
    state: State, request: Request, plan: Plan, backend: Backend, counted: Cost
) -> None:
    """Count the rest of a prompt that nobody waits for, where no slot shows what was computed."""
    rest = max(_unread(request, backend.info.n_ctx) - plan.chosen.reused_tokens, 0)
    _charge_more(state, request, backend.id, counted, rest, 0)


def _charge_more(
    state: State, request: Request, backend: BackendId, counted: Cost, rest: int, generated: int
) -> None:
    more = Cost(
        computed=max(rest - counted.computed, 0), generated=max(generated - counted.generated, 0)
    )
    _charge_late(state, request, backend, more)


def computed_since(
    before: Resident,
    prompt: Prompt,
    seen: Quiet | PrefillFailed,
    held: int | None = None,
    *,
    begun: bool = False,
) -> int:
    """Return the tokens that a slot computed for a request, which had `held` of them before.

    `held` None: what its content shared with the prompt. A slot that is as long as before and had
    no task did not run the request, unless its answer had `begun`.
    """
    n_tokens = seen.n_tokens
    if n_tokens is None or (n_tokens == len(before) and not (seen.ran or begun)):
        return 0
    if held is None:
        held = common_prefix(before.tokens, prompt.tokens)
        n_tokens = min(n_tokens, prompt.n_tokens)  # the router's own prefill: there is no answer
    return max(n_tokens - held, 0)


def charge_unsent(state: State, job: RequestJob) -> None:
    """Count what was computed for a request that is never sent."""
    if job.prefilled is not None:
        _charge_late(state, job.request, job.slot.backend, Cost(computed=job.prefilled.tokens))


def _charge_late(state: State, request: Request, backend: BackendId, cost: Cost) -> None:
    if cost != Cost():
        state.out.append(Spent(request, backend, cost))
        charge(state, request, cost)
