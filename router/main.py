"""Builds everything, once, from a configuration; the only module that knows all the others."""

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import structlog
from aiohttp import web
from prometheus_client import CollectorRegistry

from router import __version__
from router.adapters.backend_metrics import BackendMetrics
from router.adapters.clock import MonotonicClock, wall_now
from router.adapters.journal import Journal
from router.adapters.kv_store import KvStore
from router.adapters.llama_client import Connections, LlamaClient, Timeouts
from router.adapters.llama_reply import Props
from router.adapters.local_template import prove
from router.adapters.local_tokenizer import Encoder, LocalTokenizerError, load_local
from router.adapters.monitor import Attached, Monitor, Watch
from router.adapters.prompts import PromptReader, Vocabulary
from router.adapters.specials import discover_specials
from router.adapters.telemetry import EngineCollector, PrometheusTelemetry
from router.adapters.tokenizer import SegmentTokenizer
from router.adapters.vitals import Vitals
from router.config import Backend, Config, LogFormat, TokenizerMode
from router.core.catalog import Catalog, Limits
from router.core.fleet import Fleet
from router.core.policy import Policy, PolicyName
from router.core.queue import Queue, QueueLimits
from router.core.scheduler import Scheduler
from router.core.state import State
from router.engine import Engine
from router.errors import RouterError
from router.tasks import Tasks
from router.types import BackendId, Namespace, Place, Stats
from router.web.admin import Admin
from router.web.app import App
from router.web.completions import Completions
from router.web.directory import Directory
from router.web.guard import Guard
from router.web.live import Live, Subject
from router.web.page import load_page
from router.web.picture import picture_of, survey
from router.web.requests import Requests
from router.web.snapshots import Snapshots

log = structlog.get_logger(__name__)


class StartError(RouterError):
    """The router cannot start as it is configured; the message names the key and the way out."""


def timeouts_of(config: Config) -> Timeouts:
    """The client's limits, from the configuration."""
    return Timeouts(
        connect_s=config.limits.connect_timeout_s,
        control_s=config.limits.control_timeout_s,
        action_s=config.limits.action_timeout_s,
        first_byte_s=config.limits.first_byte_timeout_s,
        health_s=config.health.timeout_s,
    )


def client_of(backend: Backend, connections: Connections, timeouts: Timeouts) -> LlamaClient:
    """Raises StartError if the environment lacks the key that the configuration names."""
    key = _secret(f"backends: {backend.name}: api_key_env", backend.api_key_env)
    return LlamaClient(backend.name, backend.url, connections, timeouts, key)


def _secret(key: str, variable: str | None) -> str | None:
    """What the environment variable that `key` names holds. Raises StartError."""
    if variable is None:
        return None
    secret = os.environ.get(variable)
    if not secret:
        raise StartError(f"{key} names {variable}, which is not set in the environment")
    return secret


def place_of(backend: Backend, config: Config) -> Place | None:
    """Where the backend's state files are; None if nothing is ever saved."""
    moves_kv = Policy(name=config.policy.name).moves_kv
    if backend.kv_dir is None or not config.store.enabled or not moves_kv:
        return None
    return Place(str(backend.kv_dir))


def _state(config: Config) -> State:
    catalog = Catalog(
        Limits(config.store.max_bytes, config.store.max_tokens, config.store.min_tokens)
    )
    policy = Policy(
        name=config.policy.name,
        max_wait_s=config.policy.max_wait_s,
        coalesce_above_s=config.policy.coalesce_above_s,
        reuse_probability=config.policy.reuse_probability,
        idle_save_after_s=config.store.save_when_idle_for_s,
    )
    limits = QueueLimits(
        config.queue.max_requests, config.queue.deadline_s, config.queue.no_backend_wait_s
    )
    return State(fleet=Fleet(policy=policy, catalog=catalog), queue=Queue(limits))


@dataclass(slots=True)
class Router:
    """A running router, without its listening socket."""

    server: web.Server
    engine: Engine
    directory: Directory
    live: Live
    config: Config

    async def stop(self) -> None:
        """Let running requests end and save what is worth it, within `shutdown_grace`."""
        grace_s = self.config.shutdown_grace_s
        self.directory.stop()
        try:
            async with asyncio.timeout(grace_s):
                await self.engine.stop(save=self.config.store.save_on_shutdown)
        except TimeoutError:
            log.warning("stopped_with_requests_running", grace_s=grace_s)


