"""Starts, watches and ends the processes of the servers on demand.

Carries out the scheduler's orders and reports what became of them. Decides nothing but the port.
"""

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from router.base.tasks import Tasks
from router.base.types import BackendId
from router.servers.launch import Launch, LaunchIdentity
from router.servers.process import ServerLog, ServerProcess
from router.servers.program import ServerStartError, free_port, is_heard_by

log = structlog.get_logger(__name__)

_READY_INTERVAL_S = 0.02
_LOG_INTERVAL_S = 5.0
# Bytes of a log that are looked at for the reason of an end, and lines that are repeated of it.
_TAIL_BYTES = 4096
_TAIL_LINES = 5
# From SIGTERM to SIGKILL for a process that does not answer: enough to close its files.
_HANGING_GRACE_S = 5.0
# How often a server that loads is looked at for a sign of life: a line in its log.
_SIGN_INTERVAL_S = 1.0
# Another process may take a port between the choice and the server's bind.
_PORT_ATTEMPTS = 3
_PORT_TAKEN = "couldn't bind"


@dataclass(slots=True)
class _Running:
    """A server from the order to start until its end has been reported."""

    launch: Launch
    log: ServerLog
    process: ServerProcess | None = None
    url: str | None = None  # once it is ready
    stopping: bool = False
    fault: str = ""  # why what answers there can never be used
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    """The processes of all servers on demand. One event loop; implements `ports.ServerRunner`."""

    def __init__(
        self,
        launches: Sequence[Launch],
        log_dir: Path,
        max_log_bytes: int,
        *,
        is_ready: Callable[[str], Awaitable[bool]],
        on_ready: Callable[[BackendId, str, LaunchIdentity], None],
        on_ended: Callable[[BackendId, str, bool], None],
        before_stop: Callable[[BackendId], Awaitable[None]],
        before_start: Callable[[], Awaitable[None]],
    ) -> None:
        """Set up without a process. Call `watch_logs` as a task.

        `before_start` makes what a server needs to start; it may raise OSError. `is_ready` asks a
        URL for its health. `on_ready` gets the URL and the identity of a server that is ready.
        `on_ended` gets the reason of an end that was not ordered, or nothing, and whether the next
        process would end likewise. `before_stop` waits for the last answers of a server.
        """
        self._launches = {launch.name: launch for launch in launches}
        self._logs = {
            name: ServerLog(log_dir / f"{name}.log", max_log_bytes) for name in self._launches
        }
        self._is_ready = is_ready
        self._on_ready, self._on_ended = on_ready, on_ended
        self._before_stop, self._before_start = before_stop, before_start
        self._running: dict[BackendId, _Running] = {}
        self._tasks = Tasks()

    def start(self, server: BackendId) -> None:
        """Start a server that does not run. Its end is reported, also if it cannot be started."""
        running = _Running(self._launches[server], self._logs[server])
        self._running[server] = running
        log.info("server_starting", server=server)
        self._tasks.spawn(self._run(running), name=f"server {server}")

    def stop(self, server: BackendId, *, hangs: bool = False) -> None:
        """End a server after its last answer. One that does not run has been reported.

        One that `hangs` is not waited for: it gets SIGKILL after 5 s at most.
        """
        running = self._running.get(server)
        if running is not None and not running.stopping:
            running.stopping = True
            self._tasks.spawn(self._stop(running, hangs=hangs), name=f"stop {server}")

    def fail(self, server: BackendId, reason: str) -> None:
        """End a server that can never be used."""
        running = self._running.get(server)
        if running is not None and running.process is not None:
            running.fault = reason
            running.process.end(_HANGING_GRACE_S)

    def pid(self, server: BackendId) -> int | None:
        """Return the process id of a server's guard; None: it does not run."""
        running = self._running.get(server)
        return None if running is None or running.process is None else running.process.pid

    async def log_tail(self, server: BackendId, size_bytes: int) -> bytes:
        """Return the end of a server's log. Raises KeyError."""
        return await asyncio.to_thread(self._logs[server].tail, size_bytes)

    async def log_end(self, server: BackendId) -> int:
        """Return the position after a server's log. Raises KeyError."""
        return await asyncio.to_thread(self._logs[server].end)

    async def log_after(
        self, server: BackendId, position: int, most_bytes: int
    ) -> tuple[bytes, int]:
        """Return the lines of a server's log from a position on, and the next. Raises KeyError."""
        return await asyncio.to_thread(self._logs[server].after, position, most_bytes)

    async def watch_logs(self) -> None:
        """Keep the logs within their size, for ever."""
        while True:
            for kept in [*self._logs.values()]:
                await asyncio.to_thread(kept.fit)
            await asyncio.sleep(_LOG_INTERVAL_S)

    async def aclose(self) -> None:
        """End all servers and wait for that."""
        for running in self._running.values():
            running.stopping = True
            if running.process is not None:
                running.process.end()
        ending = [running.over.wait() for running in self._running.values() if running.process]
        await asyncio.gather(*ending)
        await self._tasks.aclose()

    async def _run(self, running: _Running) -> None:
        problem = "an error inside the router; see its log"
        try:
            problem = await self._live(running)
        except (OSError, ServerStartError) as error:
            problem = str(error)
        finally:
            if running.process is not None:
                running.process.end(0.0)
            self._over(running, problem)

    def _over(self, running: _Running, problem: str) -> None:
        launch = running.launch
        running.over.set()
        del self._running[launch.name]
        told = "" if running.stopping else running.fault or problem
        if told and not running.fault and (key := _key_of(told)):
            told += f"; look at `{key}` of this model"
        if told:
            log.warning("server_ended", server=launch.name, reason=told)
        else:
            log.info("server_stopped", server=launch.name)
        self._on_ended(launch.name, told, bool(told and running.fault))

    async def _live(self, running: _Running) -> str:
        """Run a server to its end; return the reason of the end."""
        launch, kept = running.launch, running.log
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            await asyncio.to_thread(kept.fit)
            identity = await asyncio.to_thread(launch.identity)
            await self._before_start()
            port = free_port()
            await asyncio.to_thread(launch.clear)
            running.process = await ServerProcess.spawn(
                launch.command(port), launch.env, kept, launch.stop_timeout_s
            )
            if running.stopping:  # ordered while it was being started
                running.process.end()
            url = launch.url(port)
            late = await self._until_ready(port, running, running.process)
            if late and not running.stopping:
                running.process.end(0.0)
                await running.process.wait()
                await self._end_elsewhere(launch, port)
                return late
            if not running.process.has_ended and not running.stopping:
                running.url = url
                log.info("server_ready", server=launch.name, url=url)
                self._on_ready(launch.name, url, identity)
            code = await running.process.wait()
            await self._end_elsewhere(launch, port)
            lines = await self._last_lines(kept)
            taken = running.url is None and _PORT_TAKEN in lines
            if not taken or attempt == _PORT_ATTEMPTS or running.stopping:
                return f"{_told(code)}: {lines}" if lines else _told(code)
        raise AssertionError("unreachable")

    async def _end_elsewhere(self, launch: Launch, port: int) -> None:
        """Run the command that ends what a process started elsewhere, such as a container."""
        if not launch.stop_argv:
            return
        try:
            command = launch.stop_command(port)
            ending = await ServerProcess.spawn(
                command, launch.env, self._logs[launch.name], launch.stop_timeout_s
            )
            try:
                async with asyncio.timeout(launch.stop_timeout_s):
                    await ending.wait()
            except TimeoutError:
                log.warning("stop_command_failed", server=launch.name, reason="it takes too long")
            ending.end(0.0)
            await ending.wait()
        except OSError as error:
            log.warning("stop_command_failed", server=launch.name, reason=str(error))

    async def _until_ready(self, port: int, running: _Running, process: ServerProcess) -> str:
        """Wait until a server answers or has ended; return the reason if neither comes in time.

        An answer of another process on that port is none. Time counts from the last line of its
        log: a server that fetches its model shows how far it is.
        """
        loop, launch = asyncio.get_running_loop(), running.launch
        seen, alive_at = await asyncio.to_thread(running.log.end), loop.time()
        look_at = alive_at + _SIGN_INTERVAL_S
        while True:
            answers = await self._is_ready(launch.url(port))
            is_its_own = launch.socket is not None or launch.is_container
            if answers and (is_its_own or await asyncio.to_thread(is_heard_by, port, process.pid)):
                return ""
            if loop.time() > look_at:
                look_at = loop.time() + _SIGN_INTERVAL_S
                end = await asyncio.to_thread(running.log.end)
                seen, alive_at = end, loop.time() if end != seen else alive_at
            if loop.time() > alive_at + launch.start_timeout_s:
                told = (
                    f"it was not ready, and wrote nothing for {launch.start_timeout_s:g} s; look at"
                    " `start_timeout` of this model"
                )
                return f"{told}: another process listens on its port {port}" if answers else told
            with suppress(TimeoutError):
                async with asyncio.timeout(_READY_INTERVAL_S):
                    await process.wait()
                    break
        return ""

    async def _stop(self, running: _Running, *, hangs: bool) -> None:
        if running.url is not None and not hangs:
            await self._before_stop(running.launch.name)
        if running.process is not None:
            most_s = running.launch.stop_timeout_s
            running.process.end(min(_HANGING_GRACE_S, most_s) if hangs else None)

    async def _last_lines(self, kept: ServerLog) -> str:
        text = (await asyncio.to_thread(kept.tail, _TAIL_BYTES)).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:])


# What a log says of a server that does not start, and the key that decides it.
_KEYS = (
    (r"invalid argument|error while handling|unrecognized arg|expected value for", "args"),
    (r"out of memory|failed to allocate|unable to allocate|alloc", "ctx, slots or args (-ngl)"),
    (r"no such file|failed to open|failed to load|not found", "model"),
    (r"HTTP|https?://|resolve|download", "hf"),
)


def _key_of(problem: str) -> str:
    """Return the key of the configuration that a problem is about; empty: it says nothing."""
    return next((key for words, key in _KEYS if re.search(words, problem, re.IGNORECASE)), "")


def _told(code: int) -> str:
    if code > 128:
        try:
            return f"it was ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"it ended with code {code}"
