"""Limits of connections and of request heads; an error names the key of the limit."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from unittest.mock import Mock

import pytest
from aiohttp import web

from router.base.clock import MonotonicClock
from router.base.errors import TooManyConnectionsError
from router.config.schema import LimitsConfig
from router.engine.loop_throttle import LoopThrottle
from router.web.server.listener import Listener, _Connection, client_of
from router.web.server.settings import Settings
from tests.support.servers.recorder import exchange
from tests.support.servers.running_router import PATIENCE_S, Json, RunningRouter, running
from tests.web.server.test_smuggling import get, statuses

pytestmark = pytest.mark.thorough

GOOD = get(b"GET /kvferry/health HTTP/1.1", b"Host: x\r\nConnection: close\r\n")
KEPT = get(b"GET /kvferry/health HTTP/1.1")


@asynccontextmanager
async def limited(limits: str) -> AsyncIterator[RunningRouter]:
    async with running(
        [("a", "http://127.0.0.1:9")], None, yaml=f"limits: {{{limits}}}", wait_for=[]
    ) as kvferry:
        yield kvferry


def error_in(answer: bytes) -> Json:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Connection: close" in head or head.startswith(b"HTTP/1.0")
    assert b"Server: kvferry" in head
    assert b"x-kvferry-request-id: " in head
    error: Json = json.loads(body)["error"]
    assert error["code"] == int(head.split()[1])
    return error


@pytest.mark.parametrize(
    ("limits", "raw", "status", "key"),
    [
        (
            "max_request_line: 100",
            get(b"GET /" + b"x" * 100 + b" HTTP/1.1"),
            414,
            "limits.max_request_line",
        ),
        (
            "max_header: 100",
            KEPT[:-2] + b"A: " + b"x" * 101 + b"\r\n\r\n",
            431,
            "limits.max_header",
        ),
        ("max_header: 100", KEPT[:-2] + b"x" * 101 + b": a\r\n\r\n", 431, "limits.max_header"),
        ("max_headers: 5", KEPT[:-2] + b"A: b\r\n" * 5 + b"\r\n", 431, "limits.max_headers"),
        ("max_header: 8KiB", get(b"GET /" + b"x" * 8192 + b" HTTP/1.1"), 431, "limits.max_header"),
    ],
)
async def test_the_head_of_a_request(limits: str, raw: bytes, status: int, key: str) -> None:
    """The last case: aiohttp reports a size only; for equal limits the error names `max_header`."""
    async with limited(limits) as kvferry:
        error = error_in(await exchange(kvferry.url, raw))
        fits = statuses(await exchange(kvferry.url, GOOD))
        metrics = await kvferry.metrics()

    assert (error["code"], error["type"]) == (status, "invalid_request_error")
    assert key in error["message"]
    assert fits == [503]
    assert metrics['kvferry_requests_total{outcome="header_too_large"}'] == 1


async def test_what_just_fits() -> None:
    async with limited("max_request_line: 100, max_header: 100, max_headers: 5") as kvferry:
        line = get(b"GET /kvferry/health?" + b"x" * 79 + b" HTTP/1.1", b"Host: x\r\n")
        fields = b"A: " + b"x" * 99 + b"\r\nB: b\r\nC: c\r\nConnection: close\r\n\r\n"

        assert statuses(await exchange(kvferry.url, line[:-2] + fields)) == [503]


@pytest.mark.parametrize(
    "raw", [b"", KEPT], ids=["the first request", "the second request of a connection"]
)
async def test_a_head_that_drips(raw: bytes) -> None:
    """Each byte comes in time and the head too late: the time counts from the head's first byte."""
    async with limited("header_timeout: 300ms, keep_alive_timeout: 1m") as kvferry:
        reader, writer = await kvferry.connect()
        writer.write(raw)
        if raw:
            await reader.readuntil(b"}}")
        writer.write(b"GET /kvferry/health HTTP/1.1\r\nA: ")
        # Not to the end: bytes sent after the close are answered by a reset.
        told = asyncio.ensure_future(reader.readuntil(b"}}"))  # noqa: TID251 - a test's own
        while not told.done():
            writer.write(b"x")
            await asyncio.sleep(0.02)
        writer.close()

    answer = told.result()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert "limits.header_timeout" in json.loads(body)["error"]["message"]


