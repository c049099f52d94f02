"""Records of finished requests: what was planned, what was reported, and the times."""

from router.base.types import Miss, OwnPrefill, Reported, RequestRecord
from router.core.model.effects import Account
from router.core.model.rates import Rates
from router.core.reporting.miss_reasons import missed


def record_of(account: Account, ttft_s: float | None, total_s: float) -> RequestRecord:
    """Return the record for log and metrics; the times are the web layer's, in seconds."""
    reported = account.reported.with_prefill(account.prefilled)
    chosen, sight = account.plan.chosen, account.plan.coverage
    return RequestRecord(
        request=account.request.id,
        slot=account.slot,
        source=chosen.source,
        reason=account.plan.reason,
        outcome=account.outcome,
        planned_tokens=chosen.reused_tokens,
        prompt_tokens=reported.prompt_tokens,
        cached_tokens=reported.cached_tokens,
        computed_tokens=reported.computed_tokens,
        generated_tokens=reported.generated_tokens,
        waited_s=account.waited_s,
        prepared_s=account.prepared_s,
        prefill_queue_s=account.prefill_queue_s,
        ttft_s=ttft_s,
        total_s=total_s,
        predicted_s=account.plan.ttft_s + account.waited_s,
        clients_id=account.request.clients_id,
        caller=account.request.caller,
        session=account.request.session,
        model=account.request.model,
        misread=_is_misread(account),
        cost=account.cost,
        server_s=_server_s(account, reported, total_s),
        avoided_s=account.avoided_s,
        missed=_missed(account, reported.computed_tokens),
        nearest=sight.nearest if sight is not None else None,
    )


def _is_misread(account: Account) -> bool:
    """Return whether the backend counted other tokens of an exact prompt than were read."""
    request, told = account.request, account.reported.prompt_tokens
    several = request.takes_several or not request.prompt.is_exact
    return told is not None and not several and told != request.prompt.n_tokens


def _server_s(account: Account, reported: Reported, total_s: float) -> float:
    """Return the seconds of a server's work; without a report, those in which it held its slot.

    /v1/messages and /v1/responses report no times.
    """
    if reported.prompt_s is not None or reported.generated_s is not None:
        return (reported.prompt_s or 0.0) + (reported.generated_s or 0.0)
    return max(total_s - account.waited_s - account.prefill_queue_s, 0.0)


def avoided_s(rates: Rates, reported: Reported, prefilled: OwnPrefill | None) -> float:
    """Return the seconds to compute the reused tokens, by the current `rates`.

    Reused tokens are the first of the prompt, so a prefill of them alone is priced.
    """
    cached = reported.with_prefill(prefilled).cached_tokens
    return 0.0 if cached is None else rates.prefill_s(cached)


def _missed(account: Account, computed: int | None) -> dict[Miss, int]:
    """Return the computed tokens by reason; empty if the backend did not report them."""
    n_prompt, sight = account.reported.prompt_tokens, account.plan.coverage
    if n_prompt is None or computed is None:
        return {}
    # `planned` is of the first plan; a plan that failed reuses fewer tokens.
    failed = sight is not None and account.plan.chosen.reused_tokens < sight.planned
    return missed(account.request, sight, n_prompt, computed, failed=failed)
