"""Plan a request: price every way to serve it in seconds, and choose the cheapest.

`decide` is for a queued request: as planned, later, elsewhere, or server-placed.

Pure: the same inventory, request and time always give the same plan. `POST /kvferry/plan` calls the
same function as production.
"""

from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from router.base.types import MemoryKind, Request, Source
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.jobs import RequestJob
from router.core.model.plan import Candidate, Plan
from router.core.model.policy import PolicyName
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import Phase
from router.core.model.tuning import TUNING
from router.core.planning.baseline_policies import baseline
from router.core.planning.early_saves import boundary_saves
from router.core.planning.prefill import rank, rank_of, remaining_prefill_s
from router.core.planning.pricing import can_save
from router.core.planning.start_candidates import PricingContext, starting_now
from router.core.planning.wait_candidates import starting_later


def plan(
    request: Request,
    inventory: Inventory,
    now: float,
    waited_s: float = 0.0,
    losers: int = TUNING.losers,
) -> Plan | None:
    """Return the best plan for a request now. None: the request can only wait.

    The best `losers` other candidates are sure to be included, and of the rest those that were
    priced on the way. None of them decides anything, and with many slots they take longer than the
    decision. If `chosen.wait_for` of the plan is set, another slot is free, but waiting is cheaper.
    """
    context = PricingContext(request, inventory, now)
    room = inventory.room(request, now)
    if not inventory.policy.name.moves_kv:
        return baseline(context, room)
    if not room:
        return None
    has_no_say = context.has_no_say
    patient = waited_s < inventory.policy.max_wait_s
    if patient and request.max_new_tokens and _waits_for_room(context, room):
        return None
    later: list[Candidate] = []
    if not has_no_say and any(backend.may_be_waited_for for backend in inventory.up.values()):
        later = starting_later(context, 1 + losers, patient=patient)
    # Owners of a prefix compete by other rules than their price alone.
    shared = [way for way in later if way.source is Source.SNAPSHOT]
    candidates = starting_now(context, room, 1 + losers, shared) + later
    if len(candidates) > 1:
        candidates.sort(key=Candidate.order)
    chosen = candidates[0]
    if inventory.policy.name is PolicyName.PREFER_OWNER:
        chosen = _owner_first(candidates)
    starts = chosen.wait_for is None and not has_no_say
    kind = inventory.backends[chosen.slot.backend].info.memory_kind
    stops: tuple[int, ...] = ()
    stops_s = 0.0
    if starts and kind is not MemoryKind.FULL:
        stops, stops_s = boundary_saves(inventory, request, chosen)
    return Plan(
        chosen=chosen,
        losers=tuple(way for way in candidates if way is not chosen)[: max(losers, TUNING.losers)],
        reason=_reason(request, chosen),
        prefill_first=_prefill_first(request, chosen, inventory),
        boundary_saves=stops,
        boundary_saves_s=stops_s,
        shared=context.shared if starts else None,
    )


def _waits_for_room(context: PricingContext, room: list[Backend]) -> bool:
    """Return True if the answer may be cut off in all idle slots, and waiting costs less.

    The wait is for a slot that can hold the longest answer that the client allows.
    """
    loss_s = min(context.cut_off_s(backend) for backend in room)
    if not loss_s:
        return False
    inventory, whole = context.inventory, context.n_prompt + (context.request.max_new_tokens or 0)
    with_room = {backend.id for backend in room}
    waits_s = (
        slot.work.busy_until - context.now
        if slot.work.busy_until > context.now
        else TUNING.unknown_end_s
        for backend in inventory.serving(context.request)
        if backend.id not in with_room and backend.info.n_ctx >= whole
        for slot in backend.slots
    )
    return loss_s > min(waits_s, default=inf)


def _owner_first(candidates: list[Candidate]) -> Candidate:
    """Prefer the busy slot that holds the prefix, unless waiting for it costs more.

    The wait is compared with the time of the cheapest other way, plus the stall of the streams that
    it would stop. Unlike by price alone, displaced content does not count: the owner is preferred.
    """
    owners = [way for way in candidates if way.wait_for and way.source is Source.RESIDENT]
    others = [way for way in candidates if way not in owners]
    if not owners or not others:
        return candidates[0]
    owner, other = owners[0], others[0]
    now_s = other.price.ttft_s - other.price.save_s + other.price.stall_s
    return owner if owner.price.ttft_s <= now_s else other


