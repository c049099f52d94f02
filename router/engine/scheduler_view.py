"""The read model: what the web layer, the console and the simulator see of the scheduler.

Gives copies of facts and never an object of the scheduler that can be changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType

from router.base.prefix_hash import BLOCK
from router.base.tokens import Tokens, count, head
from router.base.types import (
    NO_TENANT,
    BackendId,
    BackendInfo,
    MemoryKind,
    Namespace,
    Request,
    RequestId,
    SlotId,
    Snapshot,
    SnapshotId,
    Source,
    Tenant,
)
from router.core.execution.state import State
from router.core.hosts.handout import once_fetched
from router.core.model.backend import LeaseHolder, Slot
from router.core.model.jobs import (
    AtGate,
    CutStep,
    DispatchStep,
    EraseStep,
    InPrefillQueue,
    PrefillStep,
    RequestJob,
    RestoreStep,
    SaveJob,
    SaveStep,
    SlotWatch,
    Step,
)
from router.core.model.memory_kinds import goes_back
from router.core.model.plan import Offered, Quote
from router.core.model.policy import PolicyName
from router.core.model.prefix_index import Match
from router.core.model.request_queue import QueueLimits
from router.core.model.servers import ServerPhase
from router.core.model.slots import Phase
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.stats import waiting_for

_DOING: dict[type[Step | InPrefillQueue | AtGate], str] = {
    SaveStep: "save",
    CutStep: "cut",
    EraseStep: "erase",
    RestoreStep: "restore",
    PrefillStep: "prefill",
    InPrefillQueue: "prefill queue",
    AtGate: "placement gate",
    DispatchStep: "answer",
}


NOT_BEGUN: Mapping[RequestId, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot now, with what its job does.

    `doing` is a step, `prefill queue`, `placement gate`, or `answer`. `source` and `copy_from` are
    the plan's. `pending_tokens` is what the slot will hold after the step. `prefilled`: the
    share of a prompt that the router computes there, as the server told last. `tenant`: of what it
    holds; `owner`: of what runs there, if anything does.
    """

    id: SlotId
    phase: Phase
    request: RequestId | None
    resident_tokens: int
    unread_tokens: int
    tenant: Tenant
    pending_tokens: int
    last_used: float
    doing: str | None
    source: Source | None
    copy_from: SlotId | None
    prefilled: float | None = None
    owner: Tenant = NO_TENANT


@dataclass(frozen=True, slots=True)
class WaitingView:
    """A queued request: since when, in clock seconds, and the length of its prompt."""

    request: RequestId
    since: float
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ServerView:
    """A server on demand: its phase since when, in clock seconds, and why it ended by itself.

    `waiting` counts the requests for its model that wait. `load_s`: what loading usually takes;
    None: it was not loaded yet. `n_ctx`: of a slot, and `n_slots`, as configured; 0: not known.
    """

    name: BackendId
    models: tuple[str, ...]
    phase: ServerPhase
    since: float
    idle_since: float
    waiting: int
    problem: str
    failures: int
    retry_at: float
    load_s: float | None
    n_ctx: int = 0
    n_slots: int = 0


@dataclass(frozen=True, slots=True)
class StoreView:
    """Totals of all usable snapshots, and their limits (-1: none)."""

    n_snapshots: int
    total_bytes: int
    total_tokens: int
    evicted: int
    max_bytes: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RatesView:
    """Learned rates of a backend: tokens per second, bytes, and seconds for 1,000 tokens."""

    prefill_tokens_per_s: float
    output_tokens_per_s: float
    save_1000_tokens_s: float
    restore_1000_tokens_s: float
    bytes_per_token: float


def slot_view(slot: Slot, done: Mapping[RequestId, int] = NOT_BEGUN) -> SlotView:
    """Return the view of a slot. `done`: tokens of prompts that are being computed."""
    job = slot.job
    plan = job.plan if isinstance(job, RequestJob | SlotWatch) else None
    chosen = plan.chosen if plan is not None else None
    return SlotView(
        id=slot.id,
        phase=slot.phase,
        request=slot.holder,
        resident_tokens=len(slot.content.resident),
        unread_tokens=slot.content.resident.unread,
        tenant=slot.content.tenant,
        pending_tokens=count(slot.work.pending),
        last_used=slot.last_used,
        doing=_doing(slot, job),
        source=chosen.source if chosen else None,
        copy_from=chosen.copy_from if chosen else None,
        prefilled=_prefilled(job, done),
        owner=slot.offered_tenant,
    )


