"""The directory on a real Redis: its members, and what happens without it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from router.base.tasks import Tasks
from router.hosts.directory import HostDirectory, signed
from router.hosts.messages import Hello
from router.servers.program import free_port
from tests.support.servers.redis_server import RedisServer

pytestmark = pytest.mark.thorough

PATIENCE_S = 30.0
SECRET = b"the secret of the fleet"


@dataclass
class Host:
    name: str
    directory: HostDirectory


@asynccontextmanager
async def host(redis: RedisServer, name: str) -> AsyncIterator[Host]:
    seen = [""]

    def hello() -> Hello:
        return Hello(name, name, "1", "proof", url=f"http://{seen[-1]}:1")

    directory = HostDirectory(redis.url, name, hello, SECRET, seen.append)
    tasks = Tasks()
    tasks.spawn(directory.run(), name=name)
    try:
        yield Host(name, directory)
    finally:
        await tasks.aclose()
        await directory.aclose()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 - the directory has no event for it
            await asyncio.sleep(0.01)


async def until_members(asking: Host, *names: str) -> None:
    found: set[str] | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while found != set(names):
                told = await asking.directory.members()
                found = None if told is None else {one.name for one in told}
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{found} instead of {names}") from None


async def test_what_no_host_has_signed_is_ignored(redis_server: RedisServer) -> None:
    """One value that is no text ended the loop that finds and checks peers, on every host."""
    async with host(redis_server, "a") as a:
        await until(lambda: not a.directory.problem)
        async with redis_server.client() as client:
            true = await client.get("{kvf}:i:a")
            assert isinstance(true, bytes)
            said, garbage = true[16:], list[bytes]()
            garbage += [
                *(b"", b"{", b'{"name":"\xff', b"[" * 100_000, said, b"x" * 16 + said),
                true[:16] + said.replace(b'"stopping":false', b'"stopping":true '),
                signed(said, b"the secret of another fleet"),
                signed(b'{"name":"\xff', SECRET),
            ]
            for number, told in enumerate(garbage):
                await client.set(f"{{kvf}}:i:{number}", told)
                await client.sadd("{kvf}:hosts", str(number))
            await client.sadd("{kvf}:hosts", *(f"h{n}" for n in range(5000)))
            found = await a.directory.members()
            assert found is not None
            assert [one.name for one in found] == ["a"]
            await client.set("{kvf}:i:\udcff".encode("utf-8", "surrogateescape"), "")
            await client.sadd("{kvf}:hosts", b"\xff")
            assert await a.directory.members() == found
            await client.delete("{kvf}:hosts")
            await client.set("{kvf}:hosts", "no set")
            assert not await a.directory.members()
            await client.delete("{kvf}:hosts")


async def test_a_host_that_is_gone_is_not_found(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        async with host(redis_server, "b"):
            await until_members(a, "a", "b")
        await until_members(a, "a")


async def test_emptied_or_killed_it_is_filled_again(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        await until_members(a, "a")
        await redis_server.empty()
        await until_members(a, "a")
        await redis_server.kill()
        await until(lambda: bool(a.directory.problem))
        assert await a.directory.members() is None
        await redis_server.start()
        await until_members(a, "a")


async def test_no_token_no_hash_and_no_text_is_in_it(redis_server: RedisServer) -> None:
    async with host(redis_server, "a") as a:
        await until_members(a, "a")
        async with redis_server.client() as client:
            keys = [key async for key in client.scan_iter()]
            said = await client.get("{kvf}:i:a")
        assert isinstance(said, bytes)
        assert set(keys) == {b"{kvf}:hosts", b"{kvf}:i:a"}
        assert set(json.loads(said[16:])) == set(Hello.__struct_fields__)


async def test_connection_closed_during_a_call_fails_the_call(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises RuntimeError then, and redis-py passes it on."""
    failed = 0

    async def closed(*_: object, **__: object) -> None:
        nonlocal failed
        failed += 1
        raise RuntimeError("unable to perform operation; the handler is closed")

    async with host(redis_server, "a") as a:
        await until_members(a, "a")
        with monkeypatch.context() as patched:
            patched.setattr(redis.asyncio.Connection, "send_packed_command", closed)
            assert await a.directory.members() is None
            await until(lambda: bool(a.directory.problem))
        await until_members(a, "a")
    assert failed >= 2


async def test_nodes_of_a_cluster(tmp_path: Path) -> None:
    """One of them has all keys; hosts that were given the other one find it, also once more."""
    nodes: list[RedisServer] = []
    async with AsyncExitStack() as stack:
        for first in (0, 8192):
            (folder := tmp_path / str(first)).mkdir()
            flags = ("--cluster-enabled", "yes", "--cluster-port", str(free_port()))
            nodes.append(await stack.enter_async_context(RedisServer.started(folder, *flags)))
            client: Any
            async with nodes[-1].client() as client:
                await client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, first + 8191)
        async with nodes[0].client() as client:
            other = nodes[1].port, nodes[1].more[-1]
            await client.execute_command("CLUSTER", "MEET", "127.0.0.1", *other)
        async with host(nodes[0], "a") as a, host(nodes[1], "b") as b:
            await until_members(a, "a", "b")
            await until_members(b, "a", "b")
