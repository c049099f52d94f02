"""Price ways to serve a request that begin with waiting for a busy slot, in seconds."""

from collections.abc import Iterator
from math import inf

from router.base.tokens import common_prefix, count
from router.base.types import Source
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Slot
from router.core.model.jobs import SaveJob
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Candidate, Price
from router.core.model.slots import Phase
from router.core.model.tuning import TUNING
from router.core.planning.pricing import can_save
from router.core.planning.start_candidates import Cheapest, PricingContext

_SOON = (Phase.PREPARING, Phase.ABANDONED)
_MAY_WAIT = (*_SOON, Phase.RUNNING)


def starting_later(context: PricingContext, n: int, *, patient: bool = True) -> list[Candidate]:
    """Return ways that wait for a busy slot which has, or is computing, the prefix.

    1. Its content is being written to a file, perhaps because the slot is another request's now.
       If it is nobody's, the slot itself is soon free.
    2. Its prefill runs on its own, and will be saved for all that wait.
    3. It runs another request: only if the policy allows to wait for the owner, and only while the
       request is `patient`. The ends of the other cases are known well enough to be priced.
    4. Its client disconnected, perhaps to come back at once with the same and more: it is idle
       soon.
    5. A backend that is not managed was sent the prefix before, and has no slot free.

    Included are the `n` cheapest of cases 1 and 2, the `n` cheapest of cases 3 and 4, and all of
    case 5.
    """
    inventory, shared = context.inventory, context.shared
    may_wait = inventory.policy.name.may_wait and patient
    at_least = max(inventory.catalog.limits.min_tokens, 1)
    saved, owners = Cheapest(n), Cheapest(n)
    for slot in _busy(context):
        if (
            slot.work.saving
            and slot.content.tenant == context.request.tenant
            and (way := _once_saved(context, slot, at_least))
        ):
            saved.add(way)
        if way := _soon_free(context, slot, at_least):
            owners.add(way)
        hoped = (
            context.now < slot.work.busy_until + TUNING.abandoned_trusted_s < inf
            if slot.is_abandoned
            else may_wait
        )
        sharing = (
            slot.work.sharing and context.now < slot.work.busy_until + TUNING.shared_prefill_late_s
        )
        if not (sharing or hoped):
            continue
        common = shared.get(slot.id, 0)
        if common < at_least:
            continue  # so little is not saved for others
        backend = slot.backend
        info, rates = backend.info, backend.rates
        held = count(slot.work.pending)
        reused = reusable_tokens(info.memory_kind, context.n_prompt, common, held)
        if reused < at_least:
            continue
        wait_s = max(slot.work.busy_until - context.now, 0.0)
        remaining_s = rates.prefill_s(context.n_prompt - reused, reused)
        if sharing and can_save(inventory, backend, held):
            context.computing = max(context.computing, reused)
            if not saved.beat(wait_s + remaining_s):
                saved.add(_from_file(context, slot, held, reused, wait_s))
        elif (
            hoped
            # A prefill that was broken off ends sooner than predicted.
            and (slot.work.prefill_abandoned or wait_s <= inventory.policy.max_wait_s)
            and _will_be_available(context, slot)
        ):
            cut_off_s = context.cut_off_s(backend)
            price = Price(wait_s=wait_s, prefill_s=remaining_s, loss_s=cut_off_s)
            owners.add(Candidate(slot.id, Source.RESIDENT, reused, price, wait_for=slot.id))
    return saved.ways + owners.ways + (list(_homes(context, at_least)) if patient else [])


def _homes(context: PricingContext, at_least: int) -> Iterator[Candidate]:
    """Yield ways that wait for any slot of a backend that may have the prefix in its own cache."""
    inventory, request = context.inventory, context.request
    for backend in inventory.serving(request):
        if not backend.sent or backend.has_idle:
            continue
        reused = backend.sent_before(request)
        if reused < at_least:
            continue
        slot = min(backend.slots, key=lambda one: one.work.busy_until)
        wait_s = max(slot.work.busy_until - context.now, 0.0)
        prefill_s = backend.rates.prefill_s(context.n_prompt - reused, reused)
        price = Price(wait_s=wait_s, prefill_s=prefill_s, loss_s=context.cut_off_s(backend))
        yield Candidate(slot.id, Source.NONE, reused, price, wait_for=slot.id)


