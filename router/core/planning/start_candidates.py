"""Price every way to start a request at once, in seconds; the planner chooses."""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from typing import NamedTuple

from router.base.types import (
    BackendId,
    BackendInfo,
    MemoryKind,
    Namespace,
    Request,
    SlotId,
    Snapshot,
    Source,
    StateShape,
)
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Candidate, Price
from router.core.model.slots import Phase, Resident
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.prefill import Ahead, ahead, before_s, rank
from router.core.planning.pricing import Displaced, can_cut, can_save, saving_pays


class RestoreOption(NamedTuple):
    """A state file that could be restored: a snapshot, or its first `cut` tokens."""

    snapshot: Snapshot
    reused: int
    length: int
    size_bytes: int
    cut: int | None


class Files(NamedTuple):
    """All files that a kind of backend could restore, and the best that any could do."""

    files: list[RestoreOption]
    most_reused: int
    least_bytes: int


@dataclass(slots=True)
class PricingContext:
    """A request put to the inventory at one moment; caches what many candidates need.

    `computing`: how much of the prompt a busy slot is computing, to share it.
    """

    request: Request
    inventory: Inventory
    now: float
    n_prompt: int = field(init=False)
    computing: int = 0
    _running: dict[BackendId, int] = field(default_factory=dict)
    _ahead: dict[BackendId, list[Ahead]] = field(default_factory=dict)
    _shared: dict[SlotId, int] | None = None
    has_no_say: bool = False  # what the server reuses is not known, or not the router's choice
    files: dict[tuple[MemoryKind, Namespace, bool], Files] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request = self.request
        self.n_prompt = request.prompt.n_tokens
        self.has_no_say = bool(request.takes_several or request.prompt.unknown or not request.reuse)

    @property
    def shared(self) -> dict[SlotId, int]:
        """Return how many prompt tokens each slot holds, or will hold after its lease."""
        if self._shared is None:
            inventory = self.inventory
            request = self.request
            # Without tenants, no slot's tenant has to be compared.
            matters = request.tenant or inventory.has_tenants
            tenant = request.tenant if matters else None
            self._shared = inventory.slots.shared(request.prompt.tokens, tenant)
        return self._shared

    def running(self, backend: Backend) -> int:
        """Return how many requests a transfer or a prefill would hold up on a backend."""
        n = self._running.get(backend.id)
        if n is None:
            n = self._running[backend.id] = backend.held_up
        return n

    def prefill_queue_s(self, backend: Backend, prefill_s: float) -> float:
        """Return the wait for the prefill permit; 0 for a short prefill, which needs none."""
        if not self.inventory.policy.is_long(prefill_s):
            return 0.0
        known = self._ahead.get(backend.id)
        if known is None:
            known = self._ahead[backend.id] = ahead(self.inventory, backend, self.now)
        return before_s(known, rank(prefill_s, 0.0, background=self.request.background))

    def cut_off_s(self, backend: Backend) -> float:
        """Return the expected loss, in seconds, if the slot ends before the answer does.

        The client asks again then. Lengths of answers are taken for exponential.
        """
        rates, room = backend.rates, backend.info.n_ctx - self.n_prompt
        wanted = self.request.max_new_tokens
        usual = max(rates.output_tokens.value, 1.0)
        if room > TUNING.answer_longest * usual or (wanted is not None and wanted <= room):
            return 0.0
        chance = exp(-room / usual)
        again_s = rates.prefill_s(self.n_prompt) + room * rates.output_s_per_token.value
        return chance * again_s

    def least_s(self, backend: Backend, reused: int) -> float:
        """Return a lower bound, in seconds, for a start there that reuses `reused` tokens."""
        seconds = backend.rates.prefill_s(self.n_prompt - reused, reused)
        return seconds * (1 + self.running(backend))

    def least_of_s(self, backend: Backend, files: Files) -> float:
        """Return a lower bound, in seconds, for a start there: cold or from one of `files`."""
        rates, reused = backend.rates, files.most_reused
        seconds = rates.prefill_s(self.n_prompt)
        if reused:
            restore_s = rates.restore_s(files.least_bytes)
            seconds = min(seconds, rates.prefill_s(self.n_prompt - reused, reused) + restore_s)
        return seconds * (1 + self.running(backend))

    def candidate(
        self,
        slot: Slot,
        source: Source,
        displaced: Displaced,
        *,
        reused: int = 0,
        save_s: float = 0.0,
        rewrite_s: float = 0.0,
        restore_s: float = 0.0,
        stall_s: float = 0.0,
        n_saves: int = 0,
        file: RestoreOption | None = None,
        copy_from: SlotId | None = None,
    ) -> Candidate:
        """Return a way to start now, with all that it costs this request and the others.

        `displaced` is the result of `saving_pays`; `save_s`, `stall_s` and the handling of
        `n_saves` come on top. Streams on the same backend stop for a transfer, and all but stop for
        a prefill: they get one token for each of its batches.

        Computing what another slot is computing at this moment is a loss. On an idle server the
        request itself may lose nothing by it. All others lose those seconds of that server, if they
        need it.
        """
        backend = slot.backend
        rates = backend.rates
        displaced_s, loss_s, save = displaced
        prefill_s = rates.prefill_s(self.n_prompt - reused, reused)
        if reused < self.computing:
            twice_s = rates.prefill_s(self.computing - reused, reused)
            loss_s += self.inventory.policy.reuse_probability * twice_s
        loss_s += self.cut_off_s(backend)
        stopped_s = displaced_s + restore_s + prefill_s
        return Candidate(
            slot=slot.id,
            source=source,
            reused_tokens=reused,
            price=Price(
                wait_s=self.prefill_queue_s(backend, prefill_s),
                save_s=displaced_s + save_s,
                rewrite_s=rewrite_s,
                restore_s=restore_s,
                handling_s=(n_saves + save) * rates.handling_s.value,
                prefill_s=prefill_s,
                stall_s=stopped_s * self.running(backend) + stall_s,
                loss_s=loss_s,
            ),
            snapshot=file.snapshot.id if file else None,
            cut=file.cut if file else None,
            copy_from=copy_from,
            save_displaced=save,
        )


