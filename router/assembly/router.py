"""Builds the router from a configuration; the only module that knows all others."""

import asyncio
import errno
import gc
import os
import resource
import signal
import ssl
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from router import __version__
from router.assembly.backends import StartError
from router.assembly.certificates import Certificates
from router.assembly.hosts import Hosts, cold_of, hosts_of
from router.assembly.in_force import InForce
from router.assembly.part_settings import memory_of_machine, servers_of
from router.assembly.parts import Parts, parts_of, watched_backends
from router.assembly.reload import Reload
from router.assembly.web import Stages, app_of, live_of
from router.base.errors import RouterError
from router.base.ports import Tracing
from router.base.tasks import in_thread, spawn, within
from router.base.types import KvDir
from router.base.urls import authority
from router.config import values
from router.config.schema import NO_FLAGS, Address, Config, StoreConfig
from router.engine.engine import Engine
from router.store import room
from router.store.cold.tier import ColdTier
from router.store.store import KvStore
from router.telemetry.collected import Collected
from router.telemetry.engine_collector import EngineCollector, tenant_metrics
from router.telemetry.process_metrics import Vitals
from router.telemetry.tier_metrics import COLD, tier_metrics
from router.web.admin.live import Live
from router.web.admin.routes import Audience
from router.web.api.backend_selection import BackendSelection
from router.web.app import App
from router.web.server.inbound import PRIVATE

log = structlog.get_logger(__name__)

# For answers still under way when everything else has stopped.
_CLOSE_S = 1.0
_THREADS_END_S = 5.0


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
    certificates: Certificates
    hosts: Hosts | None = None
    cold: ColdTier | None = None
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
    flags: Mapping[str, object] = NO_FLAGS,
) -> AsyncIterator[Router]:
    """Yield a router that watches its backends; stop on exit all that was started.

    `path`: the file of the configuration, which a reload reads again, with the `flags` that win
    over it. `tracing`: replaces the configured one.

    Raises StartError, or KvError if a kv_dir cannot be used.
    """
    async with AsyncExitStack() as stack:
        if tracing is None and config.tracing.endpoint is not None:
            tracing = await _exporting(config.tracing.endpoint, stack)
        parts = await parts_of(config, registry or CollectorRegistry(), stack)
        tasks, engine = parts.tasks, parts.engine
        watched = watched_backends(config, parts, stack)
        in_force = InForce(parts, watched, await asyncio.to_thread(memory_of_machine))
        await in_force.take(config)
        tasks.supervise(parts.usage.run, name="usage")
        engine.configure_servers(*servers_of(config))
        tasks.supervise(parts.on_demand.supervisor.watch_logs, name="logs of servers")
        reload = Reload(path, config, in_force.take, tasks.spawn, flags)
        selection = watched.selection
        gauges = EngineCollector(
            engine.state, parts.clients, selection.standing, lambda: selection.waiting
        )
        parts.registry.register(gauges)
        parts.registry.register(Collected(partial(tenant_metrics, parts.usage)))
        joined = hosts_of(
            config,
            engine,
            watched.selection,
            in_force.keys,
            parts.registry,
            parts.clock,
            lambda: parts.store.purges.digest,
        )
        hosts = await stack.enter_async_context(joined)
        if hosts is not None:
            parts.certificates.credentials = hosts.credentials
        cold = await cold_of(config.cold, engine, parts.store, parts.memories)
        if cold is not None:
            stack.push_async_callback(cold.aclose)
            parts.registry.register(Collected(lambda: tier_metrics(COLD, cold.status())))
            cold.start()
        made = Stages(config, parts, watched, in_force, reload, hosts, cold, tracing)
        live = live_of(made)
        app = await app_of(made, live)
        vitals = Vitals(
            parts.registry,
            parts.clock,
            lambda: parts.store.kv_dirs,
            __version__,
            lambda: parts.certificates.ends,
        )
        tasks.supervise(vitals.watch_loop, name="event loop lag")
        tasks.supervise(vitals.watch_disks, name="room on disk")
        if config.store.min_free_bytes:
            tasks.supervise(partial(_watch_room, parts, config.store), name="min_free")
        stack.callback(parts.throttle.open)
        yield Router(
            app,
            engine,
            watched.selection,
            live,
            reload,
            parts.store,
            parts.certificates,
            hosts,
            cold,
        )


