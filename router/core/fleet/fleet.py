"""All that a decision depends on, and what can be asked of it without deciding anything."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from router.base.tokens import Tokens, count
from router.base.types import BackendId, BackendInfo, Namespace, Request, SlotId
from router.core.fleet.catalog import Catalog
from router.core.fleet.ghost_list import Ghosts
from router.core.fleet.slot_index import Holdings
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.policy import Policy
from router.core.model.rates import Rates
from router.core.model.server_placement import Expected, can_be_steered, holds_up, will_hold
from router.core.model.slots import Phase, Slot, SlotTable
from router.core.model.tenancy import may_tempt, model_of, namespace_of, tempts


@dataclass(slots=True)
class Rest:
    """Failures in a row to write for a backend; until when nothing is tried, in clock seconds."""

    failures: int = 0
    until: float | None = None


@dataclass(slots=True)
class Fleet:
    """Owned and changed by the scheduler alone."""

    policy: Policy = field(default_factory=Policy)
    catalog: Catalog = field(default_factory=Catalog)
    infos: dict[BackendId, BackendInfo] = field(default_factory=dict)  # of those that are up
    rates: dict[BackendId, Rates] = field(default_factory=dict)
    slots: SlotTable = field(default_factory=SlotTable)
    # Backends where a request without a pin is on its way to a slot that the server picks.
    gated: set[BackendId] = field(default_factory=set)
    at_gate: dict[BackendId, list[Expected]] = field(default_factory=dict)  # see core/gate.py
    # Backends that were seen to place a request elsewhere than where most of its prompt was.
    wayward: set[BackendId] = field(default_factory=set)
    # Backends that get nothing new: what they have ends, what they hold is saved.
    draining: set[BackendId] = field(default_factory=set)
    rests: dict[BackendId, Rest] = field(default_factory=dict)  # see core/rests.py
    sticky: dict[str, SlotId] = field(default_factory=dict)
    granted: int = 0  # how many leases so far; what round robin turns on
    # For each model: uses of its slots, and how many slots there are.
    uses: dict[Namespace, int] = field(default_factory=dict)
    sizes: dict[Namespace, int] = field(default_factory=dict)
    has_tenants: bool = False  # a slot may hold something that is somebody's
    holdings: Holdings = field(default_factory=Holdings, repr=False, compare=False)
    displaced: Ghosts = field(default_factory=Ghosts, repr=False, compare=False)
    # What backends that empty their idle slots have put into a cache of their own, by backend.
    parked: Ghosts = field(default_factory=Ghosts, repr=False, compare=False)

    def serves(self, backend: BackendId, request: Request) -> bool:
        """The backend is fit for the request, and is to stay."""
        return backend not in self.draining and self.fits(backend, request)

    def fits(self, backend: BackendId, request: Request) -> bool:
        """The backend is up, answers to the model, and the prompt fits into a slot."""
        info = self.infos.get(backend)
        return info is not None and _suits(info, request, len(request.prompt))

    def is_open(self, backend: BackendId, request: Request) -> bool:
        """The backend could take the request now, if one of its slots is idle.

        A server that picks the slot itself may take any idle one, also one that is being
        prepared for somebody else: such a request has the backend's idle slots to itself until
        it is known to run (llama-server.md section 2.2). Where slots hold nothing, any will do.
        One that can be steered needs that only when it is sent (`core/gate.py`).
        """
        if backend in self.gated:
            return False
        if any(holds_up(request, first) for first in self.at_gate.get(backend, ())):
            return False
        phases = self.slots.phases(backend)
        if request.whole_backend:
            return phases[Phase.IDLE] == len(self.slots.of(backend))
        if not self.needs_gate(backend, request):
            return True
        if self.gates_late(backend, request):
            return not self._is_anothers(backend, request)
        if not request.pinnable and phases[Phase.DRAINING]:
            return False  # the slot may be idle already, and the server's choice
        if not request.pinnable and self._will_tempt(backend, request):
            return False  # the same, when its answer ends
        return not phases[Phase.PREPARING]

    def room(self, request: Request) -> list[BackendId]:
        """The backends that could take the request now."""
        n_prompt, hinted = len(request.prompt), request.slot_hint is not None
        return [
            backend
            for backend, info in self.infos.items()
            if self.slots.phases(backend)[Phase.IDLE]
            and backend not in self.draining
            and _suits(info, request, n_prompt)
            and self.is_open(backend, request)
            and not (hinted and not self.free(backend, request))
        ]

    def has_idle(self, model: str | None) -> bool:
        """A backend that answers to the model has an idle slot."""
        return any(
            self.slots.phases(backend)[Phase.IDLE]
            for backend, info in self.infos.items()
            if info.answers_to(model) and backend not in self.draining
        )

    def kind(self, request: Request) -> Hashable:
        """Of all requests of a kind, each has room or none."""
        prompt = request.prompt
        # The more contexts are too short for it, the fewer backends it fits; and they are the same.
        too_short = sum(len(prompt) >= info.n_ctx for info in self.infos.values())
        # See `tempts`: of these it compares tokens.
        own = self.has_tenants and not (request.pinnable or prompt.unknown or prompt.n_media)
        return (
            *(request.model, request.avoid, request.slot_hint, request.pinnable),
            *(request.whole_backend, request.reuse, request.tenant, too_short),
            request.id if own or self.at_gate else None,
        )

    def free(self, backend: BackendId, request: Request) -> list[Slot]:
        """The idle slots of a backend, of which the request may have one."""
        idle = [slot for slot in self.slots.of(backend) if slot.phase is Phase.IDLE]
        if request.slot_hint is None:
            return idle
        return [slot for slot in idle if self.wants(slot, request)]

    def generates(self, backend: BackendId) -> bool:
        """Its slots hold something; those of a model without KV never do."""
        return self.infos[backend].generates

    def needs_gate(self, backend: BackendId, request: Request) -> bool:
        """Nothing else may be prepared on the backend until this request is known to run.

        Also where idle slots lose their content whenever a request starts
        (llama-server.md section 0.6). Never where there is no content.
        """
        info = self.infos[backend]
        placed = request.whole_backend or not request.pinnable
        return info.generates and (placed or not info.keeps_idle_slots)

    def gates_late(self, backend: BackendId, request: Request) -> bool:
        """The request needs the gate when it is sent, and not while its prompt is computed."""
        steered = self.policy.moves_kv and backend not in self.wayward
        return steered and can_be_steered(request, self.infos[backend])

    def tempting(self, backend: BackendId, request: Request) -> list[Slot]:
        """Idle slots with another tenant's tokens, where the server might put a request that cannot
        be pinned. The baselines compute no prompt first."""
        return [
            slot
            for slot in self.slots.of(backend)
            if slot.is_idle and may_tempt(slot, request, computed_first=self.policy.moves_kv)
        ]

    def _will_tempt(self, backend: BackendId, request: Request) -> bool:
        """One that runs something of another tenant may be the server's choice when it is idle."""
        return any(
            slot.phase is Phase.RUNNING
            and tempts(slot, request, computed_first=self.policy.moves_kv)
            for slot in self.slots.of(backend)
        )

    def _is_anothers(self, backend: BackendId, request: Request) -> bool:
        """The same prompt is in preparation there for another tenant: neither could be sent."""
        return any(
            slot.phase is Phase.PREPARING
            and slot.taker != request.tenant
            and will_hold(slot.pending, request.prompt)
            for slot in self.slots.of(backend)
        )

    def may_write(self, backend: BackendId) -> bool:
        """State files can be made for this backend, as far as is known."""
        rest = self.rests.get(backend)
        return rest is None or rest.until is None

    def running(self, backend: BackendId) -> int:
        """Streams that stop while a state file is written or read."""
        return self.slots.phases(backend)[Phase.RUNNING]

    def prefilling(self, backend: BackendId) -> list[Slot]:
        """Slots whose prompt the router computes first, now or soon."""
        if not self.slots.phases(backend)[Phase.PREPARING]:
            return []
        slots = self.slots.of(backend)
        return [slot for slot in slots if slot.phase is Phase.PREPARING and slot.sharing]

    def held_up(self, backend: BackendId) -> int:
        """Requests that a transfer or a prefill would hold up.

        Those whose prompt the router computes first are among them: without them a busy server
        would look idle.
        """
        return self.running(backend) + len(self.prefilling(backend))

    def reusable(self, slot: Slot, n_prompt: int, common: int) -> int:
        """Tokens of a prompt that need no computing in a slot which shares `common` with it."""
        held = slot.resident
        return reusable_tokens(
            self.infos[slot.id.backend].memory_kind,
            n_prompt,
            common,
            len(held),
            checkpoints=held.checkpoints,
        )

    def reach(self, slot: Slot) -> int:
        """How many of the tokens that a slot holds could be restored from a snapshot.

        The price of taking any slot away depends on it, and it seldom changes.
        """
        resident, info = slot.resident, self.infos[slot.id.backend]
        tenant, changes = slot.tenant, self.catalog.changes
        known = slot.bench.reaches.get(slot.id.index)
        if known and known[0] is resident and known[1] is info and known[2:4] == (tenant, changes):
            return known[4]
        reach = self.catalog.reach(info.memory_kind, namespace_of(info, tenant), resident.tokens)
        slot.bench.reaches[slot.id.index] = resident, info, tenant, changes, reach
        return reach

    def note_use(self, slot: Slot) -> None:
        """What a slot holds was used just now."""
        model = self.infos[slot.id.backend].namespace
        slot.used_no = self.uses[model] = self.uses.get(model, 0) + 1
        self.sizes[model] = sum(i.n_slots for i in self.infos.values() if i.namespace == model)

    def neglect(self, slot: Slot) -> float:
        """Uses of its model's slots since a slot's last, for each slot that there is."""
        model = self.infos[slot.id.backend].namespace
        used, n = self.uses.get(model, 0), self.sizes.get(model, 1)
        return max(used - slot.used_no, 0) / max(n, 1)

    def known_namespaces(self) -> set[Namespace]:
        """All that a backend could belong to."""
        held = {model_of(namespace) for namespace in self.catalog.namespaces()}
        return held | {info.namespace for info in self.infos.values()}

    def forget(self, backend: BackendId) -> None:
        """A backend that is not up will not be again: nothing is kept of it."""
        self.holdings.forget(backend)
        self.slots.remove(backend)
        self.rates.pop(backend, None)
        self.rests.pop(backend, None)
        self.sticky = {key: home for key, home in self.sticky.items() if home.backend != backend}

    def give_up(self, slot: Slot, kept: int = 0) -> None:
        """A slot is about to lose all but `kept` tokens: remember what no snapshot holds."""
        tokens = slot.resident.tokens
        if count(tokens) > kept and count(tokens) > self.reach(slot):
            self.displaced.add(namespace_of(self.infos[slot.id.backend], slot.tenant), tokens)
            if not slot.declined:
                self.park(slot.id.backend, tokens)

    def park(self, backend: BackendId, tokens: Tokens) -> None:
        """A slot does not hold these any more, or never did: a backend that empties idle slots may
        have put them into a cache of its own."""
        if not self.infos[backend].keeps_idle_slots:
            self.parked.add(Namespace(backend), tokens)

    def parked_tokens(self, backend: BackendId, tokens: Tokens) -> int:
        """How many leading tokens of a prompt a backend may find in its own cache. That knows no
        tenants: where there are any, it is not asked."""
        return 0 if self.has_tenants else self.parked.nearest(Namespace(backend), tokens)[0]

    def wants(self, slot: Slot, request: Request) -> bool:
        """The client's own `id_slot`, if it sent one that this backend has, is this slot's."""
        hint = request.slot_hint
        if hint is None:
            return True
        return slot.id.index == hint or hint >= self.infos[slot.id.backend].n_slots


def _suits(info: BackendInfo, request: Request, n_prompt: int) -> bool:
    """A backend that is up answers to the model, and `n_prompt` tokens fit into a slot."""
    return n_prompt < info.n_ctx and info.answers_to(request.model) and info.id not in request.avoid
