"""A real Redis (or Valkey) server in a process of its own, which can be stopped and emptied."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from router.servers.program import free_port
from tests.support.servers.child_server import ChildServer

_PATIENCE_S = 10.0


@dataclass
class RedisServer(ChildServer):
    """One server. Its data is in memory only: a restarted one is empty."""

    port: int
    folder: Path
    more: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Return its URL."""
        return f"redis://127.0.0.1:{self.port}"

    @classmethod
    @asynccontextmanager
    async def started(cls, folder: Path, *more: str) -> AsyncIterator["RedisServer"]:
        """Yield a running server; skips the test where there is no program for it."""
        server = cls(free_port(), folder, more)
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
            *("--appendonly", "no", "--dir", str(self.folder), *self.more),
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

    async def empty(self) -> None:
        """Delete all data."""
        async with self.client() as client:
            await client.flushall()
