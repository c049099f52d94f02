"""Clients that hold what others need: connections, heads without bodies, bodies without ends."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import perf_counter

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.hostile

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
MIB = 1 << 20


@asynccontextmanager
async def silent(kvferry: RunningRouter, n: int, sent: bytes) -> AsyncIterator[None]:
    """Keep `n` connections open that have sent these bytes."""
    writers = [(await kvferry.connect())[1] for _ in range(n)]
    for writer in writers:
        writer.write(sent)
        await writer.drain()
    try:
        yield
    finally:
        for writer in writers:
            writer.close()


async def times_of(kvferry: RunningRouter, first: int, n: int = 20) -> list[float]:
    """Return the seconds of each of `n` requests, all of which are answered."""
    found = []
    for seed in range(first, first + n):
        began = perf_counter()
        answer = await kvferry.complete(ids(seed, 300), n_predict=4)
        found.append(perf_counter() - began)
        assert answer.status == 200
    return sorted(found)


@pytest.mark.parametrize("n", [25, 250, 1000])
async def test_heads_without_bodies(
    llama_server: StartServer, n: int, record_property: Callable[[str, object], None]
) -> None:
    """They have announced 60 MB each. Others are answered as without them."""
    server = await llama_server(slots=2)
    async with running([("a", server.url)], None) as kvferry:
        without = await times_of(kvferry, 0)
        async with silent(kvferry, n, HEAD % (60 * MIB)):
            beside = await times_of(kvferry, 100)
        ratio = beside[17] / without[17]
        record_property("p90 beside them / without", round(ratio, 2))
        assert kvferry.router.app._bodies.held_bytes == 0


async def test_bodies_without_ends(llama_server: StartServer) -> None:
    """One address may hold half of what there is; with a trusted proxy others keep their part."""
    server = await llama_server(slots=2)
    yaml = (
        "limits: {max_body: 4MiB, body_memory: 16MiB, body_timeout: 60s,"
        " trusted_proxies: [127.0.0.1]}"
    )
    async with running([("a", server.url)], None, yaml=yaml) as kvferry:
        half = HEAD.replace(b"localhost", b"localhost\r\nX-Forwarded-For: 10.0.0.9")
        async with silent(kvferry, 12, half % (3 * MIB) + b" " * MIB):
            await kvferry.until(lambda _: kvferry.router.app._bodies.held_bytes >= 6 * MIB)
            body = {"prompt": ids(1, 40), "n_predict": 1, "x": "y" * (MIB // 2)}
            other = await kvferry.post("/completion", body, headers={"X-Forwarded-For": "10.0.0.8"})
            same = await kvferry.post("/completion", body, headers={"X-Forwarded-For": "10.0.0.9"})
            assert kvferry.router.app._bodies.held_bytes <= 12 * MIB
        assert (other.status, same.status) == (200, 503)


async def test_half_a_head(llama_server: StartServer) -> None:
    server = await llama_server(slots=2)
    begun = b"POST /completion HTTP/1.1\r\nHost: local"
    async with running([("a", server.url)], None) as kvferry, silent(kvferry, 500, begun):
        await asyncio.gather(*(times_of(kvferry, 100 * n, 5) for n in range(4)))
