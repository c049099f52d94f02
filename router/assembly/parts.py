"""The first two stages of a router: parts that know no backend, then the watch over backends."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from router.assembly.backends import (
    Backends,
    client_of,
    kv_dir_of,
    secret_of,
    timeouts_of,
    watch_of,
)
from router.assembly.certificates import Certificates
from router.assembly.part_settings import blobs_of
from router.assembly.servers_on_demand import ServersOnDemand
from router.assembly.tokenizer_registry import TokenizerRegistry
from router.base.clock import MonotonicClock, wall_now
from router.base.errors import RouterError
from router.base.tasks import Tasks
from router.base.types import (
    BackendId,
    Namespace,
    Outcome,
    Request,
    RequestRecord,
    Snapshot,
    SnapshotId,
)
from router.config.schema import BackendConfig, Config, TokenizerMode
from router.core.execution.state import State
from router.core.model.plan import Plan
from router.core.model.tenancy import Budget, tenant_of
from router.core.scheduler import Scheduler
from router.engine.engine import Engine, EngineListener
from router.engine.loop_throttle import LoopThrottle
from router.llama.attach.learning import Attached
from router.llama.attach.monitor import BackendListener, Monitor
from router.llama.attach.probe_slots import SlotFolder
from router.llama.client import LlamaClient
from router.llama.replies import Process
from router.llama.server_client import Connections
from router.servers.launch import state_dir
from router.store import purges
from router.store.listener import StoreListener
from router.store.store import KvStore
from router.telemetry.collected import Collected
from router.telemetry.decision_log import DecisionLog
from router.telemetry.metrics import PrometheusTelemetry
from router.telemetry.tier_metrics import BLOBS, tier_metrics
from router.telemetry.usage import UsageBook
from router.web.admin.guard import Guard
from router.web.api.backend_selection import BackendSelection

_CLOCK_MARGIN_S = 1.0  # clocks of files and of this process may differ by so much


@dataclass(slots=True)
class Parts:
    """What does not depend on which backends there are."""

    registry: CollectorRegistry
    clock: MonotonicClock
    throttle: LoopThrottle
    telemetry: PrometheusTelemetry
    decision_log: DecisionLog
    budget: Budget
    usage: UsageBook
    guard: Guard
    certificates: Certificates
    connections: Connections
    store: KvStore
    clients: dict[BackendId, LlamaClient]  # of the present backends
    on_demand: ServersOnDemand
    engine: Engine
    tokenizers: TokenizerRegistry
    tasks: Tasks
    drivers: dict[Process, BackendId]
    memories: list[Callable[[str], None]]  # what forgets a tenant, besides the store and the core


async def parts_of(config: Config, registry: CollectorRegistry, stack: AsyncExitStack) -> Parts:
    """Return the parts, which end with `stack`. Raises StartError."""
    clock = MonotonicClock()
    throttle = LoopThrottle(clock)
    telemetry = PrometheusTelemetry(registry, [backend.name for backend in config.backends])
    guard = Guard(secret_of("admin: token_env", config.admin.token_env))
    certificates = Certificates(config)
    connections = await stack.enter_async_context(Connections())
    kept = config.store
    store = KvStore(
        (),
        wall_now=wall_now,
        fsync=kept.fsync,
        group_access=kept.group_access,
        blobs=blobs_of(config),
        tenant_of=tenant_of,
        purges=_list_of_purges(),
    )
    registry.register(Collected(lambda: tier_metrics(BLOBS, store.tier_status())))
    stack.push_async_callback(store.aclose)
    clients: dict[BackendId, LlamaClient] = {}
    on_demand = ServersOnDemand(config, connections)
    budget = Budget(wall_now, clock.now)
    scheduler = Scheduler(State(budget=budget))
    engine = Engine(scheduler, clients, store, clock, telemetry, throttle, on_demand.supervisor)
    store.listener = _StoreListener(engine)
    stack.push_async_callback(engine.aclose)
    tasks = Tasks()
    stack.push_async_callback(tasks.aclose)
    decision_log = DecisionLog(config.diagnostics.requests, wall_now)
    tokenizers = TokenizerRegistry(config.tokenizer, tasks, engine.state.inventory.is_serving)
    return Parts(
        registry,
        clock,
        throttle,
        telemetry,
        decision_log,
        budget,
        await _usage_of(config, budget, stack),
        guard,
        certificates,
        connections,
        store,
        clients,
        on_demand,
        engine,
        tokenizers,
        tasks,
        {},
        [decision_log.forget, lambda _: tokenizers.forget()],
    )


def _list_of_purges() -> Path | None:
    """Return the list of this user's purges; None: the user has no home."""
    with suppress(RouterError):
        return state_dir() / purges.NAME
    return None


async def _usage_of(config: Config, budget: Budget, stack: AsyncExitStack) -> UsageBook:
    """Return the book of usage, with its file if there is to be one."""
    book = UsageBook(wall_now, budget)
    if config.usage.file is not None:
        await book.open(config.usage.file)
    stack.push_async_callback(book.aclose)
    return book