def _prefill_first(request: Request, chosen: Candidate, inventory: Inventory) -> bool:
    """Return True if the router computes the prompt by itself before the client's request.

    1. The request is server-placed: afterwards the leased slot has by far the longest common
       prefix, so the server picks it (llama-server.md section 2.2).
    2. The prefill takes long: other requests with the same prefix can then share it.
    3. There is no client's request after it.
    """
    prompt, backend = request.prompt, inventory.backends[chosen.slot.backend]
    claim = inventory.claim(backend, request)
    if claim in (SlotClaim.UNMANAGED, SlotClaim.SEVERAL):
        return False
    if not prompt.is_exact or not request.reuse or not backend.reuses(request):
        return False
    if request.warms:
        return True
    if prompt.n_tokens - chosen.reused_tokens < 2:
        return False  # only the last token is left, and the client's request computes that
    if claim is not SlotClaim.PINNED:
        return True
    if not inventory.policy.is_long(chosen.price.prefill_s):
        return False
    return can_save(inventory, backend, prompt.n_tokens - 1)


def _reason(request: Request, chosen: Candidate) -> str:
    if request.prompt.unknown:
        return f"tokens unknown: {request.prompt.unknown}"
    if not request.reuse:
        return "the client asked for no reuse"
    if chosen.wait_for is not None:
        return f"waiting for {chosen.wait_for} is cheaper"
    return f"{chosen.source} is cheapest at {chosen.price.total_s:.3f}s"


class Decision(NamedTuple):
    """A plan, and the request as it is sent: perhaps unpinned."""

    request: Request
    plan: Plan


def decide(inventory: Inventory, request: Request, now: float, waited_s: float) -> Decision | None:
    """Return the best way to serve a request. None: not yet.

    A request that the server places better is sent unpinned if no request has to wait for that;
    else it is pinned.
    """
    if request.server_picks:
        unpinned = replace(request, pinnable=False)
        made = _planned(inventory, unpinned, now, waited_s)
        if made is not None and made.chosen.wait_for is None:
            return Decision(unpinned, made)
    made = _planned(inventory, request, now, waited_s)
    return None if made is None else Decision(request, made)


def _planned(inventory: Inventory, request: Request, now: float, waited_s: float) -> Plan | None:
    """Plan the request elsewhere, or not yet, where it would take the last slot only to wait.

    Another request could use that slot while this one waits in the prefill queue.
    """
    while True:
        made = plan(request, inventory, now, waited_s, losers=0)
        if made is None or made.chosen.wait_for is not None:
            return made
        backend = made.chosen.slot.backend
        if not _would_hold_last_slot_idle(inventory, request, made, now, waited_s):
            return made
        request = replace(request, avoid=request.avoid | {backend})


def _would_hold_last_slot_idle(
    inventory: Inventory, request: Request, made: Plan, now: float, waited_s: float
) -> bool:
    """Return True if the request would take the last idle slot and prefill last there.

    As in the prefill queue, a longer wait counts as a shorter prefill, so no request starves.
    """
    backend, own_s = inventory.backends[made.chosen.slot.backend], made.chosen.price.prefill_s
    if not (made.prefill_first and inventory.policy.is_long(own_s)):
        return False
    if backend.phases[Phase.IDLE] > 1:
        return False
    others = [
        (slot, remaining_prefill_s(inventory, slot, slot.work.pending))
        for slot in backend.prefilling
    ]
    others = [
        (slot, remaining_s) for slot, remaining_s in others if inventory.policy.is_long(remaining_s)
    ]
    own = rank(own_s, waited_s, background=request.background)
    return bool(others) and all(
        _rank_of(inventory, slot, remaining_s, now) <= own for slot, remaining_s in others
    )


def _rank_of(inventory: Inventory, slot: Slot, remaining_s: float, now: float) -> float:
    job = slot.job
    if not isinstance(job, RequestJob):
        return rank(remaining_s, 0.0)
    return rank_of(job, remaining_s, job.waited_s + now - job.since)
