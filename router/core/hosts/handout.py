"""Choose what to hand to another host, and price a request that begins with what another has.

Pure. What one host names here, `web/fleet` moves.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from router.base.tokens import EMPTY, Tokens, common_prefix, count
from router.base.types import BackendInfo, Namespace, Request, Source, Tenant
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Slot
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Handout, Offered, Quote
from router.core.model.slots import Phase
from router.core.model.tenancy import namespace_of, tenanted
from router.core.model.tuning import TUNING
from router.core.planning.pricing import can_cut, can_save

# Bytes of a whole file that are hashed in a second, to name its blobs. Measured: 4 on one core.
_HASHED_PER_S = 2e9
MOST = 3  # offers


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt of another host, put to the inventory; the arguments of `handouts`."""

    inventory: Inventory
    models: Collection[Namespace]
    tenant: Tenant
    tokens: Tokens
    n_prompt: int
    now: float


def handouts(
    inventory: Inventory,
    models: Collection[Namespace],
    tenant: Tenant,
    tokens: Tokens,
    n_prompt: int,
    now: float,
    *,
    saved: bool = False,
) -> list[Handout]:
    """Return the handouts for a prompt that begins with `tokens`, the best first.

    `models`: the namespaces whose KV the other host can use. `saved`: only snapshots; else also
    what slots have, which is saved first. Several, because the last tokens may not be the prompt's:
    then a state that cannot go back is of no use.
    """
    asked = _Asked(inventory, models, tenant, tokens, n_prompt, now)
    found = [one for model in models for one in _snapshots(asked, model)]
    if not saved:
        found += _slots(asked)
    worth = [one for one in found if one.offered.reused >= inventory.catalog.limits.min_tokens]
    return sorted(worth, key=_rank)[:MOST]


def _rank(one: Handout) -> tuple[int, float, int]:
    return -one.offered.reused, one.offered.ready_s, one.offered.size_bytes


def _snapshots(asked: _Asked, model: Namespace) -> Iterator[Handout]:
    namespace, catalog = tenanted(model, asked.tenant), asked.inventory.catalog
    up = next((one for one in asked.inventory.up.values() if one.info.namespace == model), None)
    kind = None if up is None else up.info.memory_kind
    for match, reused in catalog.useful(
        kind, namespace, asked.tokens, asked.n_prompt, TUNING.snapshots_priced
    ):
        snapshot = catalog[match.item]
        if up is not None and can_cut(up.info, snapshot) and match.common < match.length:
            share = match.common * snapshot.size_bytes // match.length
            made_s = up.rates.rewrite_s(share) + share / _HASHED_PER_S
            cut = Offered(reused, match.common, share, made_s)
            yield Handout(snapshot.id, cut, match.common)
        else:
            ready_s = 0.0 if snapshot.blobs else snapshot.size_bytes / _HASHED_PER_S
            offered = Offered(reused, match.length, snapshot.size_bytes, ready_s)
            only_whole = not (kind or catalog.kind_of(match.item)).goes_back
            whole = snapshot.tokens if only_whole and reused == match.length else EMPTY
            yield Handout(snapshot.id, offered, whole=whole)


def _slots(asked: _Asked) -> Iterator[Handout]:
    """Yield what idle slots hold, and busy ones save or compute for others. It is saved first."""
    inventory = asked.inventory
    shared = inventory.slots.shared(asked.tokens, asked.tenant)
    for backend in inventory.up.values():
        if backend.info.namespace in asked.models:
            for slot in backend.slots:
                if slot.id in shared or slot.work.saving:
                    yield from _of_slot(asked, slot, shared.get(slot.id, 0))