def trust_ends(inventory: Inventory, now: float) -> float:
    """Return when the next abandoned slot or shared prefill is no longer waited for.

    In clock seconds; inf: there is none.
    """
    ends = (
        slot.work.busy_until
        + (TUNING.abandoned_trusted_s if slot.is_abandoned else TUNING.shared_prefill_late_s)
        for backend in inventory.backends.values()
        if backend.phases[Phase.ABANDONED] or backend.phases[Phase.PREPARING]
        for slot in backend.slots
        if slot.is_abandoned or slot.work.sharing or slot.work.saving
    )
    return min((end for end in ends if now < end), default=inf)


def _busy(context: PricingContext) -> Iterator[Slot]:
    """Yield slots that could be waited for; on a draining backend, for their files."""
    inventory = context.inventory
    wanted = _MAY_WAIT if inventory.policy.name.may_wait else _SOON
    for backend in inventory.up.values():
        phases = backend.phases
        if not any(phases[phase] for phase in wanted):
            continue
        fits = backend.fits(context.request) and backend.info.is_managed
        if fits and backend.reuses(context.request):
            for slot in backend.slots:
                if slot.phase in wanted:
                    yield slot


def _will_be_available(context: PricingContext, slot: Slot) -> bool:
    """Return True if the request may have the slot itself when it is idle."""
    inventory, request = context.inventory, context.request
    backend = slot.backend
    return inventory.serves(backend, request) and backend.wants(slot, request)


def _once_saved(context: PricingContext, slot: Slot, at_least: int) -> Candidate | None:
    """Return the way that waits for a save of the slot's content. None: of no use.

    Until the save is over no request can have that content. If the slot is another request's
    already, the content is nowhere else.
    """
    backend, held = slot.backend, len(slot.content.resident)
    common = common_prefix(slot.work.saving, context.request.prompt.tokens)
    reused = reusable_tokens(backend.info.memory_kind, context.n_prompt, common, held)
    if reused < at_least or not can_save(context.inventory, backend, held):
        return None
    context.computing = max(context.computing, reused)
    return _from_file(context, slot, held, reused, 0.0)


def _soon_free(context: PricingContext, slot: Slot, at_least: int) -> Candidate | None:
    """Return the way that waits for the end of an idle save, and goes on there. None: of no use."""
    inventory, work = context.inventory, slot.work
    late = context.now >= work.busy_until + TUNING.shared_prefill_late_s
    if late or not isinstance(slot.job, SaveJob):
        return None
    common = common_prefix(work.saving, context.request.prompt.tokens)
    reused = inventory.reusable(slot, context.n_prompt, common)
    same = slot.content.tenant == context.request.tenant
    if not same or reused < at_least or not _will_be_available(context, slot):
        return None
    backend = slot.backend
    price = Price(
        wait_s=max(work.busy_until - context.now, 0.0),
        prefill_s=backend.rates.prefill_s(context.n_prompt - reused, reused),
        loss_s=context.cut_off_s(backend),
    )
    return Candidate(slot.id, Source.RESIDENT, reused, price, wait_for=slot.id)


def _from_file(
    context: PricingContext, slot: Slot, held: int, reused: int, wait_s: float
) -> Candidate:
    """Return the way that waits until the slot's content is saved, and restores it."""
    backend = slot.backend
    rates = backend.rates
    back_s = rates.save_s(held) + rates.restore_s(round(held * rates.bytes_per_token.value))
    remaining_s = rates.prefill_s(context.n_prompt - reused, reused)
    handling_s = rates.handling_s.value
    price = Price(
        wait_s=wait_s,
        restore_s=back_s,
        handling_s=handling_s,
        prefill_s=remaining_s,
        loss_s=context.cut_off_s(backend),
    )
    return Candidate(slot.id, Source.SNAPSHOT, reused, price, wait_for=slot.id)
