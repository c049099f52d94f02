"""Starts, drains and ends backends while the router runs.

The engine decides when a backend is drained; this module makes and ends its monitor and client.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from router.base.errors import ConflictError, RouterError
from router.base.tasks import Tasks, in_thread, supervise, within
from router.base.types import BackendId, KvDir
from router.config.schema import BackendConfig, Config
from router.engine.engine import Engine
from router.llama.attach.monitor import Monitor, MonitorSettings
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts

log = structlog.get_logger(__name__)


T = TypeVar("T")

_READ_S = 10.0  # for a file of the configuration


class StartError(RouterError):
    """The router cannot work as configured; the message names the key and the remedy."""


async def read(function: Callable[[], T], what: str) -> T:
    """Return the result of a function that reads a file. Raises StartError if it does not answer.

    A file on a mount that hangs must hold up neither later reloads nor the end of the process.
    """
    try:
        return await within(in_thread(function, "read a file"), _READ_S, what)
    except TimeoutError as error:
        raise StartError(str(error)) from error


def timeouts_of(config: Config) -> Timeouts:
    """Return the timeouts of the clients, from the configuration."""
    return Timeouts(
        connect_s=config.limits.connect_timeout_s,
        control_s=config.limits.control_timeout_s,
        action_s=config.limits.action_timeout_s,
        first_byte_s=config.limits.first_byte_timeout_s,
        health_s=config.health.timeout_s,
    )


def watch_of(config: Config) -> MonitorSettings:
    """Return the settings of the monitors, from the configuration."""
    health = config.health
    return MonitorSettings(
        health.interval_s, health.failures, config.probe.enabled, config.auth.keeps_apart
    )


def client_of(
    backend: BackendConfig, connections: Connections, timeouts: Timeouts, key: str | None = None
) -> LlamaClient:
    """Return a client for a backend, with `key` or with the configured key.

    Raises StartError if the configured key is not set.
    """
    return LlamaClient(backend.name, backend.url, connections, timeouts, key or key_of(backend))


def key_of(backend: BackendConfig) -> str | None:
    """Return the API key of a backend; None: none is configured.

    Raises StartError if the environment variable in the configuration is not set.
    """
    return secret_of(f"backends: {backend.name}: api_key_env", backend.api_key_env)


def secret_of(key: str, variable: str | None) -> str | None:
    """Return the value of the environment variable that `key` names; None: it names none.

    Raises StartError if the variable is not set.
    """
    if variable is None:
        return None
    secret = os.environ.get(variable)
    if not secret:
        raise StartError(f"{key} names {variable}, which is not set in the environment")
    return secret


def kv_dir_of(backend: BackendConfig, config: Config) -> KvDir | None:
    """Return the KV directory of a backend; None: nothing is ever saved."""
    if backend.kv_dir is None or not config.keeps_snapshots:
        return None
    return KvDir(str(backend.kv_dir))


@dataclass(frozen=True, slots=True)
class _Member:
    """A backend as configured when it was made. A released one is no longer watched."""

    backend: BackendConfig
    monitor: Monitor
    watching: asyncio.Task[None]

    @property
    def name(self) -> BackendId:
        return self.backend.name


class Backends:
    """The present backends, kept in line with the configured ones.

    A backend that was removed from the configuration or changed in it is drained first. Its
    replacement, or a backend for the same server under another name, starts when it is gone.
    """

    def __init__(
        self,
        engine: Engine,
        clients: dict[BackendId, LlamaClient],
        make: Callable[[BackendConfig, Config], Monitor],
    ) -> None:
        """Begin without backends. `clients`: used by the engine; `make`: makes a monitor."""
        self.monitors: dict[BackendId, Monitor] = {}
        self._engine = engine
        self._clients = clients
        self._make = make
        self._config: Config
        self._admitted: dict[BackendId, BackendConfig] = {}  # servers on demand that are ready
        self._members: dict[BackendId, _Member] = {}
        self._leaving: set[BackendId] = set()  # removed from the configuration or changed
        self._tasks = Tasks()

    def configure(self, config: Config) -> None:
        """Take over the backends and limits of a configuration."""
        self._config = config
        for monitor in self.monitors.values():
            monitor.watch = watch_of(config)
            monitor.client.limit(timeouts_of(config))
        self._settle()

    @property
    def _wanted(self) -> tuple[BackendConfig, ...]:
        return (*self._config.backends, *self._admitted.values())

    def admit(self, backend: BackendConfig) -> None:
        """Use a server on demand, which is ready."""
        self._admitted[backend.name] = backend
        self._settle()

    def dismiss(self, name: BackendId) -> None:
        """Forget a server on demand: its process has ended. It need not have been admitted."""
        self._admitted.pop(name, None)
        member = self._members.pop(name, None)
        if member is not None:
            member.watching.cancel()
            member.monitor.detach()
            del self.monitors[name], self._clients[name]

    def drain(self, name: BackendId) -> None:
        """Give a backend nothing new, then release it, until `undrain`.

        Raises KeyError, and ConflictError for a server on demand.
        """
        if name in self._admitted:
            told = f"{name} is started and stopped by kvferry: use `kvferry servers stop {name}`"
            raise ConflictError(told)
        if not self._members[name].monitor.detached:
            log.info("draining", backend=name)
            self._engine.drain(name)

    def undrain(self, name: BackendId) -> None:
        """Use a backend again.

        Raises KeyError, and ConflictError if the configuration no longer has it like this.
        """
        member = self._members[name]
        if name in self._admitted:
            raise ConflictError(f"{name} is started by kvferry: use `kvferry servers start {name}`")
        if name in self._leaving:
            raise ConflictError(
                f"{name} was removed from the configuration or changed in it;"
                " restore its entry there and reload"
            )
        log.info("undrained", backend=name)
        if member.monitor.detached:
            self._start(member.backend)
        else:
            self._engine.undrain(name)

    def prove(self, name: BackendId) -> None:
        """Have a backend probed now, in slots that are lent."""
        self._members[name].monitor.prove()

    def detached(self, name: BackendId) -> None:
        """End a backend that the engine has released. Never blocks; its monitor reports no more."""
        member = self._members[name]
        member.watching.cancel()
        member.monitor.detach()
        self._tasks.spawn(self._end(member), name=f"end {name}")

    async def aclose(self) -> None:
        """Stop watching all backends."""
        await self._tasks.aclose()
        watching = [member.watching for member in self._members.values()]
        for task in watching:
            task.cancel()
        if watching:
            await asyncio.wait(watching)

    def _start(self, backend: BackendConfig) -> None:
        monitor = self._make(backend, self._config)
        watching = supervise(monitor.run, name=f"monitor {backend.name}")
        self._members[backend.name] = _Member(backend, monitor, watching)
        self.monitors[backend.name] = monitor
        self._clients[backend.name] = monitor.client

    def _settle(self) -> None:
        """Take one step from the present to the configured backends; another follows each drain."""
        for member in tuple(self._members.values()):
            name = member.name
            if member.backend in self._wanted:
                if name in self._leaving:  # configured again in time
                    self._leaving.discard(name)
                    self.undrain(name)
            elif name not in self._leaving:
                self._leaving.add(name)
                if member.monitor.detached:
                    self._tasks.spawn(self._end(member), name=f"end {name}")
                else:
                    self.drain(name)
        for backend in self._wanted:
            # Two backends for one server would take the same slots.
            if not any(
                member.name == backend.name or member.backend.url == backend.url
                for member in self._members.values()
            ):
                self._start(backend)

    async def _end(self, member: _Member) -> None:
        """Log the end of a drain after the last answer; forget a backend that is to go."""
        await member.monitor.client.until_quiet()
        name = member.name
        if self._members.get(name) is not member:
            return  # it was undrained meanwhile
        log.info("drained", backend=name)
        if name in self._leaving:
            self._leaving.discard(name)
            del self._members[name], self.monitors[name], self._clients[name]
            self._engine.remove(name)
            self._settle()