def _of_slot(asked: _Asked, slot: Slot, common: int) -> Iterator[Handout]:
    inventory, n_prompt = asked.inventory, asked.n_prompt
    backend, work = slot.backend, slot.work
    wait_s = 0.0
    if slot.phase is Phase.IDLE and slot.content.savable and not backend.gate.is_closed:
        held = slot.content.resident.tokens
        reused = inventory.reusable(slot, n_prompt, common)
    elif work.saving and slot.content.tenant == asked.tenant:
        held, common = work.saving, common_prefix(work.saving, asked.tokens)
        reused = reusable_tokens(backend.info.memory_kind, n_prompt, common, count(held))
    elif work.sharing and asked.now < work.busy_until + TUNING.shared_prefill_late_s:
        held, wait_s = work.pending, max(work.busy_until - asked.now, 0.0)
        reused = reusable_tokens(backend.info.memory_kind, n_prompt, common, count(held))
    else:
        return
    n_tokens = count(held)
    if reused and can_save(inventory, backend, n_tokens):
        size_bytes = round(n_tokens * backend.rates.bytes_per_token.value)
        stalled = 1 + backend.held_up
        ready_s = backend.rates.save_s(n_tokens) * stalled + size_bytes / _HASHED_PER_S
        computing = work.sharing and not work.saving
        only_whole = not backend.info.memory_kind.goes_back
        whole = held if only_whole and reused == n_tokens else EMPTY
        offered = Offered(reused, n_tokens, size_bytes, wait_s + ready_s, computing)
        yield Handout(slot.id, offered, whole=whole)


def missing_bytes(
    request: Request, inventory: Inventory, info: BackendInfo, offered: Offered
) -> int:
    """Return how much of `offered` comes over the link: rows that a snapshot here has do not."""
    if not info.memory_kind.goes_back:
        return offered.size_bytes
    namespace = namespace_of(info, request.tenant)
    known = inventory.catalog.covered(namespace, request.prompt.tokens)
    known = min(known, offered.n_tokens)
    return offered.size_bytes - offered.size_bytes * known // offered.n_tokens


def once_fetched(
    request: Request,
    inventory: Inventory,
    own: Quote,
    offered: Offered,
    seconds: Callable[[int], float],
) -> Quote | None:
    """Return the quote of a request that fetches `offered` first. None: it does not pay.

    `own`: the quote without. `seconds`: what it takes to fetch so many bytes. The wait for a slot
    goes on meanwhile. To compute what another host is computing is a loss for others, as it is on
    one host.
    """
    limits, best, usual_s = inventory.catalog.limits, None, own.price_s
    n_prompt = request.prompt.n_tokens
    reused = min(offered.reused, n_prompt - 1)
    if reused < max(limits.min_tokens, 1) or reused <= own.reused_tokens:
        return None
    if not inventory.catalog.admits(offered.n_tokens, offered.size_bytes):
        return None
    for backend in inventory.serving(request):
        info, rates = backend.info, backend.rates
        fits = info.kv_dir is not None and info.n_ctx >= offered.n_tokens
        if not (fits and info.memory_kind.can_restore and backend.reuses(request)):
            continue
        missing = missing_bytes(request, inventory, info, offered)
        arrives_s = offered.ready_s + seconds(missing) * (1 + offered.sharers)
        rest_s = rates.restore_s(offered.size_bytes) + rates.prefill_s(n_prompt - reused, reused)
        rest_s *= 1 + backend.held_up  # streams there stop meanwhile
        price_s = max(own.wait_s, arrives_s) + rest_s + own.aside_s
        if best is None or price_s < best.price_s:
            best = Quote(price_s, own.wait_s, reused, Source.SNAPSHOT, own.aside_s, fetched=True)
            if offered.computing:
                twice_s = rates.prefill_s(reused - own.reused_tokens, own.reused_tokens)
                usual_s = own.price_s + inventory.policy.reuse_probability * twice_s
    factor = 1.0 if offered.computing else TUNING.fetch_cheaper
    limit_s = min(factor * usual_s, usual_s - TUNING.fetch_gain_s)
    return best if best is not None and best.price_s <= limit_s else None