class _Vocabularies:
    """A tokenizer for each backend, shared by those of the same namespace."""

    def __init__(self, config: Config, tasks: Tasks) -> None:
        self._config = config
        self._tasks = tasks
        self._tokenizers: dict[Namespace, tuple[BackendId, SegmentTokenizer]] = {}
        self.readers: dict[BackendId, PromptReader] = {}

    async def _local(self, props: Props, specials: dict[str, int]) -> Encoder | None:
        """The local tokenizer: the one that is configured, or the model's own file if it is here.

        None with a line in the log; the backend is asked then.
        """
        path = self._config.tokenizer.path
        if self._config.tokenizer.mode is TokenizerMode.AUTO:
            path = Path(props.model_path)
            if not await asyncio.to_thread(path.is_file):
                return None
        if path is None:
            return None
        try:
            return await asyncio.to_thread(load_local, path, tuple(specials))
        except LocalTokenizerError as error:
            log.info("local_tokenizer_not_used", reason=str(error))
            return None

    async def prepare(self, client: LlamaClient, props: Props, namespace: Namespace) -> None:
        """Learn how a backend tokenizes. Raises BackendError."""
        if self._config.tokenizer.mode is TokenizerMode.OFF:
            return
        owner, tokenizer = self._tokenizers.get(namespace, (None, None))
        if tokenizer is None or owner == client.id:
            specials = await discover_specials(
                props.chat_template, props.bos_token, props.eos_token, client.tokenize
            )
            tokenizer = SegmentTokenizer(
                client.tokenize,
                specials,
                spawn=self._tasks.spawn,
                cache_bytes=self._config.tokenizer.cache_bytes,
            )
            if reason := await tokenizer.self_check(await self._local(props, specials)):
                log.info("tokenizer_whole_texts", backend=client.id, reason=reason)
            self._tokenizers[namespace] = (client.id, tokenizer)
        template = None
        if self._config.tokenizer.mode is not TokenizerMode.BACKEND:
            template = await prove(
                props.chat_template, props.bos_token, props.eos_token, client.apply_template
            )
        vocabulary = Vocabulary(client, tokenizer, props.media_marker, template)
        self.readers[client.id] = PromptReader(vocabulary)


