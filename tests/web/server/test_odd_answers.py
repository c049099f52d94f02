"""Odd answers of a backend: the client gets one answer or an error, never two.

A client never gets a part of another client's answer, and the connection to the backend is not
used again.
"""

import pytest

from tests.support.servers.recorder import Recorder, exchange, plain
from tests.support.servers.running_router import RunningRouter
from tests.web.server.test_smuggling import get, statuses

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"Content-Length: 2\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNK = b"2\r\n{}\r\n0\r\n\r\n"
SECOND = plain(b"stolen")
ASK = get(b"GET /odd HTTP/1.1")
LAST = get(b"GET /last HTTP/1.1", b"Host: x\r\nConnection: close\r\n")

# Invalid answers: the client gets 502.
BROKEN = {
    "length and chunked": OK + LENGTH + CHUNKED + b"\r\n" + CHUNK,
    "chunked and length": OK + CHUNKED + LENGTH + b"\r\n" + CHUNK,
    "length twice": OK + LENGTH + LENGTH + b"\r\n{}",
    "two lengths": OK + LENGTH + b"Content-Length: 3\r\n\r\n{}",
    "length as a list": OK + b"Content-Length: 2, 2\r\n\r\n{}",
    "length +": OK + b"Content-Length: +2\r\n\r\n{}",
    "no length": OK + b"Content-Length:\r\n\r\n{}",
    "chunked twice": OK + CHUNKED + CHUNKED + b"\r\n" + CHUNK,
    "chunked, identity": OK + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNK,
    "gzip, chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNK,
    "identity": OK + b"Transfer-Encoding: identity\r\n\r\n{}",
    "xchunked": OK + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNK,
    "after a line break": OK + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNK,
    "chunk that is no number": OK + CHUNKED + b"\r\nzz\r\n{}\r\n0\r\n\r\n",
    "line feeds": b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
    "a line feed in a value": OK + b"A: b\nSet-Cookie: c\r\n" + LENGTH + b"\r\n{}",
    "a carriage return in a value": OK + b"A: b\rSet-Cookie: c\r\n" + LENGTH + b"\r\n{}",
    "a zero byte in a value": OK + b"A: b\0\r\n" + LENGTH + b"\r\n{}",
    "a value that goes on": OK + b"A: b\r\n c\r\n" + LENGTH + b"\r\n{}",
    "a space before a colon": OK + b"Content-Length : 2\r\n\r\n{}",
    "a line feed in the reason": b"HTTP/1.1 200 O\nA: b\r\n" + LENGTH + b"\r\n{}",
    "no status": b"HTTP/1.1 000 OK\r\n" + LENGTH + b"\r\n{}",
    "another status": b"HTTP/1.1 999 OK\r\n" + LENGTH + b"\r\n{}",
    "switching protocols": (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n" + SECOND
    ),
    "switching, without a word": b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + SECOND,
    "body of a 100": b"HTTP/1.1 100 Continue\r\n" + LENGTH + b"\r\n{}" + SECOND,
    "no HTTP": b"hello\r\n\r\n",
    "ICY": b"ICY 200 OK\r\n\r\n{}",
}
# Raw bytes, and the status and body of the one answer that the client gets.
ONE: dict[str, tuple[bytes, int, bytes]] = {
    "another answer": (plain(b"mine") + SECOND, 200, b"mine"),
    "half an answer": (plain(b"mine") + SECOND[:30], 200, b"mine"),
    "an answer without a body": (plain(b"mine") + plain(b""), 200, b"mine"),
    "no answer": (plain(b"mine") + b"more", 200, b"mine"),
    "an empty line": (plain(b"mine") + b"\r\n", 200, b"mine"),
    "another after chunks": (OK + CHUNKED + b"\r\n" + CHUNK + SECOND, 200, b"{}"),
    "100 and then": (b"HTTP/1.1 100 Continue\r\nA: b\r\n\r\n" + plain(b"mine"), 200, b"mine"),
    "103 with chunked": (
        b"HTTP/1.1 103 Early Hints\r\n" + CHUNKED + b"\r\n" + plain(b"mine"),
        200,
        b"mine",
    ),
    "204 with a body": (b"HTTP/1.1 204 No Content\r\n" + LENGTH + b"\r\n{}", 204, b""),
    "204 with an answer": (b"HTTP/1.1 204 No Content\r\n\r\n" + SECOND, 204, b""),
    "304 with a body": (b"HTTP/1.1 304 Not Modified\r\n" + LENGTH + b"\r\n{}", 304, b""),
    "trailer": (OK + CHUNKED + b"\r\n2\r\n{}\r\n0\r\nSet-Cookie: a\r\n\r\n", 200, b"{}"),
    "headers of a hop": (
        OK + b"Connection: close, x-hop\r\nX-Hop: a\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n{}",
        200,
        b"{}",
    ),
}