class Cheapest:
    """Ways to start, besides others that are `known`.

    The `n` cheapest of all are sure to be among them.
    """

    def __init__(self, n: int, known: Iterable[Candidate] = ()) -> None:
        self.ways: list[Candidate] = []
        self._n = n
        self._totals_s = sorted([way.price.total_s for way in known])

    def add(self, way: Candidate) -> None:
        """Add one way."""
        self.ways.append(way)
        insort(self._totals_s, way.price.total_s)

    def beat(self, least_s: float) -> bool:
        """Return True if a way that costs `least_s` or more need not be priced."""
        return (
            len(self._totals_s) >= self._n
            and self._totals_s[self._n - 1] < least_s - TUNING.equal_s
        )


_NO_FILES = Files([], 0, 0)


class _Owner(NamedTuple):
    """The idle slot that holds most of the prompt, and can be copied elsewhere."""

    slot: Slot
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
        return [_anywhere(context, backend) for backend in _where_served(context, room)]
    found = Cheapest(n, known)
    owner = _residents(context, room, found)
    leads: list[tuple[float, BackendId, Backend]] = []
    for backend in room:
        if not backend.info.is_managed:
            found.add(_anywhere(context, backend, backend.sent_before(context.request)))
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
    inventory, request, shared = context.inventory, context.request, context.shared
    hinted = request.slot_hint is not None
    leads: list[tuple[float, SlotId, Slot, int, int]] = []
    owners: list[tuple[int, int, SlotId, Slot]] = []
    for position, backend in enumerate(room):
        if not backend.info.is_managed or not backend.reuses(request):
            continue
        for slot in backend.slots:
            if slot.phase is not Phase.IDLE or (common := shared.get(slot.id, 0)) == 0:
                continue
            if hinted and not backend.wants(slot, request):
                continue
            if reused := inventory.reusable(slot, context.n_prompt, common):
                leads.append((context.least_s(backend, reused), slot.id, slot, common, reused))
                if slot.content.savable:
                    owners.append((-reused, position, slot.id, slot))
    for least_s, _, slot, common, reused in sorted(leads):
        if found.beat(least_s):
            break
        found.add(resident(context, slot, common, reused))
    if not owners:
        return None
    owner = min(owners)[3]
    backend, held = owner.backend, owner.content.resident
    if not can_save(inventory, backend, len(held)):
        return None
    size_bytes = round(len(held) * backend.rates.bytes_per_token.value)
    return _Owner(owner, held, shared[owner.id], size_bytes)