def _prefilled(job: LeaseHolder | None, done: Mapping[RequestId, int]) -> float | None:
    if not isinstance(job, RequestJob) or job.id not in done:
        return None
    return min(done[job.id] / max(job.request.prompt.n_tokens, 1), 1.0)


def _doing(slot: Slot, job: LeaseHolder | None) -> str | None:
    if isinstance(job, SaveJob):
        return _DOING[SaveStep]
    if not isinstance(job, RequestJob) or job.doing is None:
        return None
    worked_on = job.doing.slot if isinstance(job.doing, SaveStep | EraseStep) else job.slot
    return _DOING[type(job.doing)] if worked_on == slot.id else None


class SchedulerView:
    """The scheduler's state at the moment of each call."""

    def __init__(self, state: State, done: Mapping[RequestId, int] = NOT_BEGUN) -> None:
        """Set up the view. `done`: as for `slot_view`; it may change."""
        self._state = state
        self._done = done

    @property
    def policy(self) -> PolicyName:
        """Return the name of the policy in force."""
        return self._state.inventory.policy.name

    def saved_tokens(self, backend: BackendId, request: Request) -> int:
        """Return how many tokens of a prompt a snapshot for this backend can give back.

        0 if less than nearly all, for a memory kind that can go back: such a state is another's.
        """
        info = self._state.inventory.info(backend)
        if info is None:
            return 0
        namespace, tokens = namespace_of(info, request.tenant), request.prompt.tokens
        reach = self._state.inventory.catalog.reach(info.memory_kind, namespace, tokens)
        return 0 if goes_back(info.memory_kind) and reach < count(tokens) - 1 else reach

    def kept(self) -> list[tuple[Snapshot, int]]:
        """Return the snapshots that are kept for good, each with its uses."""
        return self._state.inventory.catalog.kept_for_good()

    @property
    def is_stopping(self) -> bool:
        """Return whether no more requests are admitted."""
        return self._state.stopping

    @property
    def has_jobs(self) -> bool:
        """Return whether a slot is leased."""
        return bool(self._state.inventory.jobs)

    @property
    def queue_limits(self) -> QueueLimits:
        """Return the limits of the queue in force."""
        return self._state.queue.limits

    @property
    def store(self) -> StoreView:
        """Return the totals of the snapshots."""
        catalog = self._state.inventory.catalog
        limits = catalog.limits
        return StoreView(
            n_snapshots=len(catalog),
            total_bytes=catalog.total_bytes,
            total_tokens=catalog.total_tokens,
            evicted=catalog.evicted,
            max_bytes=limits.max_bytes,
            max_tokens=limits.max_tokens,
        )

    def slots(self) -> list[SlotView]:
        """Return all slots, in the order of their ids."""
        return [slot_view(slot, self._done) for slot in self._state.inventory.slots]

    def slot_of(self, request: RequestId) -> SlotId:
        """Return the slot that a request holds. Raises KeyError if it holds none."""
        return self._state.inventory.jobs[request].slot

    def queue(self) -> list[WaitingView]:
        """Return the queued requests, the oldest first."""
        return [
            WaitingView(waiting.request.id, waiting.since, waiting.request.prompt.n_tokens)
            for waiting in self._state.queue
        ]

    def servers(self) -> list[ServerView]:
        """Return the servers on demand, in the order of the configuration."""
        return [
            ServerView(
                name=server.name,
                models=server.spec.models,
                phase=server.phase,
                since=server.since,
                idle_since=server.idle_since,
                waiting=waiting_for(self._state, server),
                problem=server.problem,
                failures=server.failures,
                retry_at=server.retry_at,
                load_s=server.load_s.value if server.load_s.n else None,
                n_ctx=server.spec.n_ctx,
                n_slots=server.spec.n_slots,
            )
            for server in self._state.inventory.servers
        ]

    @property
    def server_models(self) -> list[frozenset[str]]:
        """Return the names of each model that has servers on demand."""
        servers = self._state.inventory.servers.by_name.values()
        return [frozenset(names) for names in {server.spec.models: None for server in servers}]

    @property
    def server_swaps(self) -> int:
        """Return how often a model was stopped for another."""
        return self._state.inventory.servers.swaps

    def is_loaded(self, model: str | None) -> bool:
        """Return whether a server on demand of the model can take requests now."""
        return self._state.inventory.is_loaded(model)

    def takes_requests(self, now: float) -> bool:
        """Return whether requests for some server on demand may wait for it, or are served."""
        return any(server.may_serve(now) for server in self._state.inventory.servers)

    def is_on_demand(self, model: str | None) -> bool:
        """Return whether a server for the model can be started."""
        return bool(self._state.inventory.servers.of(model))

    def slot_tenants(self) -> set[Tenant]:
        """Return the tenants of what slots have."""
        return {slot.content.tenant for slot in self._state.inventory.slots}

    def snapshots(self) -> list[tuple[Snapshot, int, int]]:
        """Return every usable snapshot with its uses and references."""
        return self._state.inventory.catalog.snapshots()

    def used_at(self, snapshot: SnapshotId) -> float | None:
        """Return when a snapshot was last restored, in clock seconds; None: not yet."""
        return self._state.inventory.catalog.used_at(snapshot)

    def rates(self, backend: BackendId) -> RatesView:
        """Return the learned rates of a backend. Raises KeyError."""
        rates = self._state.inventory.backends[backend].rates
        return RatesView(
            prefill_tokens_per_s=rates.speeds.prefill_tokens,
            output_tokens_per_s=rates.speeds.output_tokens,
            save_1000_tokens_s=rates.save_s(1000),
            restore_1000_tokens_s=rates.restore_s(round(1000 * rates.bytes_per_token.value)),
            bytes_per_token=rates.bytes_per_token.value,
        )

    @property
    def is_serving(self) -> bool:
        """Return whether a request is prepared or runs, on any backend."""
        return any(isinstance(job, RequestJob) for job in self._state.inventory.jobs.values())

    def is_waited_for(self, backend: BackendId) -> bool:
        """Return whether a queued request could be served by a slot more of the backend."""
        inventory, queue = self._state.inventory, self._state.queue
        there = inventory.up.get(backend)
        if there is None:
            return bool(queue)
        oldest = islice(queue, TUNING.checked_for_backend)
        return any(inventory.serves(there, waiting.request) for waiting in oldest)

    def limit(self, backend: BackendId) -> str | None:
        """Return why a backend does less than its probe showed; None: it does not."""
        known = self._state.inventory.backends.get(backend)
        if known is None:
            return None
        if not known.may_write:
            return f"no state is written for a while, after failures: {known.backoff.reason}"
        return known.limited or None

    def serves(self, backend: BackendId, request: Request) -> bool:
        """Return whether a backend is up, fits the request and is not draining."""
        there = self._state.inventory.up.get(backend)
        return there is not None and self._state.inventory.serves(there, request)

    def up(self) -> list[BackendInfo]:
        """Return the backends that are up and not draining."""
        inventory = self._state.inventory
        return [one.info for name, one in inventory.up.items() if name not in inventory.draining]

    def once_fetched(
        self, request: Request, own: Quote, offered: Offered, seconds: Callable[[int], float]
    ) -> Quote | None:
        """Return the quote of a request that fetches `offered` first; see `handout.py`."""
        return once_fetched(request, self._state.inventory, own, offered, seconds)

    def most_valuable(self) -> list[SnapshotId]:
        """Return all usable snapshots, those first that save most seconds for their bytes."""
        return self._state.inventory.catalog.most_valuable()

    def is_being_saved(self, slot: SlotId) -> bool:
        """Return whether a slot is being saved, or will be when its prefill is over."""
        slots = self._state.inventory.slots.of(slot.backend)
        return slot.index < len(slots) and bool(
            slots[slot.index].work.saving or slots[slot.index].work.for_host
        )

    def snapshot(self, name: SnapshotId) -> Snapshot | None:
        """Return a usable snapshot. None: it is gone."""
        catalog = self._state.inventory.catalog
        if name not in catalog:
            return None
        return catalog[name]

    def equal(self, longer: Snapshot, n_tokens: int) -> SnapshotId | None:
        """Return the snapshot of just the first tokens of another one. None: there is none."""
        tokens = head(longer.tokens, n_tokens)
        return self._state.inventory.catalog.equal(longer.namespace, tokens)

    def kind_of(self, snapshot: SnapshotId) -> MemoryKind:
        """Return the memory kind that a snapshot was saved as."""
        return self._state.inventory.catalog.kind_of(snapshot)

    def alike(self, namespace: Namespace, tokens: Tokens) -> list[Match[SnapshotId]]:
        """Return the snapshots that share most with `tokens`, a block at least, the best first."""
        catalog = self._state.inventory.catalog
        return [one for one in catalog.match(namespace, tokens, limit=3) if one.common >= BLOCK]

    def known_namespaces(self) -> set[Namespace]:
        """Return all namespaces that a backend could belong to."""
        return self._state.inventory.known_namespaces()
