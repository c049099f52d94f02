"""The llama-servers of the demo: the processes of servers on demand, each on a port that stays."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from router.servers.process import ServerLog, ServerProcess
from router.servers.program import HOST, ServerStartError, free_port

THREADS = max((os.cpu_count() or 2) // 2, 1)  # two servers share the machine
_START_TIMEOUT_S = 300.0  # loading a large model from a cold disk takes minutes
_GRACE_S = 10.0
_HEALTH_INTERVAL_S = 0.05
_LOG_BYTES = 4096


@dataclass(slots=True)
class DemoServer:
    """One llama-server on this machine; `command` has no host and no port."""

    command: Sequence[str]
    log: ServerLog
    port: int = field(default_factory=free_port)
    _process: ServerProcess | None = None

    @property
    def url(self) -> str:
        """Return the base URL, the same after each start."""
        return f"http://{HOST}:{self.port}"

    async def start(self) -> None:
        """Return once the server is healthy. Raises ServerStartError, with the end of its log."""
        command = [*self.command, "--host", HOST, "--port", str(self.port)]
        self._process = await ServerProcess.spawn(command, dict(os.environ), self.log, _GRACE_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                if await self._is_healthy(self._process):
                    return
        await self.end(0.0)
        tail = (await asyncio.to_thread(self.log.tail, _LOG_BYTES)).decode(errors="replace")
        raise ServerStartError(f"llama-server could not be started:\n{tail}")

    async def _is_healthy(self, process: ServerProcess) -> bool:
        """Wait until the server answers; return False if it ends first."""
        async with aiohttp.ClientSession() as session:
            while not process.has_ended:
                with suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return True
                await asyncio.sleep(_HEALTH_INTERVAL_S)
        return False

    async def end(self, grace_s: float = _GRACE_S) -> None:
        """End the server, with SIGKILL after `grace_s`, and wait for that."""
        if self._process is not None:
            self._process.end(grace_s)
            await self._process.wait()


def command_of(
    argv: Sequence[str], model: Path, slots: int, ctx: int, kv_dir: Path | None
) -> list[str]:
    """Return the command of a server. Without `kv_dir` its RAM cache is on, as by default.

    With it the flags are those of docs/llama-server.md section 0.
    """
    command = [*argv, "-m", str(model), "-c", str(slots * ctx), "-np", str(slots)]
    command += ["-t", str(THREADS), "--no-kv-unified", "--slots", "--metrics"]
    if kv_dir is None:
        return [*command, "--cache-ram", "8192"]
    return [*command, "--cache-ram", "0", "--slot-save-path", str(kv_dir)]
