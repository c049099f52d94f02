"""Price every way to start a request at once, in seconds; the planner chooses."""

from typing import NamedTuple

from router.base.types import BackendId, BackendInfo, SlotId, Source, StateShape
from router.core.model.backend import Backend, Slot
from router.core.model.memory_kinds import can_restore, goes_back, reusable_tokens
from router.core.model.plan import Candidate
from router.core.model.slots import Phase, Resident
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.pricing import (
    Cheapest,
    Displaced,
    Displacing,
    Files,
    PricingContext,
    RestoreOption,
    can_save,
    saving_pays,
)

_NO_FILES = Files([], 0, 0)


class _Owner(NamedTuple):
    """The idle slot that holds most of the prompt, and can be copied elsewhere."""

    slot: SlotId
    held: Resident
    common: int
    size_bytes: int


def starting_now(
    context: PricingContext, room: list[Backend], n: int, known: list[Candidate]
) -> list[Candidate]:
    """Return ways to start at once on a backend with room: resident, snapshot, copy, cold.

    The `n` cheapest of these and of the `known` are among them. Of many slots few are good
    for the request. Those that cannot be, by the tokens that they share and what runs beside them,
    are not priced.
    """
    if context.has_no_say:
        return [_any_slot(context, backend) for backend in _where_served(context, room)]
    found = Cheapest(n, known)
    owner = _residents(context, room, found)
    leads: list[tuple[float, BackendId, Backend]] = []
    for backend in room:
        if not backend.info.is_managed:
            found.add(_in_its_cache(context, backend))
            continue
        files = _files(context, backend.info, owner)
        leads.append((context.least_of_s(backend, files), backend.id, backend))
    for least_s, _, backend in sorted(leads):
        if found.beat(least_s):
            break
        _elsewhere(context, backend, owner, found, least_s)
    return found.ways


def _residents(context: PricingContext, room: list[Backend], found: Cheapest) -> _Owner | None:
    """Add ways that go on from what idle slots hold.

    Return the slot that holds most of the prompt, if it can be copied.
    """
    inventory, position = context.inventory, {backend.id: at for at, backend in enumerate(room)}
    leads: list[tuple[float, SlotId, int, int]] = []
    owners: list[tuple[int, int, SlotId]] = []
    hinted = context.request.slot_hint is not None
    for name, common in context.shared.items():
        slot = inventory.slots[name]
        if slot.phase is not Phase.IDLE or name.backend not in position:
            continue
        backend = inventory.backends[name.backend]
        if not backend.info.is_managed or not backend.reuses(context.request):
            continue
        if hinted and not backend.wants(slot, context.request):
            continue
        if reused := inventory.reusable(slot, context.n_prompt, common):
            leads.append((context.least_s(backend, reused), name, common, reused))
            if slot.content.savable:
                owners.append((-reused, position[name.backend], name))
    for least_s, name, common, reused in sorted(leads):
        if found.beat(least_s):
            break
        found.add(resident(context, inventory.slots[name], common, reused))
    if not owners:
        return None
    owner = min(owners)[2]
    backend, held = inventory.backends[owner.backend], inventory.slots[owner].content.resident
    if not can_save(inventory, backend, len(held)):
        return None
    size_bytes = round(len(held) * backend.rates.bytes_per_token.value)
    return _Owner(owner, held, context.shared[owner], size_bytes)


def resident(context: PricingContext, slot: Slot, common: int, reused: int) -> Candidate:
    """Return the way that goes on from what an idle slot holds."""
    displaced = saving_pays(context.inventory, slot, kept=common)
    return context.candidate(slot.id, Source.RESIDENT, displaced, reused=reused)


def cold(context: PricingContext, slot: Slot) -> Candidate:
    """Return the way that starts from nothing."""
    return _from_nothing(context, slot, saving_pays(context.inventory, slot))


def _in_its_cache(context: PricingContext, backend: Backend) -> Candidate:
    """Return the way to start on a backend that is not managed.

    It may have kept what was sent to it before, in a slot or in its own cache.
    """
    reused = backend.sent_before(context.request)
    displaced, target = _target(context, backend)
    return context.candidate(target.id, Source.NONE, displaced, reused=reused)


def _any_slot(context: PricingContext, backend: Backend) -> Candidate:
    """Return the way to start where the router has no say: in the cheapest free slot.

    Of equals the one unused for longest, which a server that picks itself takes as well.
    """
    displaced, target = _target(context, backend)
    return _from_nothing(context, target, displaced)


def _where_served(context: PricingContext, room: list[Backend]) -> list[Backend]:
    """Return the backend that served the request's session last; all that have room if none did.

    The router cannot read the prompt, but that server can, and may hold its beginning. It is not
    preferred while it runs something and another backend is quiet.
    """
    session = context.request.session
    home = None if session is None else context.inventory.homes.get(session.id)
    found = [backend for backend in room if backend.id == home]
    if found and context.running(found[0]) and not all(context.running(one) for one in room):
        return room
    return found or room


def _from_nothing(context: PricingContext, slot: Slot, displaced: Displaced) -> Candidate:
    source = Source.NONE if context.has_no_say else Source.COLD
    return context.candidate(slot.id, source, displaced)


