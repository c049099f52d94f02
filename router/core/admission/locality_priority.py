"""Locality priority: admit a request that reuses a slot before one that displaces it.

On servers that are never idle the first request of the queue gets the slot that comes free. The
content of that slot is lost where no snapshot holds it. The next turn of that conversation, also
queued, is then computed anew and displaces another's content. Fairness is bounded as in
"Locality-aware Fair Scheduling in LLM Serving" (Cao et al., 2025): no request goes first if its
client has had noticeably more, and none is passed over more than a few times. See docs/adr/0016.
"""

from collections.abc import Callable
from itertools import islice

from router.base.tokens import common_prefix, count
from router.base.types import Request, Source
from router.core.admission.deferral import Decision, decide
from router.core.execution.state import State
from router.core.model.plan import Plan
from router.core.model.request_queue import Waiting

_AMONG = 16  # the next requests of the queue
_TRIED = 2  # of those that would be spared enough; usually the first can start there
_AT_MOST = 8  # times that a request is passed over
_LEAD_S = 10.0  # server time that a client may have had more
_LOST_S = 0.5  # prefill spared; for less no request goes first


def overtaking_request(
    state: State,
    waiting: Waiting,
    made: Plan,
    asked: Callable[[Waiting], Request | None],
    now: float,
) -> tuple[Waiting, Decision] | None:
    """Return a request that reuses what the plan would displace, with its decision.

    Only if nothing else holds that content, and the request can start in that very slot now.
    `asked` returns a request as it may be planned, or None.
    """
    slot = made.chosen.slot
    for other in _who_came(state, waiting, made)[:_TRIED]:
        request = asked(other)
        its = decide(state, request, now, now - other.since) if request is not None else None
        if its and its.plan.chosen.wait_for is None and its.plan.chosen.slot == slot:
            return other, its
    return None


def _who_came(state: State, waiting: Waiting, made: Plan) -> list[Waiting]:
    fleet, chosen, request = state.fleet, made.chosen, waiting.request
    slot, backend = fleet.slots[chosen.slot], chosen.slot.backend
    held, saved = slot.resident.tokens, fleet.reach(slot)
    if (
        waiting.passed_over >= _AT_MOST
        or len(state.queue) < 2
        or chosen.save_displaced
        or request.whole_backend  # it waited for an idle backend
        or request.slot_hint is not None
        or not fleet.policy.moves_kv
        or count(held) <= saved
    ):
        return []
    # Not lost: a snapshot holds it, or the request itself goes on from it.
    kept = max(saved, chosen.reused_tokens * (chosen.source is Source.RESIDENT))
    came = []
    for other in islice(state.queue.in_turn(), _AMONG):
        its = other.request
        if other is waiting or its.prompt.unknown or its.whole_backend or not its.reuse:
            continue
        if not (its.pinnable or fleet.gates_at_dispatch(backend, its)) or not fleet.wants(
            slot, its
        ):
            continue
        if slot.tenant != its.tenant or not fleet.serves(backend, its):
            continue
        if state.queue.lead_s(other, waiting) > _LEAD_S:
            continue
        lost = fleet.reusable(slot, len(its.prompt), common_prefix(held, its.prompt.tokens)) - kept
        if lost > 0 and fleet.rates[backend].prefill_s(lost, kept) >= _LOST_S:
            came.append(other)
    return came
