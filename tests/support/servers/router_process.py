"""A router in a process of its own, which can be killed and restarted at the same address."""

import asyncio
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.support.servers.running_router import PATIENCE_S, RunningRouter

_COMMAND = "import sys; from router.tools.cli import main; sys.exit(main())"


class Elsewhere(RunningRouter):
    """A client of a router in another process."""

    async def standings(self) -> Mapping[str, str]:
        """Return the states in `/kvferry/health`; a placeholder until the router listens."""
        try:
            health: Mapping[str, str] = (await self.get("/kvferry/health")).json["backends"]
        except aiohttp.ClientConnectorError:
            return {"the router": "not there"}
        return health


@dataclass
class Outside:
    """`kvferry serve`, with a file for its configuration and one for its log."""

    config: Path
    log: Path
    program: tuple[str, ...] = ("-c", _COMMAND)  # arguments of Python
    _process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and return before the router listens."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, *self.program, "serve", "--config", str(self.config)),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
            )

    async def end(self, number: signal.Signals) -> int | None:
        """Send a signal and return the exit code; None if no process ran."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            return await process.wait()
