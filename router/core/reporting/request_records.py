"""Records of finished requests: what was planned, what was reported, and the times."""

from router.base.types import Miss, Reported, RequestRecord
from router.core.model.effects import Account
from router.core.model.rates import Rates
from router.core.reporting.miss_reasons import missed


def record_of(account: Account, ttft_s: float | None, total_s: float) -> RequestRecord:
    """Return the record for log and metrics; the times are the web layer's, in seconds."""
    reported, chosen, sight = account.reported, account.plan.chosen, account.plan.coverage
    computed = computed_tokens(reported, account.prefilled)
    return RequestRecord(
        request=account.request.id,
        slot=account.slot,
        source=chosen.source,
        reason=account.plan.reason,
        outcome=account.outcome,
        planned_tokens=chosen.reused_tokens,
        prompt_tokens=reported.prompt_tokens,
        cached_tokens=reported.cached_tokens,
        computed_tokens=computed,
        generated_tokens=reported.generated_tokens,
        waited_s=account.waited_s,
        prepared_s=account.prepared_s,
        prefill_queue_s=account.prefill_queue_s,
        ttft_s=ttft_s,
        total_s=total_s,
        predicted_s=account.plan.ttft_s + account.waited_s,
        clients_id=account.request.clients_id,
        caller=account.request.caller,
        avoided_s=account.avoided_s,
        missed=_missed(account, computed),
        nearest=sight.nearest if sight is not None else None,
    )


def avoided_s(rates: Rates, reported: Reported, prefilled: Reported | None) -> float:
    """Return the seconds to compute the reused tokens, by the current `rates`.

    Reused tokens are the first of the prompt, so a prefill of them alone is priced.
    """
    computed = computed_tokens(reported, prefilled)
    if reported.prompt_tokens is None or computed is None:
        return 0.0
    return rates.prefill_s(reported.prompt_tokens - computed)


def _missed(account: Account, computed: int | None) -> dict[Miss, int]:
    """Return the computed tokens by reason; empty if the backend did not report them."""
    n_prompt, sight = account.reported.prompt_tokens, account.plan.coverage
    if n_prompt is None or computed is None:
        return {}
    # `planned` is of the first plan; a plan that failed reuses fewer tokens.
    failed = sight is not None and account.plan.chosen.reused_tokens < sight.planned
    return missed(account.request, sight, n_prompt, computed, failed=failed)


def computed_tokens(reported: Reported, prefilled: Reported | None) -> int | None:
    """Return the prompt tokens computed for a request and its prefill. None: not reported.

    At most the prompt: the two may share a token that had to be evaluated again.
    """
    computed = reported.computed_tokens
    if reported.prompt_tokens is None or computed is None:
        return None
    before = prefilled.computed_tokens if prefilled is not None else None
    return min(computed + (before or 0), reported.prompt_tokens)