def resident(context: PricingContext, slot: Slot, common: int, reused: int) -> Candidate:
    """Return the way that goes on from what an idle slot holds."""
    displaced = saving_pays(context.inventory, slot, kept=common)
    return context.candidate(slot, Source.RESIDENT, displaced, reused=reused)


def cold(context: PricingContext, slot: Slot) -> Candidate:
    """Return the way that starts from nothing."""
    source = Source.NONE if context.has_no_say else Source.COLD
    return context.candidate(slot, source, saving_pays(context.inventory, slot))


def _anywhere(context: PricingContext, backend: Backend, reused: int = 0) -> Candidate:
    """Return the way to start where the server decides: in the cheapest free slot.

    Of equals the one unused for longest, which a server that picks itself takes as well. `reused`:
    tokens that it may have kept, in a slot or in its own cache.
    """
    displaced, target = _target(context, backend)
    return context.candidate(target, Source.NONE, displaced, reused=reused)


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


def _target(context: PricingContext, backend: Backend) -> tuple[Displaced, Slot]:
    """Return the price and the free slot of the least loss; of equals the one idle for longest."""
    free = backend.free(context.request)
    ways = [(saving_pays(context.inventory, slot), slot) for slot in free]
    return min(ways, key=lambda way: (way[0][0] + way[0][1], way[1].last_used, way[1].id))


def _elsewhere(
    context: PricingContext, backend: Backend, owner: _Owner | None, found: Cheapest, least_s: float
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
    found.add(context.candidate(target, Source.COLD, displaced))
    if not backend.reuses(context.request):
        return
    for file in _files(context, info, owner).files:
        # A longer file "does not fit in the slot context" (llama-server.md section 1.1).
        if file.length <= info.n_ctx and (backend.may_write or _is_there(info, file)):
            found.add(_restore(context, target, displaced, backend, file))
    if owner is not None and owner.slot.backend is not backend:
        way = _copy(context, target, displaced, backend, owner)
        if way is not None:
            found.add(way)


def _files(context: PricingContext, info: BackendInfo, owner: _Owner | None) -> Files:
    """Return each useful snapshot: the whole, or what the prompt shares with it."""
    if info.kv_dir is None or not info.memory_kind.can_restore:
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
        if can_cut(info, snapshot) and match.common < match.length:
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
        target,
        Source.SNAPSHOT,
        displaced,
        reused=file.reused,
        rewrite_s=_n_rewrites(backend.info, file) * rates.rewrite_s(file.size_bytes),
        restore_s=rates.restore_s(file.size_bytes),
        file=file,
    )


def _copy(
    context: PricingContext, target: Slot, displaced: Displaced, backend: Backend, owner: _Owner
) -> Candidate | None:
    """Return the way that saves the slot of `owner` and restores it into a slot elsewhere."""
    here, n_held = backend.info, len(owner.held)
    source = owner.slot.backend
    there = source.info
    reused = reusable_tokens(here.memory_kind, context.n_prompt, owner.common, n_held)
    fits = here.kv_dir is not None and here.memory_kind.can_restore and here.n_ctx >= n_held
    if not (reused and fits and there.namespace == here.namespace):
        return None
    save_s = source.rates.save_s(n_held)
    rewritten = StateShape(there.n_stream).needs_restream(here.n_stream)
    rewrite_s = source.rates.rewrite_s(owner.size_bytes)
    return context.candidate(
        target,
        Source.COPY,
        displaced,
        reused=reused,
        save_s=save_s,
        rewrite_s=rewritten * rewrite_s,
        restore_s=backend.rates.restore_s(owner.size_bytes),
        stall_s=save_s * context.running(source),
        n_saves=1,
        copy_from=owner.slot.id,
    )