HALF = KEPT[:-2]
POST = b"POST /kvferry/plan HTTP/1.1\r\nHost: x\r\n"
COUNTED = POST + b"Content-Length: 8\r\n\r\n\r\n\r\n{{{{"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n\r\n"


UPGRADE = KEPT[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


Packets = list[bytes]
LATE: dict[str, tuple[Packets, list[int]]] = {
    "with the connection": ([HALF], [408]),
    "one byte": ([KEPT, HALF[:1]], [503, 408]),
    "behind a request": ([KEPT + HALF], [503, 408]),
    "behind several": ([KEPT * 3 + HALF], [503] * 3 + [408]),
    "behind more than are kept": ([KEPT * 40 + HALF, b"A:"], [503] * 40 + [408]),
    "behind the end of a head": ([HALF, KEPT[-2:] + HALF], [503, 408]),
    "behind its last byte": ([HALF, b"\r", b"\n" + HALF], [503, 408]),
    "behind a body": ([COUNTED + HALF], [400, 408]),
    "behind the end of a body": ([COUNTED[:-6], COUNTED[-6:] + HALF], [400, 408]),
    "behind chunks": ([CHUNKED + HALF], [400, 408]),
    "after chunks": ([CHUNKED[:-7], CHUNKED[-7:], HALF], [400, 408]),
    "after an upgrade that was declined": ([UPGRADE, HALF], [503, 408]),
}
IDLE: dict[str, tuple[Packets, list[int]]] = {
    "nothing": ([b""], []),
    "a request": ([KEPT], [503]),
    "three": ([KEPT * 3], [503] * 3),
    "more than are kept": ([KEPT * 40], [503] * 40),
    "in pieces": ([KEPT[:1], KEPT[1:-1], KEPT[-1:]], [503]),
    "between empty lines": ([b"\r\n\r\n" + KEPT + b"\r\n"], [503]),
    "a body": ([COUNTED], [400]),
    "a length of many digits": ([COUNTED.replace(b": 8", b": " + b"0" * 5000 + b"8")], [400]),
    "a body between empty lines": ([b"\r\n\r\n" + COUNTED + b"\r\n"], [400]),
    "a head that ends with its body": ([COUNTED[:-9], COUNTED[-9:]], [400]),
    "a body in pieces": ([COUNTED[:-6], COUNTED[-6:-2], COUNTED[-2:]], [400]),
    "two bodies": ([COUNTED * 2], [400] * 2),
    "two in pieces": ([COUNTED[:-6], COUNTED[-6:] + COUNTED], [400] * 2),
    "chunks": ([CHUNKED], [400]),
    "chunks in pieces": ([CHUNKED[:-7], CHUNKED[-7:-2], CHUNKED[-2:]], [400]),
    "chunks before a body": ([CHUNKED + COUNTED + CHUNKED], [400] * 3),
    "the last chunk before a body": ([CHUNKED[:-7], CHUNKED[-7:] + COUNTED], [400] * 2),
}


async def sent(kvferry: RunningRouter, packets: Packets, wait_s: float) -> tuple[list[int], bool]:
    """Send packets one by one, the first with the connection; return the statuses of the answers.

    Also return whether the connection was closed within `wait_s` seconds of the last packet.
    """
    host, port = kvferry.url.removeprefix("http://").split(":")
    raw = socket.create_connection((host, int(port)))  # blocking: the loop runs only after sendall
    raw.sendall(packets[0])
    reader, writer = await asyncio.open_connection(sock=raw)
    for packet in packets[1:]:
        await asyncio.sleep(0.05)
        writer.write(packet)
    answers = b""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while piece := await reader.read(65536):
                answers += piece
    writer.close()
    return statuses(answers), reader.at_eof()


async def all_sent(cases: dict[str, tuple[Packets, list[int]]], wait_s: float) -> Json:
    async with limited("header_timeout: 300ms, keep_alive_timeout: 1m") as kvferry:
        found = await asyncio.gather(
            *(sent(kvferry, packets, wait_s) for packets, _ in cases.values())
        )
    return dict(zip(cases, found, strict=True))


async def test_half_a_head_and_silence() -> None:
    """The head times out wherever in a packet it began."""
    assert await all_sent(LATE, PATIENCE_S) == {
        name: (told, True) for name, (_, told) in LATE.items()
    }


async def test_what_is_whole_and_silence() -> None:
    """No byte of another head has come: the connection is idle, and stays open."""
    assert await all_sent(IDLE, 1.0) == {name: (told, False) for name, (_, told) in IDLE.items()}


async def test_half_a_head_while_an_answer_is_made() -> None:
    """The head's timeout begins with the end of the answer.

    aiohttp takes a request out of its queue before the handler knows of it; bytes that come in
    between follow the request, too.
    """
    settings = Settings(LimitsConfig.model_construct(header_timeout_s=0.1))
    for turns in range(5):
        answer, closed, transport = asyncio.Event(), asyncio.Event(), Mock()

        async def handle(_: web.BaseRequest, answer: asyncio.Event = answer) -> web.Response:
            await answer.wait()
            return web.Response()

        transport.get_extra_info.return_value = None
        transport.is_closing.return_value = False
        transport.close.side_effect = closed.set
        throttle = LoopThrottle(MonotonicClock())
        connection = Listener(handle, settings, lambda *_: None, throttle)()
        connection.connection_made(transport)
        await asyncio.sleep(0)
        connection.data_received(KEPT)
        for _ in range(turns):
            await asyncio.sleep(0)
        connection.data_received(HALF)
        await asyncio.sleep(0.3)
        assert not closed.is_set()
        answer.set()
        async with asyncio.timeout(PATIENCE_S):
            await closed.wait()
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        assert statuses(written) == [200, 408]
        connection.connection_lost(None)


async def test_a_head_that_comes_in_time_and_a_slow_answer() -> None:
    """The timeout is for the head alone: the body and the next head may come later."""
    async with limited("header_timeout: 200ms, body_timeout: 1m") as kvferry:
        reader, writer = await kvferry.connect()
        writer.write(b"POST /kvferry/plan HTTP/1.1\r\nHost: x\r\nContent-Le")
        await asyncio.sleep(0.05)
        writer.write(b"ngth: 1\r\n\r\n")
        await asyncio.sleep(0.4)
        writer.write(b"{")
        assert (await reader.readuntil(b"\r\n")).split()[1] == b"400"
        await reader.readuntil(b"}}")
        await asyncio.sleep(0.4)
        writer.write(GOOD)
        assert (await reader.read()).split()[1] == b"503"
        writer.close()


@pytest.mark.parametrize("raw", [b"", KEPT], ids=["before the first", "after an answer"])
async def test_a_connection_without_a_request(raw: bytes) -> None:
    """An idle connection is closed without an error: there is no request to answer."""
    async with limited("keep_alive_timeout: 200ms") as kvferry:
        answer = await exchange(kvferry.url, raw)

    assert statuses(answer) == ([503] if raw else [])


@pytest.mark.parametrize("key", ["connections", "connections_per_client"])
async def test_one_connection_too_many(key: str) -> None:
    """The refused client gets the reason; once a connection is closed there is room again."""
    async with limited(f"{key}: 2") as kvferry:
        open_ = [await kvferry.connect() for _ in range(2)]
        for reader, writer in open_:
            writer.write(KEPT)
            await reader.readuntil(b"}}")
        error = error_in(await exchange(kvferry.url, b""))
        assert (error["code"], error["type"]) == (503, "unavailable_error")
        assert f"limits.{key})" in error["message"]

        for reader, writer in open_:  # the open connections still work
            writer.write(KEPT)
            assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 503")
        open_[0][1].close()
        await open_[0][1].wait_closed()
        async with asyncio.timeout(10):
            while error_or_good(await exchange(kvferry.url, GOOD)) != "no backend":
                pass
        open_[1][1].close()
        assert (await kvferry.metrics())[
            'kvferry_requests_total{outcome="too_many_connections"}'
        ] >= 1


def error_or_good(answer: bytes) -> str:
    body = json.loads(answer.partition(b"\r\n\r\n")[2])
    return str(body.get("status") or body["error"]["message"])


async def test_a_reload_counts_for_new_connections() -> None:
    settings = Settings()
    throttle = LoopThrottle(MonotonicClock())
    listener = Listener(_never, settings, lambda *_: None, throttle)
    listener.admit("a")
    listener.admit("b")
    settings.limits = LimitsConfig.model_construct(connections_per_client=1)
    with pytest.raises(TooManyConnectionsError, match="connections_per_client"):
        listener.admit("a")
    listener.admit("c")
    listener.leave("a")
    listener.admit("a")
    settings.limits = LimitsConfig.model_construct(connections=3)
    with pytest.raises(TooManyConnectionsError, match=r"limits\.connections\)"):
        listener.admit("d")


async def test_a_request_that_waits_for_its_turn_is_no_idle_connection() -> None:
    """aiohttp closes long idle connections, and does not know of a request at the loop throttle."""
    throttle, line = LoopThrottle(MonotonicClock()), list[Callable[[], object]]()
    settings = Settings()
    listener = Listener(_never, settings, lambda *_: None, throttle)
    connection, transport = listener(), Mock()
    transport.get_extra_info.return_value = None
    connection.connection_made(transport)
    await asyncio.sleep(0)
    connection._keepalive = True  # an answer has been sent before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throttle, "call", line.append)
        connection.data_received(KEPT)
    connection._process_keepalive()
    transport.close.assert_not_called()
    connection.force_close()
    assert len(line) == 1


async def test_a_head_that_drips_while_the_router_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's wait at the loop throttle does not count and does not restart the timeout."""
    throttle, line = LoopThrottle(MonotonicClock()), list[Callable[[], object]]()
    settings = Settings(LimitsConfig.model_construct(header_timeout_s=10.0))
    connection, transport = Listener(_never, settings, lambda *_: None, throttle)(), Mock()
    transport.get_extra_info.return_value = None
    connection.connection_made(transport)
    assert isinstance(connection, _Connection)
    await asyncio.sleep(0)  # until the connection waits for a request
    now, given, timers = 0.0, list[float](), list[Mock]()

    def call_later(delay_s: float, *_: object) -> Mock:
        given.append(delay_s)
        timers.append(Mock())
        timers[-1].when.return_value = now + delay_s
        return timers[-1]

    connection._loop = Mock(wraps=connection._loop)
    connection._loop.time.side_effect = lambda: now
    connection._loop.call_later.side_effect = call_later
    monkeypatch.setattr(throttle, "call", line.append)
    for piece in (b"GET / HTTP/1.1\r\n", b"A: ", b"b", b"c", b"d"):
        connection.data_received(piece)
        assert all(timer.cancel.called for timer in timers)
        now += 100.0  # at the throttle
        line.pop()()
        now += 3.0  # until more bytes come
    assert given == [10.0, 7.0, 4.0, 1.0, 0.0]
    connection.data_received(b"\r\n\r\n")
    line.pop()()  # the end of the head came before the timeout
    assert timers[-1].cancel.called
    assert connection._head_remaining_s is None  # the next head has its own
    connection.force_close()


async def test_request_that_waits_for_its_turn_is_answered() -> None:
    """The client has sent the request, and could not know whether to send it again."""
    came = asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoopThrottle, "_has_room", lambda _: came.set())
        async with limited("connections: 10") as kvferry:
            reader, writer = await kvferry.connect()
            writer.write(KEPT)
            async with asyncio.timeout(PATIENCE_S):
                await came.wait()
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        writer.close()


async def _never(_: web.BaseRequest) -> web.StreamResponse:
    raise AssertionError


@pytest.mark.parametrize(
    ("peername", "client"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1, 0, 0), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::"),
        (("2001:db8:1:2:ffff::", 1, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::"),
        (("::1", 1, 0, 0), "::"),
        ("/run/socket", ""),
        (None, ""),
    ],
)
def test_whose_connection_it_is(peername: object, client: str) -> None:
    assert client_of(peername) == client
