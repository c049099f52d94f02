"""HTTP to a server that handles connections as llama-server does, well and badly."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from router.base.errors import BackendError, BackendTimeoutError
from router.base.tokens import pack
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from tests.support.servers.fake_llama import FakeLlama

QUICK = Timeouts(connect_s=0.5, control_s=0.2, action_s=0.2, first_byte_s=0.2, health_s=0.2)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def client_of(url: str, key: str | None = None) -> AsyncIterator[LlamaClient]:
    async with Connections() as connections:
        yield LlamaClient(BackendId("a"), url, connections, QUICK, key)


@asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[str]:
    """Start a server; at its end wait for the end of every connection."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        if handlers:
            await asyncio.wait(handlers)


def answer(body: object, status: str = "200 OK") -> bytes:
    raw = json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n"
    return head.encode() + b"\r\n" + raw


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)


async def test_connection_that_was_closed_meanwhile() -> None:
    """llama-server closes kept connections unannounced: the call is retried on a fresh one."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(answer({"tokens": [connections]}))
        await reader.read(1)  # the next request, which is not answered
        writer.transport.abort()

    async with serving(serve) as url, client_of(url) as client:
        for expected in (1, 2, 3):
            ids = await client.tokenize("x", add_special=False, parse_special=False)
            assert ids == [expected]


async def test_server_that_never_answers() -> None:
    """Each call times out and closes its connection, so that the server can notice."""
    left = asyncio.Semaphore(0)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        writer.close()
        left.release()

    async with serving(serve) as url, client_of(url) as client:
        with pytest.raises(BackendTimeoutError):
            await client.health()
        with pytest.raises(BackendTimeoutError):
            await client.prefill(0, pack([1, 2]))
        with pytest.raises(BackendTimeoutError):
            async with client.relay("POST", "/completion", [], b"{}"):
                pass
        for _ in range(3):
            await left.acquire()


async def test_the_key_is_ours_and_the_path_as_it_came() -> None:
    """The client's own key is for the router; the backend gets its configured key."""
    seen = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen = await read_request(reader)
        writer.write(answer({}))
        writer.close()

    async with serving(serve) as url, client_of(url, key="secret") as client:
        headers = [(b"Authorization", b"Bearer client"), (b"X-Own", b"1")]
        async with client.relay("POST", "/a%2Fb?c=%20d&e", headers, b"{}") as response:
            await response.read()

    lines = seen.decode().split("\r\n")
    assert lines[0] == "POST /a%2Fb?c=%20d&e HTTP/1.1"
    assert [line for line in lines if line.startswith("Authorization")] == [
        "Authorization: Bearer secret"
    ]
    assert "X-Own: 1" in lines
    assert not [line for line in lines if line.startswith(("User-Agent", "Accept", "Cookie"))]


async def read_to_the_end(client: LlamaClient, times: int) -> None:
    for _ in range(times):
        async with client.relay("POST", "/x", [], b"{}") as response:
            await response.read()


async def test_no_connection_is_kept_after_a_stream() -> None:
    """llama-server closes the connection unannounced; the next request on it would be lost."""
    stream = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    async with answering(stream) as (url, requests), client_of(url) as client:
        await read_to_the_end(client, 3)
        assert len(set(requests)) == 3


async def test_no_connection_is_kept_that_was_not_read_to_its_end() -> None:
    async with answering(answer({"long": "x" * 100})) as (url, requests), client_of(url) as c:
        for _ in range(2):
            async with c.relay("POST", "/x", [], b"{}"):
                pass
        assert requests == [0, 1]


async def test_a_body_that_ends_with_its_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall of it")
        writer.close()

    async with (
        serving(serve) as url,
        client_of(url) as client,
        client.relay("GET", "/x", [], None) as response,
    ):
        assert await response.read() == b"all of it"


async def test_a_slow_reader_makes_the_backend_wait() -> None:
    """Unread bytes stay in the backend's socket: it can send only a part of 64 MiB."""
    sent = 0
    stuck = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 67108864:
                writer.write(b"x" * 65536)
                sent += 65536
                try:
                    async with asyncio.timeout(0.2):
                        await writer.drain()
                except TimeoutError:
                    stuck.set()
                    await writer.drain()
        writer.close()

    async with (
        serving(serve) as url,
        client_of(url) as client,
        client.relay("GET", "/x", [], None) as response,
    ):
        await stuck.wait()
        assert sent < 32 * 1024 * 1024
        assert len(await response.read()) == 67108864


async def test_a_line_break_in_a_header_is_refused() -> None:
    async with answering(answer({})) as (url, requests), client_of(url) as client:
        with pytest.raises(BackendError):
            async with client.relay("GET", "/x", [(b"A", b"b\nc: d")], None):
                pass
        assert requests == []


@asynccontextmanager
async def answering(raw: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """Start a server that answers every request with `raw`.

    Yields its URL and, for each request, the number of its connection.
    """
    requests: list[int] = []
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(numbers)
        while True:
            await read_request(reader)
            requests.append(number)
            writer.write(raw)

    async with serving(serve) as url:
        yield url, requests


async def test_likeliest_tokens_with_part_of_a_character() -> None:
    """The server holds it back, and its probabilities, until the character is whole."""
    top = [{"id": 7, "logprob": -0.5}, {"id": 9, "logprob": -1.5}]
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = json.loads((await read_request(reader)).partition(b"\r\n\r\n")[2])
        asked.append(sent["n_predict"])
        whole = [{"id": 7, "top_logprobs": top}] if sent["n_predict"] >= 4 else []
        writer.write(answer({"completion_probabilities": whole}))
        writer.close()

    async with serving(serve) as url, client_of(url) as client:
        assert await client.fingerprint(0, pack([1, 2])) == [(7, -0.5), (9, -1.5)]
    assert asked == [1, 8]


async def test_prefill_is_told_to_stop_by_leaving() -> None:
    async with FakeLlama() as fake, client_of(fake.url) as client:
        fake.prefill_gate.clear()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(client.prefill(1, pack([1, 2, 3])))
            await fake.until(lambda: fake.slots[1].busy)
            task.cancel()
        await fake.until(lambda: not fake.slots[1].busy)
        fake.prefill_gate.set()
        reported = await client.prefill(1, pack([1, 2, 3]))
        assert (reported.prompt_tokens, reported.cached_tokens) == (3, 0)


async def test_all_who_wait_for_quiet_are_told() -> None:
    """A backend may be drained, taken back and drained again while one answer lasts."""
    async with client_of("http://127.0.0.1:9") as client:
        client.relaying = 2
        async with asyncio.TaskGroup() as group:
            waiting = [group.create_task(client.until_quiet()) for _ in range(2)]
            await asyncio.sleep(0)
            client.relayed()
            await asyncio.sleep(0)
            assert not any(task.done() for task in waiting)
            client.relayed()
        await client.until_quiet()
