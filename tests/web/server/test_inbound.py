"""Bodies of requests: memory, expansion, encodings, and paths that are not quite the server's."""

import asyncio
import gzip
import os
import re
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest

from router.base.errors import BodiesFullError
from router.config.schema import LimitsConfig
from router.web.server.call import Call
from router.web.server.inbound import Bodies
from router.web.server.settings import Settings
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MIB = 1 << 20
YAML = "limits: {max_body: 4MiB, body_memory: 8MiB}"
BODY = b'{"prompt": "abc", "n_predict": 1, "temperature": 0}'


@pytest.fixture
async def kvferry(fake: FakeLlama) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], None, yaml=YAML) as made:
        yield made


async def post(
    kvferry: RunningRouter, raw: bytes, encoding: str = "", path: str = "/completion"
) -> int:
    headers = {"Content-Type": "application/json"} | (
        {"Content-Encoding": encoding} if encoding else {}
    )
    async with kvferry.session.post(
        kvferry.url + path, data=BytesIO(raw), headers=headers
    ) as response:
        return response.status


def held(kvferry: RunningRouter) -> int:
    return kvferry.router.app._bodies.held_bytes


def padded(size: int) -> bytes:
    """Return a short completion of so many bytes."""
    return BODY[:-1] + b', "x": "%b"}' % (b"y" * (size - len(BODY) - 8))


