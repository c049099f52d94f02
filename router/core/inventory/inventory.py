"""The inventory: the data that decisions depend on, and queries that decide nothing."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from router.base.tokens import count
from router.base.types import (
    BackendId,
    BackendInfo,
    MemoryKind,
    Namespace,
    Request,
    RequestId,
    SlotId,
)
from router.core.inventory.catalog import Catalog
from router.core.inventory.returns import Returns
from router.core.model.backend import Backend, Slot, SlotTable
from router.core.model.jobs import Job, RequestJob, SlotWatch
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.policy import Policy
from router.core.model.prefix_index import GhostList
from router.core.model.rates import Rates
from router.core.model.server_placement import SlotClaim, holds_up, slot_claim
from router.core.model.servers import Servers
from router.core.model.slots import Fate, Phase
from router.core.model.tenancy import attracts, may_attract, model_of, namespace_of
from router.core.model.tuning import TUNING


@dataclass(slots=True)
class Inventory:
    """Backends, slots, jobs and snapshots. Owned and changed by the scheduler alone."""

    policy: Policy = field(default_factory=Policy)
    catalog: Catalog = field(default_factory=Catalog)
    backends: dict[BackendId, Backend] = field(default_factory=dict)  # up, or to come back
    up: dict[BackendId, Backend] = field(default_factory=dict)
    slots: SlotTable = field(init=False, repr=False, compare=False)
    _first: int = 0  # generation of the slots of a backend that was never seen
    jobs: dict[RequestId, Job] = field(default_factory=dict)  # the holders of leases
    # Backends that get no new requests: their jobs end, and their slots are saved.
    draining: set[BackendId] = field(default_factory=set)
    sticky: dict[str, SlotId] = field(default_factory=dict)
    # Where the sessions with prompts that the router could not read were served last.
    homes: dict[str, BackendId] = field(default_factory=dict)
    granted: int = 0  # admissions so far, for round robin
    # For each model: uses of its slots, and the number of its slots.
    uses: dict[Namespace, int] = field(default_factory=dict)
    sizes: dict[Namespace, int] = field(default_factory=dict)
    has_tenants: bool = False  # a slot may hold tokens of a tenant
    displaced: GhostList = field(default_factory=GhostList, repr=False, compare=False)
    returns: Returns = field(default_factory=Returns, repr=False, compare=False)
    servers: Servers = field(default_factory=Servers)  # that the router starts and stops

    def __post_init__(self) -> None:
        self.slots = SlotTable(self.backends)

    def serves(self, backend: Backend, request: Request) -> bool:
        """Return whether a backend that is up fits the request and is not draining."""
        return backend.id not in self.draining and backend.fits(request)

    def can_serve(self, backend: BackendId, request: Request) -> bool:
        """Return whether a backend is up, fits the request and is not draining."""
        there = self.up.get(backend)
        return there is not None and self.serves(there, request)

    def taking(self) -> list[BackendInfo]:
        """Return the backends that are up and not draining."""
        return [one.info for name, one in self.up.items() if name not in self.draining]

    def answering(self, model: str | None) -> list[BackendInfo]:
        """Return the backends that are up and have a model, draining ones included; None: any."""
        return [one.info for one in self.up.values() if one.info.answers_to(model)]

    def is_serving(self) -> bool:
        """Return whether a request is prepared or runs, on any backend."""
        return any(isinstance(job, RequestJob) for job in self.jobs.values())

    def serving(self, request: Request) -> Iterator[Backend]:
        """Yield the backends that could serve a request, busy or not."""
        return (backend for backend in self.up.values() if self.serves(backend, request))

    def is_served(self, request: Request) -> bool:
        """Return whether a backend that is up could serve the request, busy or not."""
        return next(self.serving(request), None) is not None

    def info(self, backend: BackendId) -> BackendInfo | None:
        """Return the facts of a backend; None: it is not up."""
        found = self.up.get(backend)
        return None if found is None else found.info

    def is_open(self, backend: Backend, request: Request) -> bool:
        """Return whether the backend could take the request now, if one of its slots is idle.

        The server may place a request on any idle slot, also on one that is being prepared for
        another request. A server-placed request therefore has the backend's idle slots to itself
        until it is known to run (llama-server.md section 2.2). Any slot will do where slots hold
        nothing. A steered request needs the idle slots only when it is sent (`placement_gate.py`).
        """
        if backend.gate.holder is not None or not backend.may_run_more:
            return False
        for first in backend.gate.waiting:
            if holds_up(request, first.request, computed=self.is_computed(first)):
                return False
        claim = self.claim(backend, request)
        if claim is SlotClaim.PINNED:
            return True
        wanted, phases = request.n_slots(backend.info.n_slots), backend.phases
        match claim:
            case SlotClaim.UNMANAGED:  # what it has no slot for waits inside of the server
                return not request.whole_backend or phases[Phase.IDLE] == wanted
            case SlotClaim.SEVERAL if phases[Phase.IDLE] < wanted:
                return False
            case SlotClaim.SEVERAL | SlotClaim.SERVER_PLACED:
                # The slot of an abandoned request may be idle already, and that of another tenant
                # is as soon as its answer ends.
                busy = phases[Phase.PREPARING] + phases[Phase.ABANDONED]
                return not busy and not self._will_attract(backend, request)
            case _:
                return True

    @property
    def gated(self) -> set[BackendId]:
        """Return the backends where a job holds the placement gate."""
        return {name for name, backend in self.up.items() if backend.gate.is_closed}

    def room(self, request: Request, now: float) -> list[Backend]:
        """Return the backends that could take the request now.

        A background request leaves the last slot free where a person was there lately.
        If one of them has room for the whole answer, those that do not are left out.
        """
        hinted = request.slot_hint is not None
        found = [
            backend
            for backend in self.up.values()
            if backend.phases[Phase.IDLE]
            and self.serves(backend, request)
            and self.is_open(backend, request)
            and not (hinted and not backend.free(request))
            and not (request.background and now < backend.kept_free_until(request))
            and (not backend.info.unified or self.has_cells(backend, request))
        ]
        if len(found) < 2:
            return found
        whole = request.prompt.n_tokens + (request.max_new_tokens or 0)
        return [backend for backend in found if backend.info.n_ctx >= whole] or found

    def has_cells(self, backend: Backend, request: Request) -> bool:
        """Return whether unified KV has cells for a request beside those that run.

        If they run out, the server ends all requests (llama-server.md section 3). One that runs
        alone is given all cells.
        """
        busy = [slot for slot in backend.slots if not slot.is_idle]
        taken = sum(self._cells_of(slot) for slot in busy)
        needed = request.prompt.n_tokens + self._answer_cells(backend, request)
        return not busy or taken + needed <= backend.info.n_ctx

    def lacks_cells(self, request: Request) -> list[BackendId]:
        """Return the backends where a request waits for cells of unified KV alone."""
        return [
            backend.id
            for backend in self.serving(request)
            if backend.info.unified and backend.has_idle and not self.has_cells(backend, request)
        ]

    def in_the_way(self, own: Slot, request: Request, held: int) -> list[Slot]:
        """Return idle slots of unified KV, to be emptied for a request in the slot `own`.

        `held`: tokens of the state that it begins with. The server would empty slots by itself, in
        their order; before a restore it does not, and the restore fails.
        """
        backend = own.backend
        others = [slot for slot in backend.slots if slot.id != own.id]
        needed = max(request.prompt.n_tokens, held) + self._answer_cells(backend, request)
        needed += sum(self._cells_of(slot) for slot in others if not slot.is_idle)
        idle = sorted((s for s in others if s.is_idle), key=lambda s: (s.last_used, s.id))
        left = sum(len(slot.content.resident) for slot in idle)
        found = [slot for slot in idle if slot.content.resident.may_hold_more]  # of unknown length
        for slot in idle:
            if needed + left <= backend.info.n_ctx:
                break
            if len(slot.content.resident) and slot not in found:
                found.append(slot)
                left -= len(slot.content.resident)
        return found

    def _cells_of(self, slot: Slot) -> int:
        job = slot.job
        request = job.request if isinstance(job, RequestJob | SlotWatch) else None
        answer = self._answer_cells(slot.backend, request)
        return max(count(slot.work.pending), len(slot.content.resident)) + answer

    def _answer_cells(self, backend: Backend, request: Request | None) -> int:
        """Return the cells that are kept for an answer: not the limit that few answers reach."""
        if request is None:
            return 0
        usual = backend.rates.output_tokens.value
        most = max(TUNING.answer_cells * usual, TUNING.answer_cells_least)
        limit = request.max_new_tokens
        return round(most if limit is None else min(limit, most))

    def has_idle(self, model: str | None) -> bool:
        """Return whether a backend with the model has an idle slot and is not draining."""
        for backend in self.up.values():
            is_idle = backend.phases[Phase.IDLE] and backend.id not in self.draining
            if is_idle and backend.info.answers_to(model):
                return True
        return False

    def kind(self, request: Request) -> Hashable:
        """Return the kind of a request: either all requests of a kind have `room`, or none."""
        prompt = request.prompt
        # Requests with the same number of too short contexts fit the same backends.
        too_short = sum(prompt.n_tokens >= backend.info.n_ctx for backend in self.up.values())
        # Those that need as many cells of unified KV find room in the same.
        cells = any(backend.info.unified for backend in self.up.values())
        # `attracts` compares the tokens of these requests: each is a kind of its own.
        own = self.has_tenants and not request.pinnable and prompt.is_exact
        return (
            request.model,
            request.avoid,
            request.slot_hint,
            request.pinnable,
            request.tasks,
            request.whole_backend,
            request.background,
            request.reuse,
            request.tenant,
            too_short,
            (prompt.n_tokens, request.max_new_tokens) if cells else None,
            request.id
            if own or any(backend.gate.waiting for backend in self.up.values())
            else None,
        )

    def claim(self, backend: Backend, request: Request) -> SlotClaim:
        """Return how a request takes slots of the backend."""
        if request.pinnable and backend.info.is_managed and not request.takes_several:
            return SlotClaim.PINNED  # the usual case
        return slot_claim(request, backend.info, computes_first=self.policy.name.moves_kv)

    def is_computed(self, job: RequestJob) -> bool:
        """Return whether the job's slot has most of its prompt, and steers the server."""
        resident = job.own.content.resident
        return job.claim is SlotClaim.STEERED and resident.covers(job.request.prompt)

    def attracting(self, backend: Backend, request: Request) -> list[Slot]:
        """Return idle slots that another tenant's tokens may make the server pick.

        For server-placed requests. The baseline policies compute no prompt first.
        """
        return [
            slot
            for slot in backend.slots
            if slot.is_idle and may_attract(slot, request, computed_first=self.policy.name.moves_kv)
        ]

    def _will_attract(self, backend: Backend, request: Request) -> bool:
        """Return whether the server may pick another tenant's running slot once it is idle."""
        return any(
            slot.phase is Phase.RUNNING
            and attracts(slot, request, computed_first=self.policy.name.moves_kv)
            for slot in backend.slots
        )

    def is_loaded(self, model: str | None) -> bool:
        """Return whether a server on demand of the model can take requests now."""
        names = [server.name for server in self.servers.of(model)]
        return any(name in self.up and name not in self.draining for name in names)

    def reusable(self, slot: Slot, n_prompt: int, common: int) -> int:
        """Return the prompt tokens that need no computing in a slot that shares `common`.

        Before a probe the most is hoped for: the server itself finds out what a live slot can do.
        A slot that is shorter than its window goes on from a checkpoint (llama-server.md 4.2).
        """
        held, info = slot.content.resident, slot.backend.info
        if info.memory_kind is MemoryKind.FULL:  # the usual case
            return max(min(common, n_prompt - 1), 0)
        kind = MemoryKind.FULL if info.untried else info.memory_kind
        ends = kind is not MemoryKind.SLIDING_WINDOW or len(held) >= slot.backend.outgrown
        return reusable_tokens(
            kind, n_prompt, common, len(held), checkpoints=held.checkpoints, extendable=ends
        )

    def reach(self, slot: Slot) -> int:
        """Return how many of a slot's tokens could be restored from a snapshot.

        The price of displacing any slot depends on this number, which seldom changes.
        """
        content, info, changes = slot.content, slot.backend.info, self.catalog.changes
        known = slot.reached
        if known and known[0] is info and known[1] == changes:
            return known[2]
        namespace = namespace_of(info, content.tenant)
        reach = self.catalog.reach(info.memory_kind, namespace, content.resident.tokens)
        slot.note_reach((info, changes, reach))
        return reach

    def wears(self, backend: Backend) -> bool:
        """Return whether what is saved is written to a disk, and nobody has said when to save."""
        return self.policy.saves_late and backend.info.on_disk

    def reuse_chance(self, keep_s: float, fate: Fate | None) -> float:
        """Return the chance that content is asked for again; `keep_s`: what its client says."""
        return 1.0 if keep_s else self.returns.chance(fate, self.policy.reuse_probability)

    def note_use(self, slot: Slot) -> None:
        """Note that the content of a slot was used just now."""
        model = slot.backend.info.namespace
        self.uses[model] = self.uses.get(model, 0) + 1
        slot.note_use(self.uses[model])

    def neglect(self, slot: Slot) -> float:
        """Return the uses of its model's slots since this slot's last use, per slot."""
        model = slot.backend.info.namespace
        used, n = self.uses.get(model, 0), self.sizes.get(model, 1)
        return max(used - slot.used_no, 0) / max(n, 1)

    def known_namespaces(self) -> set[Namespace]:
        """Return all namespaces that a backend could belong to."""
        held = {model_of(namespace) for namespace in self.catalog.namespaces()}
        return held | {backend.info.namespace for backend in self.up.values()}

    def take(self, info: BackendInfo, rates: Rates) -> Backend:
        """Add a backend that has come up; `rates` are those of one that was never seen."""
        backend = self.backends.setdefault(info.id, Backend(info, rates))
        self.up[info.id] = backend
        self.learn(backend, info)
        backend.attach(info.n_slots, self._first)
        return backend

    def learn(self, backend: Backend, info: BackendInfo) -> None:
        """Take what a backend is now, with its model."""
        backend.come_up(info)
        self._count_slots()

    def _count_slots(self) -> None:
        self.sizes = {}
        for backend in self.up.values():
            model = backend.info.namespace
            self.sizes[model] = self.sizes.get(model, 0) + backend.info.n_slots

    def lose(self, name: BackendId) -> None:
        """Note that a backend is down: nothing that belongs to its process is left."""
        backend = self.up.pop(name, None)
        if backend is not None:
            for slot in backend.slots:
                self.note_displaced(slot)
            backend.lose()
            self._count_slots()

    def forget(self, name: BackendId) -> None:
        """Drop all data of a backend that has left for good."""
        gone = self.backends.pop(name, None)
        used = [] if gone is None else [slot.generation for slot in gone.slots]
        self._first = max([self._first, *used])
        self.up.pop(name, None)
        self._count_slots()
        self.sticky = {key: home for key, home in self.sticky.items() if home.backend != name}
        self.homes = {key: home for key, home in self.homes.items() if home != name}

    def note_home(self, request: Request, backend: BackendId) -> None:
        """Remember where a session was served, if only the server could read its prompt."""
        if request.session is not None and request.prompt.unknown:
            self.homes.pop(request.session.id, None)
            self.homes[request.session.id] = backend
            if len(self.homes) > TUNING.sticky_keys:
                del self.homes[next(iter(self.homes))]

    def note_displaced(self, slot: Slot, kept: int = 0) -> None:
        """Record the tokens of a slot that is about to lose all but `kept` of them.

        Nothing is recorded if a snapshot holds them all.
        """
        tokens = slot.content.resident.tokens
        if count(tokens) > kept and count(tokens) > self.reach(slot):
            self.displaced.add(namespace_of(slot.backend.info, slot.content.tenant), tokens)
