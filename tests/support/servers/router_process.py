"""A router in a process of its own: it can be killed, and comes back under the same address."""

import asyncio
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.support.servers.router_fleet import PATIENCE_S, Fleet

_COMMAND = "import sys; from router.tools.cli import main; sys.exit(main())"


class Elsewhere(Fleet):
    """A client of such a router."""

    async def standings(self) -> Mapping[str, str]:
        """As it tells everybody, once it is there."""
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
    _process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns before it listens."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _COMMAND, "serve", "--config", str(self.config)),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
            )

    async def end(self, number: signal.Signals) -> int | None:
        """Its exit code after a signal; None if it did not run."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(number)
        async with asyncio.timeout(PATIENCE_S):
            return await process.wait()
