"""Quote a request: what serving it would take, also when it would have to wait in the queue.

A question: nothing is reserved. The same prices decide on a host what is done with the request, so
that quotes of several hosts can be compared.
"""

from math import inf

from router.base.tokens import count
from router.base.types import BackendId, Request, Source
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Slot
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Quote
from router.core.model.request_queue import Queue
from router.core.model.servers import Server
from router.core.model.slots import Phase
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.planner import plan


def quote(request: Request, inventory: Inventory, queue: Queue, now: float) -> Quote | None:
    """Return the quote of a request here. None: nothing here can serve it."""
    if not inventory.is_served(request):
        return _once_loaded(request, inventory, now)
    made = plan(request, inventory, now, losers=0) if not len(queue) else None
    if made is None:
        return _once_free(request, inventory, queue, now)
    price = made.chosen.price
    aside_s = price.save_s + price.handling_s + price.loss_s
    chosen = made.chosen
    return Quote(price.total_s, price.wait_s, chosen.reused_tokens, chosen.source, aside_s)


def is_surely_cheap(
    request: Request, inventory: Inventory, queue: Queue, now: float, limit_s: float
) -> bool:
    """Return whether a request costs less than `limit_s` even if nothing of it is held.

    A fraction of the work of a quote: most requests of a chat are short.
    """
    if len(queue) or request.prompt.unknown:
        return False
    n_prompt = request.prompt.n_tokens
    return any(
        backend.rates.prefill_s(n_prompt) * (1 + backend.held_up) < limit_s
        for backend in inventory.room(request, now)
    )


def _once_free(request: Request, inventory: Inventory, queue: Queue, now: float) -> Quote | None:
    """Return the quote of a request that waits for a slot, behind those that wait already.

    Each slot serves its share of the queue. The content that the slots will have then is not known:
    what they have or compute now counts.
    """
    ends_s: list[float] = []
    best: Quote | None = None
    shared = inventory.slots.shared(request.prompt.tokens, request.tenant or None)
    for backend in inventory.serving(request):
        info, rates, n_prompt = backend.info, backend.rates, request.prompt.n_tokens
        reused = 0
        for slot in backend.slots:
            ends_s.append(0.0 if slot.phase is Phase.IDLE else _until_free_s(inventory, slot, now))
            common = shared.get(slot.id, 0)
            if slot.phase is Phase.IDLE:
                spared = inventory.reusable(slot, n_prompt, common)
            else:  # with what it computes now
                held = count(slot.work.pending)
                spared = reusable_tokens(info.memory_kind, n_prompt, common, held)
            reused = max(reused, spared)
        if info.kv_dir is not None:
            namespace = namespace_of(info, request.tenant)
            tokens = request.prompt.tokens
            reused = max(reused, inventory.catalog.reach(info.memory_kind, namespace, tokens))
        reused = min(reused, max(n_prompt - 1, 0)) if request.reuse else 0
        prefill_s = rates.prefill_s(n_prompt - reused, reused)
        if best is None or prefill_s < best.price_s:
            best = Quote(prefill_s, 0.0, reused, Source.COLD if not reused else Source.RESIDENT)
    if best is None or not ends_s:
        return None
    wait_s = _wait_s(sorted(ends_s), len(queue))
    return Quote(best.price_s + wait_s, wait_s, best.reused_tokens, best.source)


def _wait_s(ends_s: list[float], n_ahead: int) -> float:
    """Return the seconds until a slot is free after `n_ahead` other requests got theirs.

    `ends_s`: when each slot is free, in order. A later round takes as long as this one on average.
    """
    rounds, at = divmod(n_ahead, len(ends_s))
    return ends_s[at] + rounds * max(sum(ends_s) / len(ends_s), TUNING.equal_s)


def _once_loaded(request: Request, inventory: Inventory, now: float) -> Quote | None:
    """Return the quote of a request for a model that has to be loaded first. None: it cannot be."""
    waits_s = [
        server.load_s.value + _until_room_s(inventory, server, now)
        for server in inventory.servers.of(request.model)
        if server.may_serve(now)
    ]
    wait_s = min(waits_s, default=inf)
    if wait_s == inf:
        return None
    return Quote(wait_s, wait_s)


def _until_room_s(inventory: Inventory, server: Server, now: float) -> float:
    """Return the seconds until other models have made room for a server.

    0: there is room. inf: they are all to be kept.
    """
    waits_s = [0.0]
    for limit in inventory.servers.limits:
        loaded = inventory.servers.loaded(limit)
        if not limit.keeps_out(server.spec.model, loaded, len(loaded)):
            continue
        others = [s for s in inventory.servers if s.spec.model in loaded and not s.spec.keep]
        ends_s = (
            _until_idle_s(inventory, other.name, now) + other.stop_s.value for other in others
        )
        waits_s.append(min(ends_s, default=inf))
    return max(waits_s)


def _until_idle_s(inventory: Inventory, backend: BackendId, now: float) -> float:
    busy = [
        slot for slot in inventory.slots.of(backend) if slot.phase not in (Phase.IDLE, Phase.LOST)
    ]
    if not busy:
        return 0.0
    return max(_until_free_s(inventory, slot, now) for slot in busy)


def _until_free_s(inventory: Inventory, slot: Slot, now: float) -> float:
    """Return the seconds until a busy slot is free.

    An answer that is longer than predicted is taken to need as long again as it is late.
    """
    left_s = slot.work.busy_until - now
    late_s = TUNING.late_share * slot.backend.rates.generation_s(None)
    return min(max(left_s, -left_s, late_s), TUNING.unknown_end_s)
