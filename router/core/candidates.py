"""Every way to serve a request, priced in seconds. Which one is taken is the planner's business."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from router.core.displacement import can_save, saving_pays
from router.core.fleet import Fleet
from router.core.plan import Candidate, Price
from router.core.reuse import can_restore, goes_back, reusable_tokens
from router.core.slots import Phase, Slot
from router.tokens import common_prefix, count
from router.types import BackendId, Request, SlotId, Snapshot, Source, StateShape

# Snapshots that are priced for each backend: those that share most, of these the shortest. One
# that shares less could only win by being much smaller.
_SNAPSHOTS = 4


@dataclass(slots=True)
class Ask:
    """A request put to a fleet at one moment; what many candidates need is worked out once."""

    request: Request
    fleet: Fleet
    now: float
    _running: dict[BackendId, int] = field(default_factory=dict)

    @property
    def has_no_say(self) -> bool:
        """What the server will reuse is not known, or not for the router to choose."""
        request = self.request
        return bool(request.whole_backend or request.prompt.unknown or not request.reuse)

    def running(self, backend: BackendId) -> int:
        """Requests on a backend that a transfer or a prefill would hold up.

        Those whose prompt the router computes first are among them: without them a busy server
        would look idle.
        """
        if backend not in self._running:
            fleet = self.fleet
            self._running[backend] = fleet.running(backend) + fleet.prefilling(backend)
        return self._running[backend]

    def candidate(
        self,
        slot: SlotId,
        source: Source,
        displaced: tuple[float, float, bool],
        *,
        reused: int = 0,
        save_s: float = 0.0,
        rewrite_s: float = 0.0,
        restore_s: float = 0.0,
        stall_s: float = 0.0,
    ) -> Candidate:
        """A way to start now, with all it costs this request and the others.

        `displaced` is what `saving_pays` said; `save_s` and `stall_s` come on top. Streams on the
        same backend stop for a transfer, and all but stop for a prefill: they get one token for
        each of its batches.
        """
        backend = slot.backend
        displaced_s, loss_s, save = displaced
        n_tokens = len(self.request.prompt)
        prefill_s = self.fleet.rates[backend].prefill_s(n_tokens - reused, reused)
        stopped_s = displaced_s + restore_s + prefill_s
        return Candidate(
            slot=slot,
            source=source,
            reused_tokens=reused,
            price=Price(
                save_s=displaced_s + save_s,
                rewrite_s=rewrite_s,
                restore_s=restore_s,
                prefill_s=prefill_s,
                stall_s=stopped_s * self.running(backend) + stall_s,
                loss_s=loss_s,
            ),
            save_displaced=save,
        )


def starting_now(ask: Ask, free: list[Slot]) -> Iterator[Candidate]:
    """Ways to start at once: resident, snapshot, copy of another idle slot, cold."""
    if ask.has_no_say:
        yield from (cold(ask, slot) for slot in free)
        return
    owner: Candidate | None = None
    for slot in free:
        if found := resident(ask, slot):
            yield found
            if owner is None or found.reused_tokens > owner.reused_tokens:
                owner = found
    by_backend: dict[BackendId, list[Slot]] = {}
    for slot in free:
        by_backend.setdefault(slot.id.backend, []).append(slot)
    for backend, slots in by_backend.items():
        # On one backend the target decides nothing but what is displaced.
        displaced, target = min(
            ((saving_pays(ask.fleet, slot), slot) for slot in slots),
            key=lambda pair: (pair[0][0] + pair[0][1], pair[1].last_used, pair[1].id),
        )
        yield ask.candidate(target.id, Source.COLD, displaced)
        yield from _restores(ask, target, displaced)
        if owner is not None and owner.slot.backend != backend:
            yield from _copy(ask, target, displaced, owner)


def resident(ask: Ask, slot: Slot) -> Candidate | None:
    """Go on from what an idle slot holds; None if that is of no use."""
    info, prompt = ask.fleet.infos[slot.id.backend], ask.request.prompt
    common = common_prefix(slot.resident.tokens, prompt.tokens)
    reused = reusable_tokens(
        info.memory_kind,
        len(prompt),
        common,
        len(slot.resident),
        checkpoints=slot.resident.checkpoints,
    )
    if not reused:
        return None
    displaced = saving_pays(ask.fleet, slot, kept=common)
    return ask.candidate(slot.id, Source.RESIDENT, displaced, reused=reused)


def cold(ask: Ask, slot: Slot) -> Candidate:
    """Start from nothing."""
    source = Source.NONE if ask.has_no_say else Source.COLD
    return ask.candidate(slot.id, source, saving_pays(ask.fleet, slot))


def _restores(ask: Ask, target: Slot, displaced: tuple[float, float, bool]) -> Iterator[Candidate]:
    """Restore each useful snapshot into a slot: the whole, or what the prompt shares with it."""
    info, prompt = ask.fleet.infos[target.id.backend], ask.request.prompt
    if info.place is None or not can_restore(info.memory_kind):
        return
    catalog, n_prompt = ask.fleet.catalog, len(prompt)
    useful = catalog.useful(info.memory_kind, info.namespace, prompt.tokens, n_prompt, _SNAPSHOTS)
    for match, reused in useful:
        if reused < catalog.limits.min_tokens:
            continue  # not worth a file, and so not worth reading one
        snapshot = catalog[match.item]
        ways: list[tuple[int, int, int | None]] = [(match.length, snapshot.size_bytes, None)]
        divisible = info.cuts and goes_back(info.memory_kind) and not snapshot.shape.media
        if divisible and match.common < match.length:
            share = match.common * snapshot.size_bytes // match.length
            if catalog.limits.admits(match.common, share):
                ways.append((match.common, share, match.common))
        for length, size_bytes, cut in ways:
            if length > info.n_ctx:
                continue  # "does not fit in the slot context" (llama-server.md section 1.1)
            way = _restore(ask, target, displaced, reused, size_bytes, snapshot, cut is not None)
            yield replace(way, snapshot=match.item, cut=cut)


def _restore(
    ask: Ask,
    target: Slot,
    displaced: tuple[float, float, bool],
    reused: int,
    size_bytes: int,
    snapshot: Snapshot,
    is_cut: bool,
) -> Candidate:
    rates = ask.fleet.rates[target.id.backend]
    n_rewrites = is_cut + snapshot.shape.needs_restream(ask.fleet.infos[target.id.backend].n_stream)
    return ask.candidate(
        target.id,
        Source.SNAPSHOT,
        displaced,
        reused=reused,
        rewrite_s=n_rewrites * rates.rewrite_s(size_bytes),
        restore_s=rates.restore_s(size_bytes),
    )


def _copy(
    ask: Ask, target: Slot, displaced: tuple[float, float, bool], owner: Candidate
) -> Iterator[Candidate]:
    """Save what the idle slot of `owner` holds, and restore it into a slot elsewhere."""
    fleet, prompt = ask.fleet, ask.request.prompt
    there, here = fleet.infos[owner.slot.backend], fleet.infos[target.id.backend]
    held = fleet.slots[owner.slot].resident
    common = common_prefix(held.tokens, prompt.tokens)
    reused = reusable_tokens(here.memory_kind, len(prompt), common, len(held))
    fits = here.place is not None and can_restore(here.memory_kind) and here.n_ctx >= len(held)
    if not (reused and fits and there.namespace == here.namespace):
        return
    if not can_save(fleet, there, len(held)):
        return
    rates = fleet.rates[there.id]
    save_s = rates.save_s(len(held))
    size_bytes = round(len(held) * rates.bytes_per_token.value)
    rewritten = StateShape(there.n_stream).needs_restream(here.n_stream)
    way = ask.candidate(
        target.id,
        Source.COPY,
        displaced,
        reused=reused,
        save_s=save_s,
        rewrite_s=rewritten * rates.rewrite_s(size_bytes),
        restore_s=fleet.rates[here.id].restore_s(size_bytes),
        stall_s=save_s * ask.running(there.id),
    )
    yield replace(way, copy_from=owner.slot)


def starting_later(ask: Ask) -> Iterator[Candidate]:
    """Ways that begin with waiting for a busy slot which has, or is computing, the prefix.

    1. Its prefill is under way on its own, and will be saved for all who wait; or what it holds
       is being saved anyway.
    2. It runs somebody's request: only where the policy allows to wait for the owner.
    """
    if ask.has_no_say:
        return
    fleet, request = ask.fleet, ask.request
    for slot in fleet.slots:
        if slot.phase not in (Phase.PREPARING, Phase.RUNNING) or not slot.pending:
            continue
        if not fleet.serves(slot.id.backend, request):
            continue
        info = fleet.infos[slot.id.backend]
        common = common_prefix(slot.pending, request.prompt.tokens)
        held = count(slot.pending)
        reused = reusable_tokens(info.memory_kind, len(request.prompt), common, held)
        if reused < max(fleet.catalog.limits.min_tokens, 1):
            continue  # nobody will save so little for others
        rates = fleet.rates[info.id]
        wait_s = max(slot.busy_until - ask.now, 0.0)
        rest_s = rates.prefill_s(len(request.prompt) - reused, reused)
        if slot.sharing and can_save(fleet, info, held):
            size_bytes = round(held * rates.bytes_per_token.value)
            price = Price(
                wait_s=wait_s,
                restore_s=rates.save_s(held) + rates.restore_s(size_bytes),
                prefill_s=rest_s,
            )
            yield Candidate(slot.id, Source.SNAPSHOT, reused, price, wait_for=slot.id)
        elif (
            fleet.policy.may_wait
            and wait_s <= fleet.policy.max_wait_s
            and fleet.wants(slot, request)
        ):
            price = Price(wait_s=wait_s, prefill_s=rest_s)
            yield Candidate(slot.id, Source.RESIDENT, reused, price, wait_for=slot.id)


def less_double_work(ask: Ask, candidate: Candidate, later: list[Candidate]) -> Candidate:
    """`candidate`, charged for computing what another slot is computing at this moment.

    The request itself may not lose by it, on an idle server; everybody else loses those seconds
    of that server, if they need it.
    """
    shared = [way.reused_tokens for way in later if way.source is Source.SNAPSHOT]
    double = max(shared, default=0) - candidate.reused_tokens
    if double <= 0:
        return candidate
    rates = ask.fleet.rates[candidate.slot.backend]
    waste_s = rates.prefill_s(double, candidate.reused_tokens)
    loss_s = candidate.price.loss_s + ask.fleet.policy.reuse_probability * waste_s
    return replace(candidate, price=replace(candidate.price, loss_s=loss_s))