@asynccontextmanager
async def build(config: Config, registry: CollectorRegistry | None = None) -> AsyncIterator[Router]:
    """A router that watches its backends; what was started is stopped on exit.

    Raises StartError, or KvError if a kv_dir cannot be used.
    """
    registry = registry or CollectorRegistry()
    clock = MonotonicClock()
    telemetry = PrometheusTelemetry(registry, [backend.name for backend in config.backends])
    guard = Guard(_secret("admin: token_env", config.admin.token_env))
    journal = Journal(config.diagnostics.requests, wall_now)
    async with AsyncExitStack() as stack:
        connections = await stack.enter_async_context(Connections())
        timeouts = timeouts_of(config)
        clients = {b.name: client_of(b, connections, timeouts) for b in config.backends}
        places = {b.name: place_of(b, config) for b in config.backends}
        found = [place for place in places.values() if place is not None]
        engine: Engine
        store = None
        if found:
            store = KvStore(
                found,
                on_lost=lambda snapshot, _: engine.snapshot_lost(snapshot.id),
                wall_now=wall_now,
                fsync=config.store.fsync,
            )
        engine = Engine(
            Scheduler(_state(config)), clients, store, clock, telemetry, on_over=journal.over
        )
        if store is not None:
            engine.snapshots_found(await store.load())
            stack.push_async_callback(store.aclose)
        stack.push_async_callback(engine.aclose)
        tasks = Tasks()
        vocabularies = _Vocabularies(config, tasks)

        def up(attached: Attached) -> None:
            engine.backend_up(attached.info, attached.slots)
            directory.backend_came()

        def stats() -> Stats:
            known = engine.stats()
            return replace(known, queue_depth=known.queue_depth + directory.waiting)

        monitors = {
            backend.name: Monitor(
                clients[backend.name],
                place=places[backend.name],
                store=store,
                extra_models=backend.models,
                watch=Watch(config.health.interval_s, config.health.failures, config.probe.enabled),
                known_namespaces=engine.known_namespaces,
                on_up=up,
                on_down=engine.backend_down,
                borrow=engine.borrow,
                on_probed=lambda attached: engine.probed(attached.info),
                prepare=vocabularies.prepare,
            )
            for backend in config.backends
        }
        directory = Directory(
            monitors,
            vocabularies.readers,
            engine,
            reads_prompts=config.tokenizer.mode is not TokenizerMode.OFF,
        )
        registry.register(EngineCollector(stats, lambda: tuple(engine.infos.values())))
        completions = Completions(
            engine, directory, journal, tasks.spawn, config.limits.idle_timeout_s
        )
        catalog = engine.scheduler.state.fleet.catalog
        subject = Subject(
            picture=lambda: picture_of(engine, directory, clock.now()),
            n_snapshots=lambda: len(catalog),
            survey=lambda: survey(catalog),
            decisions=journal.recent,
        )
        live = Live(subject, tasks.spawn, wall_now)
        app = App(
            completions=completions,
            live=live,
            page=await asyncio.to_thread(load_page),
            admin=Admin(
                engine,
                directory,
                completions,
                registry,
                BackendMetrics(clients, registry),
                clock.now,
            ),
            snapshots=Snapshots(engine, guard, clock.now, wall_now),
            requests=Requests(journal, directory, show_content=config.diagnostics.show_content),
            journal=journal,
            directory=directory,
            telemetry=telemetry,
            max_body_bytes=config.limits.max_body_bytes,
            body_timeout_s=config.limits.body_timeout_s,
            idle_timeout_s=config.limits.idle_timeout_s,
            passthrough=config.policy.name is PolicyName.PASSTHROUGH,
        )
        vitals = Vitals(registry, clock, found, __version__)
        tasks.spawn(vitals.watch_loop(), name="event loop lag")
        tasks.spawn(vitals.watch_disks(), name="room on disk")
        for name, monitor in monitors.items():
            tasks.spawn(monitor.run(), name=f"monitor {name}")
        stack.push_async_callback(tasks.aclose)
        yield Router(app.server(), engine, directory, live, config)


@asynccontextmanager
async def listening(router: Router) -> AsyncIterator[str]:
    """Serve on the configured address; yields the URL. Raises OSError if it is taken."""
    runner = web.ServerRunner(router.server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        address = router.config.listen
        site = web.TCPSite(runner, address.host, address.port, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        router.live.stop()
        await runner.cleanup()


async def serve(config: Config) -> None:
    """Run until SIGINT or SIGTERM; a second signal ends it at once."""
    stopping = asyncio.Event()

    def stop() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    async with build(config) as router, listening(router) as url:
        _calm_garbage_collector()
        log.info("listening", url=url, policy=config.policy.name, backends=len(config.backends))
        await stopping.wait()
        log.info("stopping", grace_s=config.shutdown_grace_s)
        await router.stop()


def _calm_garbage_collector() -> None:
    """What is there by now stays; and a request makes more objects than Python's default of 700,
    so that each would pay for collections that find nothing. Seen in a loop over the router's own
    steps; in `bench.latency` the difference is within the noise."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def set_up_logging(config: Config) -> None:
    """structlog to standard error: JSON for machines, aligned text on a terminal."""
    pretty = config.logging.format is LogFormat.CONSOLE or (
        config.logging.format is LogFormat.AUTO and sys.stderr.isatty()
    )
    # Not the prettier traceback: it shows local variables, and prompts are among them.
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    renderer = console if pretty else structlog.processors.JSONRenderer(serializer=orjson.dumps)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if pretty else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[config.logging.level.upper()]
        ),
        logger_factory=(
            structlog.PrintLoggerFactory(sys.stderr)
            if pretty
            else structlog.BytesLoggerFactory(sys.stderr.buffer)
        ),
        cache_logger_on_first_use=True,
    )
