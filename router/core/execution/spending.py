"""What requests cost, however they end, and whether a tenant's next one may begin."""

from router.base.tokens import common_prefix
from router.base.types import BackendId, Cost, Outcome, Prompt, Request
from router.core.execution.state import State
from router.core.model import events as ev
from router.core.model.effects import Spent
from router.core.model.jobs import RequestJob, SlotWatch
from router.core.model.slots import Resident


def may_start(state: State, request: Request) -> bool:
    """Return whether a tenant's requests in progress leave it tokens, whatever they still cost."""
    if request.caller is None or request.caller.tenant not in state.budget.limits:
        return True
    tenant = request.caller.tenant
    reserved = sum(
        _most(state, job)
        for job in state.inventory.jobs.values()
        if isinstance(job, RequestJob | SlotWatch)
        and job.request is not None
        and job.request.caller is not None
        and job.request.caller.tenant == tenant
    )
    return state.budget.left(tenant) > reserved


def _most(state: State, job: RequestJob | SlotWatch) -> float:
    """Return the most tokens that a request in progress may cost. inf: as many as it likes."""
    request, plan = job.request, job.plan
    backend = state.inventory.up.get(job.slot.backend)
    if request is None or plan is None or backend is None:
        return 0.0  # it is lost, and has been counted
    unread = request.prompt.unknown is not None
    n_prompt = request.body_bytes if unread else len(request.prompt)
    answer = request.max_new_tokens
    if answer is None:
        answer = max(backend.info.n_ctx - (0 if unread else n_prompt), 0)
    return max(n_prompt - plan.chosen.reused_tokens, 0) + answer * request.tasks


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


def cost_of(job: RequestJob, event: ev.Finished) -> Cost:
    """Return what a request cost, as reported, or else as far as it is sure.

    Once its answer has begun, its prompt was computed.
    """
    reported = event.reported.with_prefill(job.prefilled)
    own = 0 if job.prefilled is None else job.prefilled.tokens
    reused, computed = job.plan.chosen.reused_tokens, reported.computed_tokens
    if computed is None:
        begun = event.begun or event.outcome is Outcome.OK
        computed = max(own, len(job.request.prompt) - reused) if begun else own
    prompt = reported.prompt_tokens or 0
    return Cost(max(prompt - computed, 0), computed, reported.generated_tokens or 0)


def charge_rest(state: State, watch: SlotWatch, event: ev.Quiet) -> None:
    """Count what a request whose client left was still computing, once its slot is idle.

    Where the slot does not show it, the request counts as if its prompt was computed.
    """
    request, plan = watch.request, watch.plan
    if request is None or plan is None or watch.counted is None:
        return
    prompt, reused = request.prompt, plan.chosen.reused_tokens
    rest, generated = max(len(prompt) - reused, 0), 0
    if event.n_tokens is not None and not watch.is_doubtful and not prompt.unknown:
        held = min(common_prefix(watch.before.tokens, prompt.tokens), reused + watch.prefilled)
        here = computed_since(watch.before, prompt, event, held, begun=watch.has_begun)
        rest = min(here, len(prompt) - held)
        rest, generated = rest + watch.prefilled, here - rest
    more = Cost(
        computed=max(rest - watch.counted.computed, 0),
        generated=max(generated - watch.counted.generated, 0),
    )
    _charge_late(state, request, watch.slot.backend, more)


def computed_since(
    before: Resident,
    prompt: Prompt,
    event: ev.Quiet | ev.PrefillFailed,
    held: int | None = None,
    *,
    begun: bool = False,
) -> int:
    """Return the tokens that a slot computed for a request, which had `held` of them before.

    `held` None: what its content shared with the prompt. A slot that is as long as before and had
    no task did not run the request, unless its answer had `begun`.
    """
    n_tokens = event.n_tokens
    if n_tokens is None or (n_tokens == len(before) and not (event.ran or begun)):
        return 0
    if held is None:
        held = common_prefix(before.tokens, prompt.tokens)
    return max(n_tokens - held, 0)


def charge_unsent(state: State, job: RequestJob) -> None:
    """Count what was computed for a request that is never sent."""
    if job.prefilled is not None:
        _charge_late(state, job.request, job.slot.backend, Cost(computed=job.prefilled.tokens))


def _charge_late(state: State, request: Request, backend: BackendId, cost: Cost) -> None:
    if cost != Cost():
        state.out.append(Spent(request, backend, cost))
        charge(state, request, cost)
