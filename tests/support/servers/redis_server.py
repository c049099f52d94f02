"""A real Redis (or Valkey) server in a process of its own, which can be stopped and emptied."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from router.servers.program import free_port

_PATIENCE_S = 10.0


@dataclass
class RedisServer:
    """One server. Its data is in memory only: a restarted one is empty."""

    port: int
    folder: Path
    _process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Return its URL."""
        return f"redis://127.0.0.1:{self.port}"

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path) -> AsyncIterator["RedisServer"]:
        """Yield a running server; skips the test where there is no program for it."""
        server = cls(free_port(), folder)
        await server.start()
        try:
            yield server
        finally:
            await server.kill()

    async def start(self) -> None:
        """Start it; return when it answers."""
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            pytest.skip("no redis-server: apt-get install -y redis-server")
        self._process = await asyncio.create_subprocess_exec(
            *(program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
            *("--appendonly", "no", "--dir", str(self.folder)),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_PATIENCE_S), self.client() as client:
            while True:
                try:
                    await client.ping()
                except RedisError:
                    await asyncio.sleep(0.02)
                else:
                    return

    def client(self) -> redis.asyncio.Redis:
        """Return a client; use it with `async with`."""
        return redis.asyncio.Redis.from_url(self.url)

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

    async def empty(self) -> None:
        """Delete all data."""
        async with self.client() as client:
            await client.flushall()
