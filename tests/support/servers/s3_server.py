"""A real S3 server in a process of its own (moto's), which can be paused and emptied.

`KVFERRY_TEST_S3=http://127.0.0.1:7480` names another one, with a bucket `states` and the keys
`test` and `test`: Ceph's gateway, MinIO. Tests that pause or kill it are skipped then.
"""

import asyncio
import os
import random
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest

from router.servers.program import free_port
from tests.support.servers.child_server import ChildServer

_PATIENCE_S = 30.0
BUCKET = "states"
_OTHER = os.environ.get("KVFERRY_TEST_S3", "")
# What obstore takes from the environment; moto takes any key.
S3_KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


@dataclass
class S3Server(ChildServer):
    """One server with one bucket, in memory."""

    port: int
    host: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        """Return its URL."""
        return _OTHER or f"http://{self.host}:{self.port}"

    @property
    def yaml(self) -> str:
        """Return what the section `cold` of a configuration needs, in one line."""
        return f"url: 's3://{BUCKET}/kv', endpoint: '{self.endpoint}'"

    @classmethod
    @asynccontextmanager
    async def started(cls, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator["S3Server"]:
        """Yield a running server at an address of this machine."""
        server = cls(port or free_port(), host)
        await server.start()
        try:
            yield server
        finally:
            await super(S3Server, server).kill()

    async def start(self) -> None:
        """Start it, empty; return when it has its bucket."""
        if _OTHER:
            _empty(_OTHER)
            return
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "moto.server", "-H", self.host, "-p", str(self.port)),
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
        """Kill it; skip the test where it is not ours."""
        _check_ours()
        await super().kill()

    def pause(self) -> None:
        """Stop it from answering; skip the test where it is not ours."""
        _check_ours()
        super().pause()

    async def spoil(self, chance: random.Random) -> None:
        """Lose some objects, and put others, or garbage, in the place of some."""
        async with aiohttp.ClientSession(f"{self.endpoint}/{BUCKET}/") as session:
            async with session.get("", params={"list-type": "2"}) as answer:
                names = re.findall("<Key>([^<]+)</Key>", await answer.text())
            names = [name for name in names if "/states/" in name or "/blobs/" in name]
            for name in chance.sample(names, len(names) // 3):
                match chance.choice(["lose", "garbage", "another"]):
                    case "lose":
                        await session.delete(name)
                    case "garbage":
                        await session.put(name, data=chance.randbytes(chance.randrange(5000)))
                    case _:
                        async with session.get(chance.choice(names)) as other:
                            content = await other.read()
                        await session.put(name, data=content)


def _check_ours() -> None:
    if _OTHER:
        pytest.skip("the S3 server is not of the test")


def _empty(endpoint: str) -> None:
    import boto3  # type: ignore[import-untyped]

    keys = {
        "aws_access_key_id": S3_KEYS["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": S3_KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    bucket = boto3.resource("s3", endpoint_url=endpoint, **keys).Bucket(BUCKET)
    bucket.objects.all().delete()