async def _watch_room(parts: Parts, config: StoreConfig) -> None:
    """Let the scheduler evict snapshots while their disk has less room than it should."""

    def places() -> tuple[KvDir, ...]:
        return parts.store.kv_dirs if config.blobs is None else (KvDir(str(config.blobs)),)

    await room.watch(places, config.min_free_bytes, parts.engine.room_found)


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
    handshake_s = None if context is None else router.config.limits.header_timeout_s
    loop = asyncio.get_running_loop()
    bound = 0
    try:
        if address.is_socket:
            await _check_unused(address.host)
            listen = partial(loop.create_unix_server, listener, address.host)
        else:
            listen = partial(loop.create_server, listener, address.host, address.port)
        server = await listen(backlog=1024, ssl=context, ssl_handshake_timeout=handshake_s)
        if address.is_socket:
            bound = os.stat(address.host).st_ino
            os.chmod(address.host, 0o660)  # for its owner, and its group such as a web server's
    except OSError as error:
        raise StartError(f"{key}: {error.strerror or error}; choose another HOST:PORT") from error
    try:
        scheme = "http" if context is None else "https"
        if address.is_socket:
            yield str(address)
        else:
            host, port = server.sockets[0].getsockname()[:2]
            yield f"{scheme}://{authority(host, port)}"
    finally:
        server.close()
        # Before the connections end, which takes a while: a kvferry that starts now has its own.
        with suppress(FileNotFoundError):
            if bound and os.stat(address.host).st_ino == bound:
                os.unlink(address.host)
        try:
            listener.throttle.open()  # else waiting connections would be closed as idle
        finally:
            listener.pre_shutdown()
            await listener.shutdown(_CLOSE_S)


async def _check_unused(path: str) -> None:
    """Raise OSError if a process answers at a socket. One that was left behind is replaced."""
    try:
        _, writer = await asyncio.open_unix_connection(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    writer.close()
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


async def serve(
    config: Config, path: Path | None = None, flags: Mapping[str, object] = NO_FLAGS
) -> None:
    """Run until SIGINT or SIGTERM; a second signal ends the process at once.

    SIGHUP reads `path` again, or ends the router if there is none.
    """
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    _allow_descriptors()
    loop, threads = asyncio.get_running_loop(), ThreadPoolExecutor(thread_name_prefix="kvferry")
    loop.set_default_executor(threads)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    asked = asyncio.Event()
    # Before anything that takes long: an unhandled SIGHUP would end the process. Without a file,
    # SIGHUP means that the terminal was closed.
    loop.add_signal_handler(signal.SIGHUP, stop if path is None else asked.set)
    async with build(config, path=path, flags=flags) as router, listening(router) as url:
        rereading = spawn(_reread(router, asked), name="reload")
        _calm_garbage_collector()
        own = {} if router.admin_url is None else {"admin_url": router.admin_url}
        log.info(
            "listening", url=url, **own, policy=config.policy.name, backends=len(config.backends)
        )
        if not config.auth.keys:
            names = (*(f"*.{end}" for end in PRIVATE), *config.browsers.hosts)
            told = "addresses, names without a dot, and: " + ", ".join(names)
            log.info("names_served", hosts=told, add="browsers.hosts")
        await stopping.wait()
        log.info("stopping", grace_s=router.config.shutdown_grace_s)
        rereading.cancel()
        await router.stop()
    hangs = router.store.works or (router.cold is not None and router.cold.works)
    try:
        await within(in_thread(threads.shutdown, "end of threads"), _THREADS_END_S, "a thread")
    except TimeoutError:
        hangs = True
    if hangs:
        log.warning("stopped_with_a_hanging_directory")
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
