"""Who waits for what an idle slot holds goes before who would displace it.

On servers that are never idle whoever is first in turn gets the slot that comes free, and what is
in there is lost where no snapshot holds it: the next turn of that conversation, which waits as
well, is computed anew, and displaces somebody else's. Fair it stays, as "Locality-aware Fair
Scheduling in LLM Serving" (Cao et al., 2025) has it: nobody goes first whose client has had
noticeably more, and nobody is passed over more than a few times. See docs/adr/0016.
"""

from collections.abc import Callable
from itertools import islice

from router.base.tokens import common_prefix, count
from router.base.types import Request, Source
from router.core.admission.deferral import Decision, decide
from router.core.execution.state import State
from router.core.model.plan import Plan
from router.core.model.request_queue import Waiting

_AMONG = 16  # those next in turn
_TRIED = 2  # of these, who would be spared enough; as a rule the first is granted what he came for
_AT_MOST = 8  # times that a request is passed over
_LEAD_S = 10.0  # of server time that a client may have had more
_LOST_S = 0.5  # of prefill; for less nobody goes first


def heir(
    state: State,
    waiting: Waiting,
    made: Plan,
    asked: Callable[[Waiting], Request | None],
    now: float,
) -> tuple[Waiting, Decision] | None:
    """Who has come for what the plan would displace, if nothing else holds that and he can start
    in that very slot now. `asked` is as what somebody may be looked at."""
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
        or request.whole_backend  # an idle backend was waited for
        or request.slot_hint is not None
        or not fleet.policy.moves_kv
        or count(held) <= saved
    ):
        return []
    # What nobody loses: a snapshot has it, or the request itself goes on from it.
    kept = max(saved, chosen.reused_tokens * (chosen.source is Source.RESIDENT))
    came = []
    for other in islice(state.queue.in_turn(), _AMONG):
        its = other.request
        if other is waiting or its.prompt.unknown or its.whole_backend or not its.reuse:
            continue
        if not (its.pinnable or fleet.gates_late(backend, its)) or not fleet.wants(slot, its):
            continue
        if slot.tenant != its.tenant or not fleet.serves(backend, its):
            continue
        if state.queue.lead_s(other, waiting) > _LEAD_S:
            continue
        lost = fleet.reusable(slot, len(its.prompt), common_prefix(held, its.prompt.tokens)) - kept
        if lost > 0 and fleet.rates[backend].prefill_s(lost, kept) >= _LOST_S:
            came.append(other)
    return came