@dataclass(slots=True)
class Watched:
    """The watch over the backends."""

    backends: Backends
    selection: BackendSelection


def watched_backends(config: Config, parts: Parts, stack: AsyncExitStack) -> Watched:
    """Return the watch over no backend yet; `Backends.configure` begins it."""

    def monitor(backend: BackendConfig, config: Config) -> Monitor:
        key, kv_dir = parts.on_demand.key(backend.name), kv_dir_of(backend, config)
        return Monitor(
            client_of(backend, parts.connections, timeouts_of(config), key),
            folder=None if kv_dir is None else SlotFolder(parts.store, kv_dir),
            extra_models=backend.models,
            max_running=backend.max_running,
            watch=watch_of(config),
            listener=listener,
            drivers=parts.drivers,
        )

    engine, on_demand = parts.engine, parts.on_demand
    backends = Backends(engine, parts.clients, monitor)
    selection = BackendSelection(
        backends.monitors,
        parts.tokenizers.readers,
        engine,
        config.tokenizer.mode is not TokenizerMode.OFF,
        on_demand.lacks_file,
    )
    listener = _backend_listener(parts, selection)
    engine.listener = _engine_listener(parts, backends)
    on_demand.connect(engine, backends)
    # Closed after the monitors: a server that is being asked ends late.
    stack.push_async_callback(on_demand.aclose)
    stack.push_async_callback(backends.aclose)
    return Watched(backends, selection)


def _backend_listener(parts: Parts, selection: BackendSelection) -> BackendListener:
    """Return what follows when a monitor finds something out about its backend."""
    engine, on_demand, tokenizers = parts.engine, parts.on_demand, parts.tokenizers
    inventory = engine.state.inventory

    def up(attached: Attached) -> None:
        on_demand.remember(attached)
        engine.backend_up(attached.info, attached.slots)
        selection.backend_came()

    def down(backend: BackendId) -> None:
        engine.backend_down(backend)
        tokenizers.leave(backend, keep=on_demand.keeps(backend))

    def probed(attached: Attached, kept: frozenset[int]) -> None:
        on_demand.remember(attached)
        if attached.probe.untried:
            engine.probe_put_off(attached.info.id, kept)
        else:
            engine.probed(attached.info, kept)

    def misnamed(name: Namespace, ago_s: float) -> None:
        since = wall_now() - ago_s - _CLOCK_MARGIN_S
        doomed = [
            snapshot.id
            for snapshot, _, _ in inventory.catalog.snapshots()
            if snapshot.namespace == name and snapshot.saved_at >= since
        ]
        parts.tasks.spawn(engine.purge(doomed), name="purge misnamed states")

    def is_in_the_way(backend: BackendId) -> bool:
        # Other servers may share its processor or its card, so one that runs anywhere counts.
        return inventory.is_serving() or selection.is_waited_for(backend)

    return BackendListener(
        up,
        down,
        on_demand.supervisor.fail,
        probed,
        misnamed,
        engine.borrow,
        engine.poll_for_strangers,
        is_in_the_way,
        inventory.known_namespaces,
        tokenizers.prepare,
        on_demand.recall,
        on_demand.settings_of,
    )


def _engine_listener(parts: Parts, backends: Backends) -> EngineListener:
    """Return what follows when a request or a backend ends."""
    usage, log = parts.usage, parts.decision_log

    def over(record: RequestRecord, plan: Plan) -> None:
        log.over(record, plan)
        usage.over(record)

    def abandoned(request: Request) -> None:
        outcome, why = Outcome.CLIENT_GONE, "the client disconnected before its request was sent"
        parts.telemetry.rejected(request.id, outcome, why, request.clients_id, request.caller)
        log.rejected(request.id, outcome, why, request.caller)

    def detached(backend: BackendId) -> None:
        backends.detached(backend)
        parts.tokenizers.leave(backend, keep=parts.on_demand.keeps(backend))

    return EngineListener(over, usage.late, abandoned, detached, backends.prove)


@dataclass(frozen=True, slots=True)
class _StoreListener(StoreListener):
    """Tells the engine what the store finds out about files."""

    engine: Engine

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        self.engine.snapshot_lost(snapshot.id)

    def stored(self, snapshot: Snapshot) -> None:
        self.engine.snapshot_stored(snapshot)

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        return not self.engine.state.inventory.catalog.is_evicted_next(snapshot)

    def alike(self, snapshot: Snapshot) -> Sequence[tuple[SnapshotId, int]]:
        found = self.engine.state.inventory.catalog.alike(snapshot.namespace, snapshot.tokens)
        return [(one.item, one.common) for one in found if one.item != snapshot.id]

    async def found(self, snapshots: list[Snapshot]) -> None:
        await self.engine.snapshots_found(snapshots)
