"""A plan as JSON: candidates and prices, for `POST /kvferry/plan` and for finished requests."""

from router.core.model.plan import Candidate, Plan


def plan_json(made: Plan) -> dict[str, object]:
    """Return the chosen candidate and the losers, each with its price by part in seconds."""
    return {
        "chosen": _candidate(made.chosen),
        "prefill_first": made.prefill_first,
        "boundary_saves": list(made.boundary_saves),
        "boundary_saves_s": round(made.boundary_saves_s, 6),
        "losers": [_candidate(loser) for loser in made.losers],
    }


def _candidate(candidate: Candidate) -> dict[str, object]:
    price = candidate.price
    parts = {
        "wait": price.wait_s,
        "save_displaced": price.save_s,
        "rewrite": price.rewrite_s,
        "restore": price.restore_s,
        "handling": price.handling_s,
        "prefill": price.prefill_s,
        "stall": price.stall_s,
        "expected_loss": price.loss_s,
    }
    return {
        "backend": candidate.slot.backend,
        "slot": candidate.slot.index,
        "source": candidate.source,
        "reused_tokens": candidate.reused_tokens,
        "snapshot": candidate.snapshot,
        "cut": candidate.cut,
        "copy_from": str(candidate.copy_from) if candidate.copy_from else None,
        "waits_for": str(candidate.wait_for) if candidate.wait_for else None,
        "total_s": round(price.total_s, 6),
        "breakdown_s": {name: round(value, 6) for name, value in parts.items() if value},
    }