async def test_bodies_in_progress_have_a_limit(kvferry: RunningRouter, fake: FakeLlama) -> None:
    """A client may take half of what others leave of three fourths."""
    fake.prefill_gate.clear()
    large = padded(5 * MIB // 2)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(post(kvferry, large))
        await kvferry.until(lambda _: held(kvferry) == len(large))
        async with kvferry.session.post(
            kvferry.url + "/completion", data=BytesIO(large)
        ) as response:
            told = await response.json()
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert "limits.body_memory" in told["error"]["message"]
        await kvferry.until(lambda _: held(kvferry) == len(large))
        small = group.create_task(post(kvferry, BODY))
        await kvferry.until(lambda _: held(kvferry) == len(large) + len(BODY))
        fake.prefill_gate.set()
    assert [await first, await small] == [200, 200]
    await kvferry.until(lambda _: held(kvferry) == 0)


def test_nobody_fills_what_is_kept_for_operators() -> None:
    """Of 800 bytes clients get 600, and those of other hosts 700."""
    bodies = Bodies(
        Settings(LimitsConfig.model_construct(max_body_bytes=800), body_memory_bytes=800)
    )

    def fill(*, hop: bool = False) -> None:
        for number in range(1000):
            peer = SimpleNamespace(client=f"peer {number}") if hop else None
            call = SimpleNamespace(hop=peer, is_trusted=False, held_bytes=0, caller=None)
            call.sender = str(number)
            with suppress(BodiesFullError):
                bodies._take(cast(Call, call), 10)

    fill()
    assert bodies.held_bytes == 600
    fill(hop=True)
    assert bodies.held_bytes == 700
    operator = SimpleNamespace(hop=None, is_trusted=True, held_bytes=0, caller=None, sender="op")
    bodies._take(cast(Call, operator), 40)
    assert bodies.held_bytes == 740


async def test_what_was_announced_does_not_count(kvferry: RunningRouter) -> None:
    """Of a body that never comes nothing is held, so nobody else has to wait for it."""
    writers = []
    for _ in range(20):
        _, writer = await kvferry.connect()
        head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length: {3 * MIB}\r\n\r\n"
        writer.write(head.encode() + b"{")
        writers.append(writer)
    await kvferry.until(lambda _: held(kvferry) == 20)
    assert await post(kvferry, padded(2 * MIB)) == 200
    for writer in writers:
        writer.close()
    await kvferry.until(lambda _: held(kvferry) == 0)


async def test_a_large_body_is_let_go_of_when_its_answer_begins(
    kvferry: RunningRouter, fake: FakeLlama
) -> None:
    """Answers may take long; what was sent is not sent again."""
    fake.faults.hang_after_chunks = 1
    stream = padded(2 * MIB)[:-1] + b', "stream": true, "n_predict": 3}'
    async with kvferry.session.post(kvferry.url + "/completion", data=BytesIO(stream)) as response:
        await response.content.readany()
        await kvferry.until(lambda _: held(kvferry) == 0)
        assert not response.content.at_eof()


@pytest.mark.parametrize("key", ["", "made up"])
async def test_a_key_that_nobody_checks_is_no_other_client(
    kvferry: RunningRouter, fake: FakeLlama, key: str
) -> None:
    fake.prefill_gate.clear()
    large = padded(5 * MIB // 2)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(post(kvferry, large))
        await kvferry.until(lambda _: held(kvferry) == len(large))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with kvferry.session.post(
            kvferry.url + "/completion", data=BytesIO(large), headers=headers
        ) as response:
            assert response.status == 503
        fake.prefill_gate.set()
    assert await first == 200


@pytest.mark.parametrize("target", ["GET /kvferry/health", "GET /metrics", "POST /kvferry/reload"])
async def test_body_of_a_route_that_takes_none_is_not_read(
    kvferry: RunningRouter, target: str
) -> None:
    """It would take memory from all clients, also for one without a key."""
    reader, writer = await kvferry.connect()
    head = f"{target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {8 * MIB}\r\n\r\n"
    writer.write(head.encode())
    assert (await reader.readline()).split()[1] != b"503"
    assert held(kvferry) == 0
    writer.close()


async def test_what_was_counted_is_given_back(kvferry: RunningRouter, fake: FakeLlama) -> None:
    """After each kind of end: answered, refused, too large, broken, and left by its client."""
    assert await post(kvferry, BODY) == 200
    assert await post(kvferry, b"{bad") == 400
    assert await post(kvferry, b"x" * 5 * MIB) == 413
    assert await post(kvferry, b"x" * 100, "gzip") == 400
    fake.prefill_gate.clear()
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(post(kvferry, BODY))
        await kvferry.until(lambda _: held(kvferry) > 0)
        leaving.cancel()
    fake.prefill_gate.set()
    await kvferry.until(lambda _: held(kvferry) == 0)
    assert not kvferry.router.app._bodies._held


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstd.compress,
}


@pytest.mark.parametrize("encoding", PACKED)
async def test_compressed_bodies(kvferry: RunningRouter, encoding: str) -> None:
    """The Codex client sends zstd."""
    pack = PACKED[encoding]
    assert await post(kvferry, pack(BODY), encoding) == 200
    assert await post(kvferry, pack(BODY), encoding.upper()) == 200
    bomb = BODY[:-1] + b', "x": "%b"}' % (b"y" * 3 * MIB)
    assert await post(kvferry, pack(bomb), encoding) == 413
    random = BODY[:-1] + b', "x": "%b"}' % os.urandom(MIB).hex().encode()
    assert await post(kvferry, pack(random), encoding) == 200
    await kvferry.until(lambda _: held(kvferry) == 0)


@pytest.mark.parametrize("encoding", ["br", "compress", "gzip, gzip", "x"])
async def test_other_encodings_are_named_in_the_error(
    kvferry: RunningRouter, encoding: str
) -> None:
    headers = {"Content-Encoding": encoding}
    async with kvferry.session.post(
        kvferry.url + "/completion", data=BODY, headers=headers, skip_auto_headers=["Content-Type"]
    ) as response:
        assert response.status == 415
        assert "gzip, deflate, zstd" in (await response.json())["error"]["message"]


async def test_two_encodings_are_refused(kvferry: RunningRouter) -> None:
    """A reader that takes the first and one that takes the last would read two bodies."""
    headers = [("Content-Encoding", "gzip"), ("Content-Encoding", "identity")]
    async with kvferry.session.post(
        kvferry.url + "/completion", data=gzip.compress(BODY), headers=headers
    ) as response:
        assert response.status == 415


async def test_the_memory_of_the_process_stays_within_the_limit(kvferry: RunningRouter) -> None:
    """Twelve requests of 64 KB took 6.4 GB."""
    bomb = gzip.compress(b"a" * 63 * MIB)
    before = _resident_bytes()
    async with aiohttp.ClientSession() as session:

        async def send() -> int:
            async with session.post(
                kvferry.url + "/completion", data=bomb, headers={"Content-Encoding": "gzip"}
            ) as response:
                return response.status

        statuses = await asyncio.gather(*(send() for _ in range(12)))
    assert set(statuses) <= {413, 503}
    assert _resident_bytes() - before < 300 * MIB


def _resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found.group(1)) * 1024


@pytest.mark.parametrize(
    "path", ["//completion", "/v1//completions", "/x/../completion", "/./infill"]
)
async def test_a_path_that_a_proxy_would_mend_takes_no_slot(
    kvferry: RunningRouter, path: str
) -> None:
    """Behind a proxy that drops empty segments it would run in a slot that nothing has leased."""
    host, port = kvferry.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    assert (await reader.read()).startswith(b"HTTP/1.1 404")
    writer.close()