def first(answer: bytes) -> tuple[bytes, bytes]:
    """Return head and body of the first answer on a connection; chunks are joined."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    if b"Transfer-Encoding: chunked" in head:
        body = b""
        while size := int(rest.partition(b"\r\n")[0], 16):
            rest = rest.partition(b"\r\n")[2]
            body, rest = body + rest[:size], rest[size + 2 :]
        return head, body
    lengths = [line[16:] for line in head.split(b"\r\n") if line.startswith(b"Content-Length: ")]
    return head, rest[: int(lengths[0])] if lengths else b""


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_no_answer(backend: Recorder, kvferry: RunningRouter, name: str) -> None:
    backend.answers = {b"/odd": BROKEN[name]}
    answer = await exchange(kvferry.url, ASK + LAST)

    assert statuses(answer) == [502, 200]
    assert b"stolen" not in answer
    assert b"Set-Cookie" not in answer
    assert answer.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize("name", ONE)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_more_than_an_answer(
    backend: Recorder, kvferry: RunningRouter, name: str
) -> None:
    raw, status, wanted = ONE[name]
    backend.answers = {b"/odd": raw}
    answer = await exchange(kvferry.url, ASK + LAST)

    head, body = first(answer)
    assert statuses(answer) == [status, 200]
    assert body == wanted
    assert b"stolen" not in answer
    assert b"Set-Cookie" not in head
    assert b"X-Hop" not in head
    assert b"Upgrade" not in head
    assert answer.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize("more", [SECOND, SECOND[:30], plain(b""), b"more"])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_connection_that_said_too_much(
    backend: Recorder, kvferry: RunningRouter, more: bytes
) -> None:
    """The connection is not used again: the surplus bytes would answer the next request."""
    backend.answers = {b"/odd": plain(b"mine") + more}
    assert (await kvferry.get("/odd")).body == b"mine"
    assert (await kvferry.get("/next")).body == b"{}"

    first, second = backend.came_on[-2:]
    assert first != second


@pytest.mark.asyncio(loop_scope="module")
async def test_a_connection_that_is_used_again(backend: Recorder, kvferry: RunningRouter) -> None:
    """Connections are reused by default; otherwise the test above would prove nothing."""
    backend.answers = {}
    for _ in range(5):
        assert (await kvferry.get("/next")).body == b"{}"

    assert len(set(backend.came_on[-5:])) < 5


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_for_a_head(backend: Recorder, kvferry: RunningRouter) -> None:
    backend.answers = {b"/odd": plain(b"mine")}
    answer = await exchange(kvferry.url, ASK.replace(b"GET", b"HEAD") + LAST)

    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"Content-Length: 4" in head
    assert statuses(rest) == [200]
    assert b"mine" not in answer


@pytest.mark.parametrize("late", [SECOND, SECOND[:30], b"x", b"\r\n"])
@pytest.mark.asyncio(loop_scope="module")
async def test_bytes_on_a_connection_that_is_kept(
    backend: Recorder, kvferry: RunningRouter, late: bytes
) -> None:
    """The bytes were not requested: the next request must not get them."""
    backend.answers = {}
    assert (await kvferry.get("/first")).body == b"{}"
    await backend.say(late)
    before = backend.connections

    assert (await kvferry.get("/next")).body == b"{}"
    assert backend.connections > before


@pytest.mark.parametrize("sent", [plain(b"whole")[:-2], OK + CHUNKED + b"\r\n5\r\nwho"])
@pytest.mark.asyncio(loop_scope="module")
async def test_half_an_answer(backend: Recorder, kvferry: RunningRouter, sent: bytes) -> None:
    """The head has been sent on already.

    The connection is broken off, so that later bytes are not taken for the rest of the answer.
    """
    backend.answers, backend.then_close = {b"/odd": sent}, True
    answer = await exchange(kvferry.url, ASK + LAST)
    backend.then_close = False

    assert answer.count(b"HTTP/1.1") == 1
    assert answer.rstrip(b"\r\n").endswith(b"who")
    assert not answer.endswith(b"0\r\n\r\n")
