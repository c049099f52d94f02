"""Where a request runs and what it starts from: every way priced in seconds, the cheapest wins.

Pure: the same fleet, request and time always give the same plan. `POST /kvferry/plan` calls the
same function as production.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from router.core.catalog import Catalog
from router.core.cost import Rates
from router.core.plan import Candidate, Plan, Price
from router.core.policy import Policy, PolicyName
from router.core.reuse import can_restore, reusable_tokens
from router.core.slots import Phase, Slot, SlotTable
from router.tokens import common_prefix, count
from router.types import (
    BackendId,
    BackendInfo,
    MemoryKind,
    Request,
    SlotId,
    Source,
)

_LOSERS = 12  # kept for the explanation


@dataclass(slots=True)
class Fleet:
    """All that a decision depends on. Owned and changed by the scheduler alone."""

    policy: Policy = field(default_factory=Policy)
    catalog: Catalog = field(default_factory=Catalog)
    infos: dict[BackendId, BackendInfo] = field(default_factory=dict)  # of those that are up
    rates: dict[BackendId, Rates] = field(default_factory=dict)
    slots: SlotTable = field(default_factory=SlotTable)
    # Backends where a request without a pin is on its way to a slot that the server picks.
    gated: set[BackendId] = field(default_factory=set)
    sticky: dict[str, SlotId] = field(default_factory=dict)
    granted: int = 0  # how many leases so far; what round robin turns on

    def serves(self, backend: BackendId, request: Request) -> bool:
        """The backend is up, answers to the model, and the prompt fits into a slot."""
        info = self.infos.get(backend)
        return (
            info is not None
            and backend not in request.avoid
            and (request.model is None or request.model in info.models)
            and len(request.prompt) < info.n_ctx
        )

    def is_open(self, backend: BackendId, request: Request) -> bool:
        """The backend could take the request now, if one of its slots is idle.

        A server that picks the slot itself may take any idle one, also one that is being
        prepared for somebody else: such a request has the backend's idle slots to itself until
        it is known to run (llama-server.md section 2.2).
        """
        if backend in self.gated:
            return False
        phases = [slot.phase for slot in self.slots.of(backend)]
        if request.whole_backend:
            return all(phase is Phase.IDLE for phase in phases)
        if not request.pinnable and Phase.DRAINING in phases:
            return False  # the slot may be idle already, and the server's choice
        return not (self.needs_gate(backend, request) and Phase.PREPARING in phases)

    def needs_gate(self, backend: BackendId, request: Request) -> bool:
        """Nothing else may be prepared on the backend until this request is known to run.

        Also where idle slots lose their content whenever a request starts
        (llama-server.md section 0.6).
        """
        return (
            request.whole_backend
            or not request.pinnable
            or not self.infos[backend].keeps_idle_slots
        )

    def running(self, backend: BackendId) -> int:
        """Streams that stop while a state file is written or read."""
        return sum(slot.phase is Phase.RUNNING for slot in self.slots.of(backend))


def plan(request: Request, fleet: Fleet, now: float, waited_s: float = 0.0) -> Plan | None:
    """The best thing to do with a request now. None: nothing can be done but wait.

    A plan whose `chosen.wait_for` is set means: another slot is free, but waiting is cheaper.
    """
    backends = [
        backend
        for backend in fleet.infos
        if fleet.serves(backend, request) and fleet.is_open(backend, request)
    ]
    free = [
        slot
        for backend in backends
        for slot in fleet.slots.of(backend)
        if slot.is_idle and _wanted(slot, request, fleet.infos[backend])
    ]
    if not fleet.policy.moves_kv:
        return _baseline(request, fleet, free)
    candidates = list(_now(request, fleet, free))
    if not candidates:
        return None
    if waited_s < fleet.policy.max_wait_s:
        later = list(_later(request, fleet, now))
        candidates = [_less_double_work(request, fleet, c, later) for c in candidates] + later
    candidates.sort(key=Candidate.order)
    chosen = candidates[0]
    return Plan(
        chosen=chosen,
        losers=tuple(candidates[1 : 1 + _LOSERS]),
        reason=_reason(request, chosen),
        prefill_first=_prefill_first(request, chosen, fleet),
    )


def _wanted(slot: Slot, request: Request, info: BackendInfo) -> bool:
    hint = request.slot_hint
    return hint is None or slot.id.index == hint or hint >= info.n_slots


def _has_no_say(request: Request) -> bool:
    """What the server will reuse is not known, or not for the router to choose."""
    return bool(request.whole_backend or request.prompt.unknown or not request.reuse)


def _now(request: Request, fleet: Fleet, free: list[Slot]) -> Iterator[Candidate]:
    """Ways to start at once: resident, snapshot, copy of another idle slot, cold."""
    if _has_no_say(request):
        yield from (_cold(request, fleet, slot, Source.NONE) for slot in free)
        return
    owner: Candidate | None = None
    for slot in free:
        if resident := _resident(request, fleet, slot):
            yield resident
            if owner is None or resident.reused_tokens > owner.reused_tokens:
                owner = resident
    for backend in {slot.id.backend: None for slot in free}:
        # On one backend the target decides nothing but what is displaced.
        colds = [_cold(request, fleet, s, Source.COLD) for s in free if s.id.backend == backend]
        target = min(colds, key=lambda c: (c.order()[0], fleet.slots[c.slot].last_used, c.slot))
        yield target
        yield from _restores(request, fleet, target)
        if owner is not None and owner.slot.backend != backend:
            yield from _copy(request, fleet, target, owner)


def _resident(request: Request, fleet: Fleet, slot: Slot) -> Candidate | None:
    info = fleet.infos[slot.id.backend]
    common = common_prefix(slot.resident.tokens, request.prompt.tokens)
    reused = reusable_tokens(
        info.memory_kind,
        len(request.prompt),
        common,
        len(slot.resident),
        checkpoints=slot.resident.checkpoints,
    )
    if not reused:
        return None
    base = _displace(fleet, slot, kept=common)
    return replace(
        base,
        source=Source.RESIDENT,
        reused_tokens=reused,
        price=_with_prefill(request, fleet, info.id, base.price, reused),
    )


def _cold(request: Request, fleet: Fleet, slot: Slot, source: Source) -> Candidate:
    base = _displace(fleet, slot, kept=0)
    price = _with_prefill(request, fleet, slot.id.backend, base.price, 0)
    return replace(base, source=source, price=price)


def _with_prefill(
    request: Request, fleet: Fleet, backend: BackendId, price: Price, reused: int
) -> Price:
    """`price`, and what computing the rest of the prompt costs this request and the others.

    Streams on the same backend get one token for each batch of a prefill: they all but stop.
    """
    prefill_s = fleet.rates[backend].prefill_s(len(request.prompt) - reused, reused)
    stall_s = price.stall_s + prefill_s * fleet.running(backend)
    return replace(price, prefill_s=prefill_s, stall_s=stall_s)


def _restores(request: Request, fleet: Fleet, target: Candidate) -> Iterator[Candidate]:
    """Restore each useful snapshot into the slot of `target`."""
    info = fleet.infos[target.slot.backend]
    if info.place is None or not can_restore(info.memory_kind):
        return
    for match in fleet.catalog.match(info.namespace, request.prompt.tokens):
        if match.length > info.n_ctx:
            continue  # "does not fit in the slot context" (llama-server.md section 1.1)
        reused = reusable_tokens(info.memory_kind, len(request.prompt), match.common, match.length)
        if reused:
            size_bytes = fleet.catalog[match.item].size_bytes
            yield replace(
                _restored(request, fleet, target, reused, size_bytes),
                source=Source.SNAPSHOT,
                snapshot=match.item,
            )


def _restored(
    request: Request, fleet: Fleet, target: Candidate, reused: int, size_bytes: int
) -> Candidate:
    """`target`, starting from a file of `size_bytes` that gives `reused` tokens."""
    backend = target.slot.backend
    restore_s = fleet.rates[backend].restore_s(size_bytes)
    displaced = _displace(fleet, fleet.slots[target.slot], kept=0).price
    price = _with_prefill(request, fleet, backend, displaced, reused)
    stall_s = price.stall_s + restore_s * fleet.running(backend)
    price = replace(price, restore_s=restore_s, stall_s=stall_s)
    return replace(target, reused_tokens=reused, price=price)


def _copy(
    request: Request, fleet: Fleet, target: Candidate, owner: Candidate
) -> Iterator[Candidate]:
    """Save what the idle slot of `owner` holds and restore it into the slot of `target`."""
    there, here = fleet.infos[owner.slot.backend], fleet.infos[target.slot.backend]
    resident = fleet.slots[owner.slot].resident
    reused = reusable_tokens(
        here.memory_kind,
        len(request.prompt),
        common_prefix(resident.tokens, request.prompt.tokens),
        len(resident),
    )
    if not reused or there.namespace != here.namespace or here.n_ctx < len(resident):
        return
    if not can_save(fleet, there, len(resident)):
        return
    rates = fleet.rates[there.id]
    save_s = rates.save_s(len(resident))
    moved = _restored(
        request, fleet, target, reused, round(len(resident) * rates.bytes_per_token.value)
    )
    yield replace(
        moved,
        source=Source.COPY,
        copy_from=owner.slot,
        price=replace(
            moved.price,
            save_s=moved.price.save_s + save_s,
            stall_s=moved.price.stall_s + save_s * fleet.running(there.id),
        ),
    )


def _later(request: Request, fleet: Fleet, now: float) -> Iterator[Candidate]:
    """Ways that begin with waiting for a busy slot which has, or is computing, the prefix.

    1. Its prefill is under way on its own, and will be saved for all who wait; or what it holds
       is being saved anyway.
    2. It runs somebody's request: only where the policy allows to wait for the owner.
    """
    if _has_no_say(request):
        return
    for slot in fleet.slots:
        if slot.phase not in (Phase.PREPARING, Phase.RUNNING) or not slot.pending:
            continue
        if not fleet.serves(slot.id.backend, request):
            continue
        info = fleet.infos[slot.id.backend]
        common = common_prefix(slot.pending, request.prompt.tokens)
        held = count(slot.pending)
        reused = reusable_tokens(info.memory_kind, len(request.prompt), common, held)
        if not reused:
            continue
        rates = fleet.rates[info.id]
        wait_s = max(slot.busy_until - now, 0.0)
        rest_s = rates.prefill_s(len(request.prompt) - reused, reused)
        waiting = Candidate(
            slot.id, Source.RESIDENT, reused, Price(wait_s=wait_s, prefill_s=rest_s)
        )
        if slot.sharing and can_save(fleet, info, held):
            transfer_s = rates.save_s(held) + rates.restore_s(
                round(held * rates.bytes_per_token.value)
            )
            price = replace(waiting.price, restore_s=transfer_s)
            yield replace(waiting, source=Source.SNAPSHOT, price=price, wait_for=slot.id)
        elif (
            fleet.policy.may_wait
            and wait_s <= fleet.policy.max_wait_s
            and _wanted(slot, request, info)
        ):
            yield replace(waiting, wait_for=slot.id)


def _less_double_work(
    request: Request, fleet: Fleet, candidate: Candidate, later: list[Candidate]
) -> Candidate:
    """`candidate`, charged for computing what another slot is computing at this moment.

    The request itself may not lose by it, on an idle server; everybody else loses those seconds
    of that server, if they need it.
    """
    shared = [c.reused_tokens for c in later if c.source is Source.SNAPSHOT]
    double = max(shared, default=0) - candidate.reused_tokens
    if double <= 0:
        return candidate
    rates = fleet.rates[candidate.slot.backend]
    waste_s = rates.prefill_s(double, candidate.reused_tokens)
    loss_s = candidate.price.loss_s + fleet.policy.reuse_probability * waste_s
    return replace(candidate, price=replace(candidate.price, loss_s=loss_s))


def can_save(fleet: Fleet, info: BackendInfo, tokens: int) -> bool:
    """A state of `tokens` on this backend can become a snapshot."""
    size_bytes = tokens * fleet.rates[info.id].bytes_per_token.value
    return (
        fleet.policy.moves_kv
        and info.place is not None
        and can_restore(info.memory_kind)
        and fleet.catalog.limits.admits(tokens, size_bytes)
    )


def saving_pays(fleet: Fleet, slot: Slot, kept: int = 0) -> tuple[float, float, bool]:
    """Price of taking a slot's content away: `(save seconds, expected loss, save it)`.

    `kept` tokens stay useful where they are. What a snapshot holds already is no loss. Saved if
    that costs less than the seconds it would take to compute it again, times the chance that it
    is asked for.
    """
    resident = slot.resident
    if len(resident) <= kept:
        return 0.0, 0.0, False
    info = fleet.infos[slot.id.backend]
    rates = fleet.rates[info.id]
    covered = fleet.catalog.covered(info.namespace, resident.tokens)
    covered = _useful_cover(info.memory_kind, covered, len(resident))
    missing = len(resident) - max(covered, kept)
    if missing <= 0:
        return 0.0, 0.0, False
    loss_s = fleet.policy.reuse_probability * rates.prefill_s(missing, len(resident) - missing)
    save_s = rates.save_s(len(resident))
    stall_s = save_s * fleet.running(info.id)
    if can_save(fleet, info, len(resident)) and save_s + stall_s < loss_s:
        return save_s, 0.0, True
    return 0.0, loss_s, False


def _useful_cover(kind: MemoryKind, covered: int, held: int) -> int:
    """Kinds without partial reuse gain nothing from a snapshot of a part."""
    if kind is MemoryKind.FULL:
        return covered
    return held if covered == held else 0


def _displace(fleet: Fleet, slot: Slot, kept: int) -> Candidate:
    save_s, loss_s, save = saving_pays(fleet, slot, kept)
    return Candidate(
        slot=slot.id,
        source=Source.COLD,
        reused_tokens=0,
        price=Price(save_s=save_s, loss_s=loss_s, stall_s=save_s * fleet.running(slot.id.backend)),
        save_displaced=save,
    )


def _prefill_first(request: Request, chosen: Candidate, fleet: Fleet) -> bool:
    """Compute the prompt with a request of our own before the client's.

    1. The server would pick the slot: afterwards the slot we mean has by far the longest common
       prefix, and so is the one it picks (llama-server.md section 2.2).
    2. It takes long: others with the same prefix can then share it.
    """
    prompt = request.prompt
    if prompt.unknown or prompt.n_media or not request.reuse or request.whole_backend:
        return False
    if len(prompt) - chosen.reused_tokens < 2:
        return False  # only the last token is left, and the client's request computes that
    if not request.pinnable:
        return True
    above_s = fleet.policy.coalesce_above_s
    if above_s is None or chosen.price.prefill_s < above_s:
        return False
    return can_save(fleet, fleet.infos[chosen.slot.backend], len(prompt) - 1)


def _reason(request: Request, chosen: Candidate) -> str:
    if request.prompt.unknown:
        return f"tokens unknown: {request.prompt.unknown}"
    if not request.reuse:
        return "the client asked for no reuse"
    if chosen.wait_for is not None:
        return f"waiting for {chosen.wait_for} is cheaper"
    return f"{chosen.source} is cheapest at {chosen.price.total_s:.3f}s"


def _baseline(request: Request, fleet: Fleet, free: Iterable[Slot]) -> Plan | None:
    """The policies that never move KV, for comparison. What a slot happens to hold still counts.

    1. `sticky`: the slot of the first time, however long it takes; else the least busy. A home
       that is gone, or that a `slot_hint` rules out, is none.
    2. `round_robin`: the next slot in turn.
    3. `least_busy`: the backend with the fewest running, then the slot idle for longest.
    """
    slots = list(free)
    if fleet.policy.name is PolicyName.STICKY:
        home = fleet.sticky.get(sticky_key(request))
        if home in {
            slot.id
            for backend, info in fleet.infos.items()
            if fleet.serves(backend, request)
            for slot in fleet.slots.of(backend)
            if _wanted(slot, request, info)
        }:
            slots = [slot for slot in slots if slot.id == home]
    if not slots:
        return None
    if fleet.policy.name is PolicyName.ROUND_ROBIN:
        everyone = [slot.id for slot in fleet.slots]
        turn = fleet.granted % len(everyone)
        in_turn = everyone[turn:] + everyone[:turn]
        slot = min(slots, key=lambda s: in_turn.index(s.id))
    else:
        slot = min(slots, key=lambda s: (fleet.running(s.id.backend), s.last_used, s.id))
    if _has_no_say(request):
        chosen = _cold(request, fleet, slot, Source.NONE)
    else:
        chosen = _resident(request, fleet, slot) or _cold(request, fleet, slot, Source.COLD)
    return Plan(replace(chosen, save_displaced=False), reason=fleet.policy.name)


def sticky_key(request: Request) -> str:
    """What a conversation is known by: its session header, else its first 128 tokens."""
    return request.session or request.prompt.tokens[:512].hex() or request.id
