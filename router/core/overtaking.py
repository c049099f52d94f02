"""Who waits for what an idle slot holds goes before who would displace it.

On servers that are never idle whoever is first in turn gets the slot that comes free, and what is
in there is lost where no snapshot holds it: the next turn of that conversation, which waits as
well, is computed anew, and displaces somebody else's. Fair it stays, as "Locality-aware Fair
Scheduling in LLM Serving" (Cao et al., 2025) has it: nobody goes first whose client has had
noticeably more, and nobody is passed over more than a few times. See docs/adr/0016.
"""

from itertools import islice

from router.core.plan import Plan
from router.core.queue import Waiting
from router.core.state import State
from router.tokens import common_prefix, count
from router.types import Source

_AMONG = 32  # those next in turn
_AT_MOST = 8  # times for each request
_LEAD_S = 10.0  # of server time that a client may have had more
_LOST_S = 0.5  # of prefill; for less nobody goes first


def gives_way(state: State, waiting: Waiting, made: Plan) -> bool:
    """The plan displaces what somebody behind has come for, and nothing else holds that."""
    fleet, chosen = state.fleet, made.chosen
    slot, request = fleet.slots[chosen.slot], waiting.request
    held, backend = slot.resident, chosen.slot.backend
    if (
        waiting.passed_over >= _AT_MOST
        or len(state.queue) < 2
        or chosen.save_displaced
        or request.slot_hint is not None
        or not fleet.policy.moves_kv
        or count(held.tokens) <= fleet.reach(slot)
    ):
        return False
    # What nobody loses: a snapshot has it, or the request itself goes on from it.
    kept = max(fleet.reach(slot), chosen.reused_tokens * (chosen.source is Source.RESIDENT))
    for other in islice(state.queue.in_turn(), _AMONG):
        asked = other.request
        if asked.id == request.id or not (asked.reuse and asked.pinnable) or asked.prompt.unknown:
            continue
        if not (slot.tenant == asked.tenant and fleet.serves(backend, asked)):
            continue
        if state.queue.lead_s(other, waiting) > _LEAD_S:
            continue
        common = common_prefix(held.tokens, asked.prompt.tokens)
        lost = fleet.reusable(slot, len(asked.prompt), common) - kept
        if lost > 0 and fleet.rates[backend].prefill_s(lost, kept) >= _LOST_S:
            waiting.passed_over += 1
            return True
    return False
