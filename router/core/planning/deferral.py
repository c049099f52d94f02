"""Decide how to serve one queued request: as planned, later, or server-placed."""

from typing import NamedTuple

from msgspec.structs import replace

from router.base.types import Request
from router.core.inventory.inventory import Inventory
from router.core.model.jobs import RequestJob
from router.core.model.plan import Plan
from router.core.model.slots import Phase, Slot
from router.core.planning.planner import plan
from router.core.planning.prefill_wait import rank, rank_of, remaining_prefill_s


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
    slots, own_s = inventory.backend_of(made.chosen.slot).slots, made.chosen.price.prefill_s
    if not (made.prefill_first and inventory.policy.is_long(own_s)):
        return False
    if slots.phases[Phase.IDLE] > 1:
        return False
    others = [
        (slot, remaining_prefill_s(inventory, slot, slot.work.pending)) for slot in slots.prefilling
    ]
    others = [
        (slot, remaining_s) for slot, remaining_s in others if inventory.policy.is_long(remaining_s)
    ]
    own = rank(own_s, waited_s, background=request.background)
    return bool(others) and all(
        _rank_of(inventory, slot, remaining_s, now) <= own for slot, remaining_s in others
    )


def _rank_of(inventory: Inventory, slot: Slot, remaining_s: float, now: float) -> float:
    job = inventory.job_in(slot)
    if not isinstance(job, RequestJob):
        return rank(remaining_s, 0.0)
    return rank_of(job, remaining_s, job.waited_s + now - job.since)