def _target(context: PricingContext, backend: Backend) -> tuple[Displaced, Slot]:
    return Displacing(context.inventory, backend).cheapest(backend.free(context.request))


def _elsewhere(
    context: PricingContext,
    backend: Backend,
    owner: _Owner | None,
    found: Cheapest,
    least_s: float,
) -> None:
    """Add ways that start in a slot of one backend without its content: cold, file or copy.

    The slot decides nothing but what is displaced. `least_s`: the least that any way costs without
    that.
    """
    displaced, target = _target(context, backend)
    save_s, loss_s, _ = displaced
    if found.beat(least_s + save_s * (1 + context.running(backend)) + loss_s):
        return
    info = backend.info
    found.add(context.candidate(target.id, Source.COLD, displaced))
    if not backend.reuses(context.request):
        return
    for file in _files(context, info, owner).files:
        # A longer file "does not fit in the slot context" (llama-server.md section 1.1).
        if file.length <= info.n_ctx and (backend.may_write or _is_there(info, file)):
            found.add(_restore(context, target, displaced, backend, file))
    if owner is not None and owner.slot.backend != backend.id:
        way = _copy(context, target, displaced, backend, owner)
        if way is not None:
            found.add(way)


def _files(context: PricingContext, info: BackendInfo, owner: _Owner | None) -> Files:
    """Return each useful snapshot: the whole, or what the prompt shares with it."""
    if info.kv_dir is None or not can_restore(info.memory_kind):
        return _NO_FILES
    key = info.memory_kind, info.namespace, info.cuts
    if key not in context.files:
        found = _find_files(context, info)
        reused, sizes = [file.reused for file in found], [file.size_bytes for file in found]
        if owner is not None:
            reused.append(owner.common)
            sizes.append(owner.size_bytes)
        context.files[key] = Files(found, max(reused, default=0), min(sizes, default=0))
    return context.files[key]


def _find_files(context: PricingContext, info: BackendInfo) -> list[RestoreOption]:
    catalog, prompt = context.inventory.catalog, context.request.prompt
    namespace = namespace_of(info, context.request.tenant)
    useful = catalog.useful(
        info.memory_kind, namespace, prompt.tokens, context.n_prompt, TUNING.snapshots_priced
    )
    found: list[RestoreOption] = []
    for match, reused in useful:
        if reused < catalog.limits.min_tokens:
            continue  # not worth a file, and so not worth reading one
        snapshot = catalog[match.item]
        found.append(RestoreOption(snapshot, reused, match.length, snapshot.size_bytes, None))
        divisible = info.cuts and goes_back(info.memory_kind) and not snapshot.shape.media
        if divisible and match.common < match.length:
            share = match.common * snapshot.size_bytes // match.length
            if catalog.admits(match.common, share):
                found.append(RestoreOption(snapshot, reused, match.common, share, match.common))
    return found


def _is_there(info: BackendInfo, file: RestoreOption) -> bool:
    """Return True if the backend can read the file as it is: no rewrite is needed."""
    return file.snapshot.kv_dir == info.kv_dir and not _n_rewrites(info, file)


def _n_rewrites(info: BackendInfo, file: RestoreOption) -> int:
    """Return how often the file is written anew: assembled from blobs, cut, restreamed."""
    snapshot = file.snapshot
    cut, restreamed = file.cut is not None, snapshot.shape.needs_restream(info.n_stream)
    return (not snapshot.whole) + cut + restreamed


def _restore(
    context: PricingContext,
    target: Slot,
    displaced: Displaced,
    backend: Backend,
    file: RestoreOption,
) -> Candidate:
    """Return the way that restores a file into a slot, rewritten if need be."""
    rates = backend.rates
    return context.candidate(
        target.id,
        Source.SNAPSHOT,
        displaced,
        reused=file.reused,
        rewrite_s=_n_rewrites(backend.info, file) * rates.rewrite_s(file.size_bytes),
        restore_s=rates.restore_s(file.size_bytes),
        file=file,
    )


def _copy(
    context: PricingContext,
    target: Slot,
    displaced: Displaced,
    backend: Backend,
    owner: _Owner,
) -> Candidate | None:
    """Return the way that saves the slot of `owner` and restores it into a slot elsewhere."""
    here, n_held = backend.info, len(owner.held)
    source = context.inventory.backends[owner.slot.backend]
    there = source.info
    reused = reusable_tokens(here.memory_kind, context.n_prompt, owner.common, n_held)
    fits = here.kv_dir is not None and can_restore(here.memory_kind) and here.n_ctx >= n_held
    if not (reused and fits and there.namespace == here.namespace):
        return None
    save_s = source.rates.save_s(n_held)
    rewritten = StateShape(there.n_stream).needs_restream(here.n_stream)
    rewrite_s = source.rates.rewrite_s(owner.size_bytes)
    return context.candidate(
        target.id,
        Source.COPY,
        displaced,
        reused=reused,
        save_s=save_s,
        rewrite_s=rewritten * rewrite_s,
        restore_s=backend.rates.restore_s(owner.size_bytes),
        stall_s=save_s * context.running(source),
        n_saves=1,
        copy_from=owner.slot,
    )
