"""Baseline policies: they never move KV, and serve for comparison.

Content that a slot happens to hold still counts.
"""

from router.base.tokens import common_prefix
from router.base.types import Request, SlotId
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend
from router.core.model.plan import Plan
from router.core.model.policy import PolicyName
from router.core.planning.start_candidates import PricingContext, cold, resident

_SHORT = 64  # characters; most session names are shorter


def baseline(context: PricingContext, room: list[Backend]) -> Plan | None:
    """Choose by the policy's rule among the backends that have `room`. None: wait.

    1. `sticky`: the conversation's first slot, however long the wait; else the least busy. A first
       slot that is gone, or that a `slot_hint` rules out, does not count.
    2. `round_robin`: the next slot of a fixed cycle.
    3. `least_busy`: the backend with the fewest running, then the slot idle for longest.
    """
    inventory = context.inventory
    free = [slot for backend in room for slot in backend.free(context.request)]
    if inventory.policy.name is PolicyName.STICKY:
        home = _home(inventory, context.request)
        if home is not None:
            free = [slot for slot in free if slot.id == home]
    if not free:
        return None
    if inventory.policy.name is PolicyName.ROUND_ROBIN:
        everyone = [slot.id for slot in inventory.slots]
        turn = inventory.granted % len(everyone)
        in_turn = everyone[turn:] + everyone[:turn]
        slot = min(free, key=lambda s: in_turn.index(s.id))
    else:
        slot = min(free, key=lambda s: (context.running(s.backend), s.last_used, s.id))
    held, wanted = slot.content.resident.tokens, context.request.prompt.tokens
    foreign = slot.content.tenant != context.request.tenant
    common = 0 if foreign or context.has_no_say else common_prefix(held, wanted)
    reused = context.inventory.reusable(slot, context.n_prompt, common)
    chosen = resident(context, slot, common, reused) if reused else cold(context, slot)
    return Plan(
        chosen=chosen,
        reason=inventory.policy.name,
        shared=None if context.has_no_say else context.shared,
    )


def _home(inventory: Inventory, request: Request) -> SlotId | None:
    """Return the first slot of the conversation, if it can still serve the request."""
    home = inventory.sticky.get(sticky_key(request))
    backend = inventory.up.get(home.backend) if home is not None else None
    if home is None or backend is None or not inventory.serves(backend, request):
        return None
    slots = backend.slots
    if home.index >= len(slots) or not backend.wants(slots[home.index], request):
        return None
    return home


def sticky_key(request: Request) -> str:
    """Return a conversation's key: its session, else its first 128 tokens.

    A long key is hashed: a hundred thousand keys are kept.
    """
    session = None if request.session is None else request.session.id
    known_by = session or request.prompt.tokens[:512].hex() or request.id
    key = f"{known_by} {request.tenant}" if request.tenant else known_by
    return key if len(key) <= _SHORT else f"{hash(key):x}"
