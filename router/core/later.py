"""Ways to serve a request that begin with waiting for a busy slot, priced in seconds."""

from router.core.ask import Ask, Cheapest
from router.core.displacement import can_save
from router.core.plan import Candidate, Price
from router.core.reuse import reusable_tokens
from router.core.slots import Phase
from router.tokens import count
from router.types import Source

_BUSY = (Phase.PREPARING, Phase.RUNNING)


def starting_later(ask: Ask, n: int) -> list[Candidate]:
    """Ways that begin with waiting for a busy slot which has, or is computing, the prefix.

    1. Its prefill is under way on its own, and will be saved for all who wait; or what it holds
       is being saved anyway.
    2. It runs somebody's request: only where the policy allows to wait for the owner.

    The `n` cheapest of either kind are among them.
    """
    if ask.has_no_say:
        return []
    fleet, request, shared = ask.fleet, ask.request, ask.shared
    may_wait, at_least = fleet.policy.may_wait, max(fleet.catalog.limits.min_tokens, 1)
    saved, owners = Cheapest(n), Cheapest(n)
    for backend, slots in fleet.slots.by_backend():
        phases = fleet.slots.phases(backend)
        if not (phases[Phase.PREPARING] or (may_wait and phases[Phase.RUNNING])):
            continue
        if not fleet.serves(backend, request):
            continue
        info, rates = fleet.infos[backend], fleet.rates[backend]
        for slot in slots:
            if slot.phase not in _BUSY or not (slot.sharing or may_wait):
                continue
            common = shared.get(slot.id, 0)
            if common < at_least:
                continue  # nobody will save so little for others
            held = count(slot.pending)
            reused = reusable_tokens(info.memory_kind, ask.n_prompt, common, held)
            if reused < at_least:
                continue
            wait_s = max(slot.busy_until - ask.now, 0.0)
            rest_s = rates.prefill_s(ask.n_prompt - reused, reused)
            if slot.sharing and can_save(fleet, info, held):
                ask.computing = max(ask.computing, reused)
                if saved.beat(wait_s + rest_s):
                    continue
                size_bytes = round(held * rates.bytes_per_token.value)
                back_s = rates.save_s(held) + rates.restore_s(size_bytes)
                price = Price(wait_s=wait_s, restore_s=back_s, prefill_s=rest_s)
                saved.add(Candidate(slot.id, Source.SNAPSHOT, reused, price, wait_for=slot.id))
            elif may_wait and wait_s <= fleet.policy.max_wait_s and fleet.wants(slot, request):
                price = Price(wait_s=wait_s, prefill_s=rest_s)
                owners.add(Candidate(slot.id, Source.RESIDENT, reused, price, wait_for=slot.id))
    return saved.ways + owners.ways
