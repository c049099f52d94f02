"""A real S3 server in a process of its own (moto's), which can be paused and emptied."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from router.servers.program import free_port

_PATIENCE_S = 30.0
BUCKET = "states"
# What obstore takes from the environment; moto takes any key.
S3_KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}


@dataclass
class S3Server:
    """One server with one bucket, in memory."""

    port: int
    _process: asyncio.subprocess.Process | None = None

    @property
    def endpoint(self) -> str:
        """Return its URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def yaml(self) -> str:
        """Return what the section `cold` of a configuration needs, in one line."""
        return f"url: 's3://{BUCKET}/kv', endpoint: '{self.endpoint}'"

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncIterator["S3Server"]:
        """Yield a running server."""
        server = cls(free_port())
        await server.start()
        try:
            yield server
        finally:
            await server.kill()

    async def start(self) -> None:
        """Start it, empty; return when it has its bucket."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)),
            env=os.environ | S3_KEYS,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_PATIENCE_S), aiohttp.ClientSession() as session:
            while True:
                try:
                    async with session.put(f"{self.endpoint}/{BUCKET}") as answer:
                        assert answer.status == 200, await answer.text()
                        return
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.05)

    async def kill(self) -> None:
        """Kill it, as kill -9 does."""
        if self._process is not None:
            self._process.kill()
            await self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it from answering, its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End `pause`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
