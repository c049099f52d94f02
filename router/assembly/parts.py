"""The first two stages of a router: parts that know no backend, then the watch over backends."""

from collections.abc import Callable
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
from router.assembly.reactions import BackendReactions, EngineReactions, StoreReactions
from router.assembly.servers_on_demand import ServersOnDemand
from router.assembly.tokenizer_registry import TokenizerRegistry
from router.base.clock import MonotonicClock, wall_now
from router.base.errors import RouterError
from router.base.tasks import Tasks
from router.base.types import BackendId
from router.config.schema import BackendConfig, Config, TokenizerMode
from router.core.execution.state import State
from router.core.model.tenancy import Budget, tenant_of
from router.core.scheduler import Scheduler
from router.engine.engine import Engine
from router.engine.loop_throttle import LoopThrottle
from router.llama.attach.monitor import Monitor
from router.llama.attach.probe_slots import SlotFolder
from router.llama.client import LlamaClient
from router.llama.replies import Process
from router.llama.server_client import Connections
from router.servers.launch import state_dir
from router.store import purges
from router.store.store import KvStore
from router.telemetry.decision_log import DecisionLog
from router.telemetry.metrics import PrometheusTelemetry
from router.telemetry.tier_metrics import BLOBS, TierCollector
from router.telemetry.usage import UsageBook
from router.web.admin.guard import Guard
from router.web.api.backend_selection import BackendSelection


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
    TierCollector(registry, BLOBS, store.tier_status)
    stack.push_async_callback(store.aclose)
    clients: dict[BackendId, LlamaClient] = {}
    on_demand = ServersOnDemand(config, connections)
    budget = Budget(wall_now, clock.now)
    scheduler = Scheduler(State(budget=budget))
    engine = Engine(scheduler, clients, store, clock, telemetry, throttle, on_demand.supervisor)
    store.listener = StoreReactions(engine)
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
            listener=reactions,
            drivers=parts.drivers,
        )

    engine, on_demand, tasks = parts.engine, parts.on_demand, parts.tasks
    backends = Backends(engine, parts.clients, monitor)
    selection = BackendSelection(
        backends.monitors,
        parts.tokenizers.readers,
        engine,
        config.tokenizer.mode is not TokenizerMode.OFF,
        on_demand.lacks_file,
    )
    reactions = BackendReactions(engine, selection, parts.tokenizers, on_demand, tasks)
    engine.listener = EngineReactions(
        parts.telemetry, parts.decision_log, parts.usage, backends, parts.tokenizers, on_demand
    )
    on_demand.connect(engine, backends)
    # Closed after the monitors: a server that is being asked ends late.
    stack.push_async_callback(on_demand.aclose)
    stack.push_async_callback(backends.aclose)
    return Watched(backends, selection)
