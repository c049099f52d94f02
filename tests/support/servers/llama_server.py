"""Find a llama-server on this machine; start, watch, stop, kill and restart one.

`LlamaServer` owns one child process and its log, and sends no request but `GET /health`.
"""

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import aiohttp

from router.servers.program import HOST, ServerStartError, find_server, free_port

# Loading a big model from a cold disk takes minutes; a tiny one is up after 0.2 s.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
HEALTH_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 4096
# Another process may take a port between the check and the server's bind.
PORT_ATTEMPTS = 3


def _check_port(port: int | None) -> None:
    # Else /health of another server on this port would pass for that of the child, which
    # cannot bind and ends soon.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port or 0))
        except OSError as error:
            raise ServerStartError(f"port {port} of {HOST} cannot be used: {error}") from None


@dataclass
class LlamaServer:
    """One llama-server process on 127.0.0.1. `async with` starts and stops it.

    `ctx` is llama-server's `-c`: tokens of all slots together, unless the KV is unified.
    The flags are those recommended in llama-server.md section 0: no RAM cache, explicit slots,
    a fixed share of the context for each. `plain_defaults` omits them, to test the router with
    servers that have llama-server's defaults.
    """

    model: Path
    slots: int | None = 1  # None: llama-server's default, 4 with unified KV
    ctx: int = 4096
    kv_dir: Path | None = None  # created with mode 0700 if missing; None: no slot actions
    extra_args: Sequence[str] = ()
    argv: Sequence[str] | None = None  # None: find_server()
    log_path: Path | None = None  # appended to; None: an unnamed file
    port: int | None = None  # None: a free port, kept over restarts
    threads: int = 1
    plain_defaults: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _log: IO[bytes] | None = field(default=None, init=False, repr=False)
    _old_log: str = field(default="", init=False, repr=False)

    @property
    def url(self) -> str:
        """Return the base URL, without a slash at the end. Raises RuntimeError before a start."""
        if self.port is None:
            raise RuntimeError("the server has no port before its first start")
        given = list(self.extra_args)
        if self.socket is not None:
            return f"unix:{self.socket}"
        prefix = given[given.index("--api-prefix") + 1] if "--api-prefix" in given else ""
        return f"http://{HOST}:{self.port}{prefix}"

    @property
    def socket(self) -> str | None:
        """Return the path of a Unix socket that it listens on instead of a port."""
        given = list(self.extra_args)
        host = given[given.index("--host") + 1] if "--host" in given else ""
        return host if host.endswith(".sock") else None

    @property
    def pid(self) -> int | None:
        """Return the process id; None if the process does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def command(self) -> list[str]:
        """Return the command line. Raises ServerNotFoundError; without a port, RuntimeError."""
        if self.port is None:
            raise RuntimeError("the server has no port before its first start")
        argv = list(self.argv) if self.argv is not None else find_server()
        argv += ["-m", str(self.model), "--host", HOST, "--port", str(self.port)]
        argv += ["-c", str(self.ctx), "-t", str(self.threads)]
        if self.kv_dir is not None:
            argv += ["--slot-save-path", str(self.kv_dir)]
        if not self.plain_defaults:
            argv += ["--cache-ram", "0", "--slots", "--metrics"]
            if self.slots is not None:
                # Without -np the server always unifies the KV (server.cpp:168-173).
                argv += ["-np", str(self.slots), "--no-kv-unified"]
        return [*argv, *self.extra_args]

    async def start(self) -> None:
        """Return once `GET /health` is 200.

        Raises ServerStartError if the port is taken; with the tail of the log, if the process ends
        or `start_timeout_s` pass first. Raises ServerNotFoundError, and OSError if the program
        cannot be run. No process is left running then.
        """
        if self.pid is not None:
            raise RuntimeError("the server runs already")
        chosen = self.port is not None
        for attempt in range(1, PORT_ATTEMPTS + 1):
            if not chosen:
                self.port = free_port()
            try:
                await self._start_once()
            except ServerStartError:
                taken = "bind" in self.log_tail() and "HTTP server" in self.log_tail()
                if chosen or not taken or attempt == PORT_ATTEMPTS:
                    raise
            else:
                return

    async def _start_once(self) -> None:
        spawning = asyncio.get_running_loop().run_in_executor(None, self._spawn)
        try:
            await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # The thread continues: the process that it may still start must be killed.
            await asyncio.wait([spawning])
            self.kill()
            raise
        try:
            async with asyncio.timeout(self.start_timeout_s):
                await self._wait_healthy()
        except TimeoutError:
            self.kill()
            raise ServerStartError(
                f"llama-server was not healthy after {self.start_timeout_s} s:\n{self.log_tail()}"
            ) from None
        except BaseException:
            self.kill()
            raise

    def _spawn(self) -> None:
        """Start the process. Blocking: call it in a thread."""
        _check_port(self.port)
        if self.kv_dir is not None:
            self.kv_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._close_log()
        self._log = (
            tempfile.TemporaryFile()  # noqa: SIM115 - closed in _close_log
            if self.log_path is None
            else self.log_path.open("a+b")
        )
        self._process = subprocess.Popen(
            self.command(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # A session of its own: Ctrl-C reaches only this process, which stops the server.
            start_new_session=True,
        )
        atexit.register(self.kill)

    async def _wait_healthy(self) -> None:
        timeout = aiohttp.ClientTimeout(total=5.0)
        connector = None if self.socket is None else aiohttp.UnixConnector(self.socket)
        url = self.url if self.socket is None else "http://localhost"
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            while True:
                if self.pid is None:
                    code = None if self._process is None else self._process.returncode
                    raise ServerStartError(
                        f"llama-server ended with code {code}:\n{self.log_tail()}"
                    )
                try:
                    async with session.get(f"{url}/health") as response:
                        if response.status == 200:
                            return
                except (aiohttp.ClientError, TimeoutError):
                    pass  # not listening yet
                await asyncio.sleep(HEALTH_INTERVAL_S)

    async def stop(self) -> int | None:
        """Send SIGTERM, and SIGKILL after 10 s. Returns the exit code; None if it never ran."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            code = await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = await asyncio.to_thread(process.wait)
        self._forget()
        return code

    def kill(self) -> None:
        """Send SIGKILL, as a crash would, and wait for the end. A dead process is no error."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    async def restart(self) -> None:
        """Stop the server if it runs, and start it on the same port with empty slots."""
        await self.stop()
        await self.start()

    def log_tail(self, size_bytes: int = LOG_TAIL_BYTES) -> str:
        """Return the end of the server's output; of the last run if it does not run."""
        if self._log is None:
            return self._old_log[-size_bytes:]
        # pread, since the child writes at the shared file offset, which must not move.
        handle = self._log.fileno()
        size = os.fstat(handle).st_size
        start = max(0, size - size_bytes)
        return os.pread(handle, size - start, start).decode(errors="replace")

    def _forget(self) -> None:
        atexit.unregister(self.kill)
        self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            self._old_log = self.log_tail(16 * LOG_TAIL_BYTES)
            self._log.close()
            self._log = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()
