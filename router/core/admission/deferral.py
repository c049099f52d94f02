"""Decide how to serve one queued request: as planned, later, or server-placed."""

from dataclasses import replace
from typing import NamedTuple

from router.base.types import Request, Source
from router.core.execution.state import State
from router.core.execution.volatile_slots import about_to_be_idle, awaits_abandoned_slot
from router.core.fleet.fleet import Fleet
from router.core.model.plan import Candidate, Plan, Price
from router.core.model.slots import Phase, Slot
from router.core.planning.planner import plan
from router.core.planning.prefill_wait import rank, remaining_prefill_s


class Decision(NamedTuple):
    """A plan, and the request as it is sent: perhaps unpinned."""

    request: Request
    plan: Plan


def decide(state: State, request: Request, now: float, waited_s: float) -> Decision | None:
    """Return the best way to serve a request. None: not yet.

    A request that the server places better is sent unpinned if no request has to wait for that;
    else it is pinned.
    """
    if request.server_picks:
        unpinned = replace(request, pinnable=False)
        made = _planned(state, unpinned, now, waited_s)
        if made is not None and made.chosen.wait_for is None:
            return Decision(unpinned, made)
    made = _planned(state, request, now, waited_s)
    if made is None:
        return None
    parked = _ram_cache_tokens(state.fleet, request, made)
    if not parked:
        return Decision(request, made)
    backend = made.chosen.slot.backend
    unpinned = replace(request, pinnable=False)
    if backend in state.fleet.room(unpinned):
        remaining_s = state.fleet.rates[backend].prefill_s(len(request.prompt) - parked, parked)
        way = Candidate(made.chosen.slot, Source.NONE, parked, Price(prefill_s=remaining_s))
        reason = "server-placed: the backend may have the prompt in its own cache"
        return Decision(unpinned, Plan(way, reason=reason, shared=made.shared))
    return None if any(about_to_be_idle(state.fleet, backend, now)) else Decision(request, made)


def _ram_cache_tokens(fleet: Fleet, request: Request, made: Plan) -> int:
    """Return how many tokens of the prompt the chosen backend's own cache may hold.

    Zero unless that is clearly more than the plan reuses. The backend looks there only if the
    request is not pinned to an empty slot (llama-server.md section 0.7).
    """
    chosen, prompt = made.chosen, request.prompt
    pinned = request.pinnable and request.slot_hint is None and chosen.wait_for is None
    if fleet.infos[chosen.slot.backend].keeps_idle_slots or not pinned:
        return 0
    if made.shared is None or prompt.n_media:  # the tokens are unknown, or not to be reused
        return 0
    parked = min(fleet.ram_cache_tokens(chosen.slot.backend, prompt.tokens), len(prompt) - 1)
    enough = chosen.reused_tokens + max(fleet.catalog.limits.min_tokens, 1)
    return parked if parked >= enough else 0


def _planned(state: State, request: Request, now: float, waited_s: float) -> Plan | None:
    """Plan the request elsewhere, or not yet, where a start would

    1. clear content that is worth the wait until its slot is known to be idle;
    2. take the last slot only to wait in the prefill queue: another request could use that slot.
    """
    fleet = state.fleet
    while True:
        made = plan(request, fleet, now, waited_s, losers=0)
        if made is None or made.chosen.wait_for is not None:
            return made
        backend = made.chosen.slot.backend
        if not awaits_abandoned_slot(fleet, backend, now) and not _only_stands(
            state, made, now, waited_s
        ):
            return made
        request = replace(request, avoid=request.avoid | {backend})


def _only_stands(state: State, made: Plan, now: float, waited_s: float) -> bool:
    """Return True if the request would take the last idle slot and prefill last there.

    As in the prefill queue, a longer wait counts as a shorter prefill, so no request starves.
    """
    fleet, backend, own_s = state.fleet, made.chosen.slot.backend, made.chosen.price.prefill_s
    if not (made.prefill_first and fleet.policy.is_long(own_s)):
        return False
    if fleet.slots.phases(backend)[Phase.IDLE] > 1:
        return False
    others = [
        (slot, remaining_prefill_s(fleet, slot, slot.pending)) for slot in fleet.prefilling(backend)
    ]
    others = [
        (slot, remaining_s) for slot, remaining_s in others if fleet.policy.is_long(remaining_s)
    ]
    return bool(others) and all(
        rank(remaining_s, _age_s(state, slot, now)) <= rank(own_s, waited_s)
        for slot, remaining_s in others
    )


def _age_s(state: State, slot: Slot, now: float) -> float:
    job = state.holder(slot)
    return 0.0 if job is None else job.waited_s + now - job.since
