"""Builds the router from a configuration; the only module that knows all others."""

import asyncio
import gc
import os
import resource
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from router import __version__
from router.assembly.backends import (
    Backends,
    StartError,
    client_of,
    key_of,
    kv_dir_of,
    moves_kv,
    secret_of,
    timeouts_of,
    watch_of,
)
from router.assembly.certificates import Certificates
from router.assembly.hosts import Hosts, hosts_of
from router.assembly.learned_rates import RatesKeeper
from router.assembly.part_settings import (
    known_of,
    limits_of,
    memory_of_machine,
    policy_of,
    queue_limits_of,
    servers_of,
    take_settings,
)
from router.assembly.reactions import BackendReactions, EngineReactions, StoreReactions
from router.assembly.reload import Reload
from router.assembly.servers_on_demand import ServersOnDemand, kv_dir_of_servers
from router.assembly.slot_journal import SlotJournal
from router.assembly.tokenizer_registry import TokenizerRegistry
from router.base.clock import MonotonicClock, wall_now
from router.base.errors import RouterError
from router.base.ports import Tracing
from router.base.tasks import Tasks, spawn
from router.base.types import BackendId, Standing, Stats
from router.base.urls import authority
from router.config import values
from router.config.open_doors import open_doors
from router.config.schema import Address, BackendConfig, Config, TokenizerMode
from router.core.execution.state import State
from router.core.model import events as ev
from router.core.scheduler import Scheduler
from router.engine.engine import Engine
from router.engine.loop_throttle import LoopThrottle
from router.llama.attach.drivers import Drivers
from router.llama.attach.monitor import Monitor
from router.llama.client import LlamaClient
from router.llama.server_client import Connections
from router.store.store import KvStore
from router.telemetry.backend_metrics import BackendMetrics
from router.telemetry.decision_log import DecisionLog
from router.telemetry.engine_collector import EngineCollector
from router.telemetry.logs import set_level
from router.telemetry.metrics import PrometheusTelemetry
from router.telemetry.process_metrics import Vitals
from router.web.admin.actions import OperatorActions
from router.web.admin.guard import Guard
from router.web.admin.live import Live, Subject
from router.web.admin.page import load_page
from router.web.admin.requests import Requests
from router.web.admin.routes import Audience
from router.web.admin.servers import ServerRoutes
from router.web.admin.snapshots import Snapshots
from router.web.admin.state_json import picture_of, survey
from router.web.admin.status import StatusRoutes
from router.web.admin.table import own_routes
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.api.completions import Completions
from router.web.api.elsewhere import Elsewhere, Nowhere
from router.web.api.forwarding import Forwarding
from router.web.api.passing import Passing
from router.web.api.peer_routes import PeerRoutes
from router.web.api.reports import Reports
from router.web.api.sending import Sender
from router.web.api.suspects import Suspects
from router.web.app import App, OtherHosts
from router.web.server.settings import Settings

log = structlog.get_logger(__name__)

# For answers still under way when everything else has stopped.
_CLOSE_S = 1.0


@dataclass(slots=True)
class Router:
    """A running router, without its listening sockets.

    `admin_url`: the operators' address; None while it is closed, or if it is the clients' address.
    """

    app: App
    engine: Engine
    selection: BackendSelection
    live: Live
    reload: Reload
    store: KvStore
    journal: SlotJournal
    rates: RatesKeeper
    certificates: Certificates
    hosts: Hosts | None = None
    admin_url: str | None = None

    @property
    def config(self) -> Config:
        """Return the configuration in force."""
        return self.reload.config

    async def stop(self) -> None:
        """Let running requests end and save slots where that pays, within `shutdown_grace`.

        Until the requests here are over, other hosts serve new ones; then new ones are refused, and
        the forwarded ones end.
        """
        grace_s = self.config.shutdown_grace_s
        self.selection.stop()
        try:
            async with asyncio.timeout(grace_s):
                await self.engine.stop(save=self.config.store.save_on_shutdown)
                for backend in tuple(self.engine.infos):
                    await self.journal.flush(backend, await self.engine.seen_of(backend))
                await self.rates.save()
                await self.selection.until_quiet()
                if self.hosts is not None:
                    self.hosts.peers.close()
                    await self.hosts.peers.until_quiet()
        except TimeoutError:
            log.warning("stopped_with_requests_running", grace_s=grace_s)


@asynccontextmanager
async def build(
    config: Config,
    registry: CollectorRegistry | None = None,
    path: Path | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[Router]:
    """Yield a router that watches its backends; stop on exit all that was started.

    `path`: the file of the configuration, which a reload reads again. `tracing`: replaces the
    configured one.

    Raises StartError, or KvError if a kv_dir cannot be used.
    """
    registry = registry or CollectorRegistry()
    clock = MonotonicClock()
    throttle = LoopThrottle(clock)
    telemetry = PrometheusTelemetry(registry, [backend.name for backend in config.backends])
    guard = Guard(secret_of("admin: token_env", config.admin.token_env))
    certificates = Certificates(config)
    decision_log = DecisionLog(config.diagnostics.requests, wall_now)
    async with AsyncExitStack() as stack:
        if tracing is None and config.tracing.endpoint is not None:
            tracing = await _exporting(config.tracing.endpoint, stack)
        connections = await stack.enter_async_context(Connections())
        store = KvStore(
            (),
            wall_now=wall_now,
            fsync=config.store.fsync,
            group_access=config.store.group_access,
        )
        stack.push_async_callback(store.aclose)
        clients: dict[BackendId, LlamaClient] = {}

        on_demand = ServersOnDemand(config, connections)
        engine = Engine(
            Scheduler(State()),
            clients,
            store,
            clock,
            telemetry,
            throttle,
            on_demand,
        )
        store.listener = StoreReactions(engine)
        stack.push_async_callback(engine.aclose)
        tasks = Tasks()
        stack.push_async_callback(tasks.aclose)
        tokenizers = TokenizerRegistry(config.tokenizer, tasks)

        drivers = Drivers(clock.now)

        def monitor(backend: BackendConfig, config: Config) -> Monitor:
            return Monitor(
                client_of(backend, connections, timeouts_of(config), on_demand.key(backend.name)),
                kv_dir=kv_dir_of(backend, config),
                store=store,
                extra_models=backend.models,
                watch=watch_of(config),
                listener=reactions,
                drivers=drivers,
            )

        def stats() -> Stats:
            known, leaving = engine.stats(), (Standing.DRAINING, Standing.DRAINED)
            return replace(
                known,
                queue_depth=known.queue_depth + selection.waiting,
                backends=tuple(
                    replace(one, drained=selection.standing(one.backend) in leaving)
                    for one in known.backends
                ),
            )

        backends = Backends(engine, clients, monitor)
        journal = SlotJournal(backends.monitors, store, tasks.spawn)
        selection = BackendSelection(
            backends.monitors,
            tokenizers.readers,
            engine,
            reads_prompts=config.tokenizer.mode is not TokenizerMode.OFF,
        )
        reactions = BackendReactions(engine, selection, tokenizers, on_demand, journal, tasks)
        engine.listener = EngineReactions(
            telemetry, decision_log, journal, backends, tokenizers, on_demand
        )
        on_demand.connect(engine, backends)
        # Closed after the monitors: a server that is being asked ends late.
        stack.push_async_callback(on_demand.supervisor.aclose)
        stack.push_async_callback(backends.aclose)
        settings, memory_bytes = Settings(), await asyncio.to_thread(memory_of_machine)
        keys = Keys(telemetry)

        async def take(wanted: Config) -> None:
            """Put a configuration in force. All steps that can fail come first."""
            for backend in wanted.backends:
                key_of(backend)
            kv_dirs = [kv_dir_of(backend, wanted) for backend in wanted.backends]
            await on_demand.prepare()
            kv_dirs.append(kv_dir_of_servers(wanted) if moves_kv(wanted) else None)
            await certificates.take(wanted)
            found = await store.add([kv_dir for kv_dir in kv_dirs if kv_dir is not None])
            engine.tell(
                ev.Configured(policy_of(wanted), limits_of(wanted), queue_limits_of(wanted))
            )
            take_settings(settings, wanted, memory_bytes)
            keys.known = known_of(wanted)
            has_keys = bool(wanted.auth.keys)
            guard.protects_reads = wanted.admin.protects_reads(has_keys=has_keys)
            set_level(wanted.logging.level)
            for door in open_doors(wanted):
                log.warning("open_door", what=door.what, remedy=door.remedy)
            await rates.load()
            await engine.snapshots_found(found)
            backends.configure(wanted)

        rates = RatesKeeper(store, engine)
        await take(config)
        tasks.supervise(rates.run, name="rates")
        engine.tell(servers_of(config))
        tasks.supervise(on_demand.supervisor.watch_logs, name="logs of servers")
        reload = Reload(path, config, take, tasks.spawn)
        registry.register(EngineCollector(stats, lambda: tuple(engine.infos.values())))
        subject = Subject(
            picture=lambda: picture_of(
                engine, selection, clock.now(), None if hosts is None else hosts.view
            ),
            n_snapshots=lambda: engine.view.store.n_snapshots,
            survey=lambda: survey(engine.view.snapshots()),
            decisions=decision_log.recent,
        )
        live = Live(subject, tasks.spawn, wall_now, guard.may_read)
        hosts = await stack.enter_async_context(
            hosts_of(config, engine, selection, keys, registry, clock, drivers)
        )
        others, suspects = None, Suspects(clock.now)
        elsewhere: Elsewhere = Nowhere()
        if hosts is not None:
            certificates.credentials = hosts.credentials
            elsewhere = Forwarding(
                hosts.name,
                hosts.peers,
                hosts.directory,
                hosts.held,
                engine,
                selection,
                keys,
                settings,
                throttle,
                decision_log,
                hosts.metrics,
                suspects,
            )
            routes = PeerRoutes(hosts.hello, engine, selection, hosts.held)
            others = OtherHosts(hosts.name, routes, hosts.metrics)
        reports = Reports(engine, decision_log, tasks.spawn)
        sender = Sender(engine, selection, suspects, settings, throttle, reports)
        completions = Completions(
            engine, selection, sender, settings, keys, suspects, elsewhere, tracing
        )
        status = StatusRoutes(
            engine,
            selection,
            completions,
            registry,
            BackendMetrics(clients, registry),
            clock.now,
            None if hosts is None else hosts.view,
        )
        app = App(
            keys=keys,
            completions=completions,
            passing=Passing(selection, settings, throttle, elsewhere),
            own=own_routes(
                guard,
                status,
                OperatorActions(guard, selection, backends, reload),
                ServerRoutes(engine, guard, on_demand.supervisor, clock.now),
                Snapshots(engine, guard, clock.now, wall_now, journal.erase),
                Requests(decision_log, selection, show_content=config.diagnostics.show_content),
                live,
                await asyncio.to_thread(load_page),
            ),
            decision_log=decision_log,
            telemetry=telemetry,
            settings=settings,
            throttle=throttle,
            hosts=others,
        )
        vitals = Vitals(
            registry, clock, lambda: store.kv_dirs, __version__, lambda: certificates.ends
        )
        tasks.supervise(vitals.watch_loop, name="event loop lag")
        tasks.supervise(vitals.watch_disks, name="room on disk")
        stack.callback(throttle.open)
        yield Router(
            app, engine, selection, live, reload, store, journal, rates, certificates, hosts
        )


async def _exporting(endpoint: str, stack: AsyncExitStack) -> Tracing:
    """Return tracing to `endpoint`. Raises StartError if the SDK, an extra, is missing."""
    try:
        from router.telemetry.tracing import exporting
    except ModuleNotFoundError as error:
        raise StartError("tracing: endpoint needs `pip install 'kvferry[otel]'`") from error
    made = await asyncio.to_thread(exporting, endpoint)  # blocking: it inspects this machine
    stack.push_async_callback(made.aclose)
    return made


@asynccontextmanager
async def listening(router: Router) -> AsyncIterator[str]:
    """Serve on the configured addresses; yield the clients' URL.

    Raises StartError if an address cannot be used.
    """
    config = router.config
    own = config.admin.listen
    async with AsyncExitStack() as stack:
        if own is not None:
            address = _address(
                router, own, Audience.OPERATORS, "admin: listen", router.certificates.context
            )
            router.admin_url = await stack.enter_async_context(address)
        if (for_peers := config.fleet.listen) is not None and router.hosts is not None:
            context = router.hosts.credentials.server
            key = "fleet: listen (--peer-listen)"
            address = _address(router, for_peers, Audience.PEERS, key, context)
            where = values.url_address(await stack.enter_async_context(address))
            router.hosts.address.listens(for_peers.host, where.port)
        side = Audience.ALL if own is None else Audience.CLIENTS
        address = _address(
            router, config.listen, side, "listen (--listen)", router.certificates.context
        )
        url = await stack.enter_async_context(address)
        # Last in, first out: an open live page must not delay the shutdown.
        stack.callback(router.live.stop)
        yield url


@asynccontextmanager
async def _address(
    router: Router, address: Address, side: Audience, key: str, context: ssl.SSLContext | None
) -> AsyncIterator[str]:
    listener = router.app.listener(side)
    handshake_s = router.config.limits.header_timeout_s
    try:
        server = await asyncio.get_running_loop().create_server(
            listener,
            address.host,
            address.port,
            backlog=1024,
            ssl=context,
            ssl_handshake_timeout=None if context is None else handshake_s,
        )
    except OSError as error:
        raise StartError(f"{key}: {error.strerror or error}; choose another HOST:PORT") from error
    try:
        host, port = server.sockets[0].getsockname()[:2]
        scheme = "http" if context is None else "https"
        yield f"{scheme}://{authority(host, port)}"
    finally:
        server.close()
        try:
            listener.throttle.open()  # else waiting connections would be closed as idle
        finally:
            listener.pre_shutdown()
            await listener.shutdown(_CLOSE_S)


async def serve(config: Config, path: Path | None = None) -> None:
    """Run until SIGINT or SIGTERM; a second signal ends the process at once.

    SIGHUP reads `path` again, or ends the router if there is none.
    """
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    _allow_descriptors()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    asked = asyncio.Event()
    # Before anything that takes long: an unhandled SIGHUP would end the process. Without a file,
    # SIGHUP means that the terminal was closed.
    loop.add_signal_handler(signal.SIGHUP, stop if path is None else asked.set)
    async with build(config, path=path) as router, listening(router) as url:
        rereading = spawn(_reread(router, asked), name="reload")
        _calm_garbage_collector()
        own = {} if router.admin_url is None else {"admin_url": router.admin_url}
        log.info(
            "listening", url=url, **own, policy=config.policy.name, backends=len(config.backends)
        )
        await stopping.wait()
        log.info("stopping", grace_s=router.config.shutdown_grace_s)
        rereading.cancel()
        await router.stop()
    if router.store.works:
        log.warning("stopped_with_a_hanging_kv_dir")
        os._exit(0)  # the interpreter would wait for the thread


async def _reread(router: Router, asked: asyncio.Event) -> None:
    while True:
        await asked.wait()
        asked.clear()
        with suppress(RouterError):  # the reload has logged it
            await router.reload()


def _allow_descriptors() -> None:
    """Raise the limit of open files as far as allowed.

    Each client takes two, and 1,024 are a usual default.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may have a lower limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _calm_garbage_collector() -> None:
    """Make garbage collections rare, and freeze the objects that exist by now.

    A request makes more objects than Python's default of 700, so each request would pay for
    collections that find nothing. The cost was seen in a loop over the router's own steps; in
    `bench.latency` the difference is within the noise. A collection stops everything: one of 50,000
    objects took 20 to 40 ms of CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 100, 100)
