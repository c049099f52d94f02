"""No client can make a backend see a request that a strict reader does not see.

Each case is sent raw, followed by one more request on the same connection: two readers that
disagree on the end of the first request disagree on the second. The strict reader is h11.
"""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

import h11
import pytest

from router.web.server.relayed_response import HOP_BY_HOP
from tests.support.servers.recorder import Recorder, exchange
from tests.support.servers.running_router import RunningRouter

LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
Seen = list[tuple[bytes, bytes, bytes]]
"""Method, target and body of each request."""


class We(Enum):
    """The router's reading of a case, compared with h11's."""

    AGREE = auto()  # the same requests, the last one too
    REFUSE = auto()  # 4xx, and the connection is closed; h11 refuses, too
    ARE_STRICTER = auto()  # 4xx, and the connection is closed; h11 reads on
    ARE_LENIENT = auto()  # h11 refuses; the case says why it is harmless


def post(fields: bytes, body: bytes, line: bytes = b"POST /x HTTP/1.1") -> bytes:
    return line + b"\r\nHost: x\r\n" + fields + b"\r\n" + body


def chunked(body: bytes, line: bytes = b"POST /x HTTP/1.1") -> bytes:
    return post(b"Transfer-Encoding: chunked\r\n", body, line)


def get(line: bytes, fields: bytes = b"Host: x\r\n") -> bytes:
    return line + b"\r\n" + fields + b"\r\n"


CHUNK = b"2\r\n{}\r\n0\r\n\r\n"
CL = b"Content-Length: 2\r\n"
UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"

CASES: dict[str, tuple[bytes, We]] = {
    # -- more than one length
    "length": (post(CL, b"{}"), We.AGREE),
    "length, then chunked": (post(CL + b"Transfer-Encoding: chunked\r\n", CHUNK), We.ARE_STRICTER),
    "chunked, then length": (post(b"Transfer-Encoding: chunked\r\n" + CL, CHUNK), We.ARE_STRICTER),
    "length twice": (post(CL + CL, b"{}"), We.ARE_STRICTER),
    "length as a list": (post(b"Content-Length: 2, 2\r\n", b"{}"), We.ARE_STRICTER),
    "two lengths": (post(CL + b"Content-Length: 3\r\n", b"{}"), We.REFUSE),
    "two lengths as a list": (post(b"Content-Length: 2, 3\r\n", b"{}"), We.REFUSE),
    "chunked twice": (post(b"Transfer-Encoding: chunked\r\n" * 2, CHUNK), We.REFUSE),
    # -- forms of a length
    "length +": (post(b"Content-Length: +2\r\n", b"{}"), We.REFUSE),
    "length -": (post(b"Content-Length: -2\r\n", b"{}"), We.REFUSE),
    "length with a space": (post(b"Content-Length: 1 0\r\n", b"0123456789"), We.REFUSE),
    "length with an underscore": (post(b"Content-Length: 1_0\r\n", b"0123456789"), We.REFUSE),
    "length in hex": (post(b"Content-Length: 0x2\r\n", b"{}"), We.REFUSE),
    "length with a point": (post(b"Content-Length: 2.0\r\n", b"{}"), We.REFUSE),
    "length with a zero": (post(b"Content-Length: 02\r\n", b"{}"), We.AGREE),
    "huge length": (post(b"Content-Length: 18446744073709551618\r\n", b"{}"), We.REFUSE),
    "no length": (post(b"Content-Length:\r\n", b"{}"), We.REFUSE),
    "length in other digits": (post("Content-Length: \u0662\r\n".encode(), b"{}"), We.REFUSE),
    "length by another name": (post(b"Content_Length: 2\r\n", b""), We.AGREE),
    "length before a colon and a space": (post(b"Content-Length : 2\r\n", b"{}"), We.REFUSE),
    # -- forms of Transfer-Encoding
    "chunked, in capitals": (post(b"TRANSFER-ENCODING: CHUNKED\r\n", CHUNK), We.AGREE),
    "chunked, after a tab": (post(b"Transfer-Encoding:\tchunked \r\n", CHUNK), We.AGREE),
    "chunked, identity": (post(b"Transfer-Encoding: chunked, identity\r\n", CHUNK), We.REFUSE),
    "identity, chunked": (post(b"Transfer-Encoding: identity, chunked\r\n", CHUNK), We.REFUSE),
    "gzip, chunked": (post(b"Transfer-Encoding: gzip, chunked\r\n", CHUNK), We.REFUSE),
    "identity": (post(b"Transfer-Encoding: identity\r\n" + CL, b"{}"), We.REFUSE),
    "xchunked": (post(b"Transfer-Encoding: xchunked\r\n", CHUNK), We.REFUSE),
    "chunkedx": (post(b"Transfer-Encoding: chunkedx\r\n", CHUNK), We.REFUSE),
    "quoted": (post(b'Transfer-Encoding: "chunked"\r\n', CHUNK), We.REFUSE),
    "after a vertical tab": (post(b"Transfer-Encoding:\x0bchunked\r\n", CHUNK), We.REFUSE),
    "after a zero byte": (post(b"Transfer-Encoding:\x00chunked\r\n", CHUNK), We.REFUSE),
    "after a line break": (post(b"Transfer-Encoding:\r\n chunked\r\n", CHUNK), We.ARE_STRICTER),
    "before a space": (post(b"Transfer-Encoding : chunked\r\n", CHUNK), We.REFUSE),
    "no encoding": (post(b"Transfer-Encoding:\r\n", b""), We.REFUSE),
    "by another name": (post(b"Transfer_Encoding: chunked\r\n", b""), We.AGREE),
    # -- chunks
    "chunks": (chunked(CHUNK), We.AGREE),
    "chunk in capitals": (chunked(b"A\r\n0123456789\r\n0\r\n\r\n"), We.AGREE),
    "chunk with zeros": (chunked(b"002\r\n{}\r\n0\r\n\r\n"), We.AGREE),
    "chunk with an extension": (chunked(b'2;a="b"\r\n{}\r\n0;c\r\n\r\n'), We.AGREE),
    "extension with a line feed": (chunked(b"2;a\nb\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "extension with a zero byte": (chunked(b"2;a=\x00\r\n{}\r\n0\r\n\r\n"), We.ARE_STRICTER),
    "chunk that is no number": (chunked(b"zz\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk 0x": (chunked(b"0x2\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk +": (chunked(b"+2\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk -": (chunked(b"-2\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk _": (chunked(b"0_2\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk before a space": (chunked(b"2 \r\n{}\r\n0\r\n\r\n"), We.ARE_STRICTER),
    "chunk after a space": (chunked(b" 2\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk of 2^64 and 2": (chunked(b"10000000000000002\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk and line feeds": (chunked(b"2\n{}\n0\n\n"), We.REFUSE),
    "chunk that is longer": (chunked(b"1\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "chunk without an end": (chunked(b"2\r\n{}0\r\n\r\n"), We.REFUSE),
    "chunk with another end": (chunked(b"2\r\n{}XX0\r\n\r\n"), We.REFUSE),
    "no chunk": (chunked(b"\r\n{}\r\n0\r\n\r\n"), We.REFUSE),
    "trailer": (chunked(b"2\r\n{}\r\n0\r\nA: b\r\n\r\n"), We.AGREE),
    "trailer with a length": (
        chunked(b"2\r\n{}\r\n0\r\nContent-Length: 99\r\n\r\n"),
        We.ARE_STRICTER,
    ),
    # -- lines
    "line feeds": (b"POST /x HTTP/1.1\nHost: x\n" + b"Content-Length: 2\n\n{}", We.ARE_STRICTER),
    "a line feed": (b"POST /x HTTP/1.1\r\nHost: x\n" + CL + b"\r\n{}", We.ARE_STRICTER),
    "carriage returns": (b"POST /x HTTP/1.1\rHost: x\rContent-Length: 2\r\r{}", We.REFUSE),
    "a zero byte in a value": (post(b"A: b\0c\r\n" + CL, b"{}"), We.REFUSE),
    "a zero byte in a name": (post(b"A\0: b\r\n" + CL, b"{}"), We.REFUSE),
    "a carriage return in a value": (post(b"A: b\rC: d\r\n" + CL, b"{}"), We.REFUSE),
    "a control character in a value": (post(b"A: b\x01\r\n" + CL, b"{}"), We.ARE_STRICTER),
    "Latin-1 in a value": (post(b"A: \xff\r\n" + CL, b"{}"), We.AGREE),
    "a value that goes on": (post(b"A: b\r\n c\r\n" + CL, b"{}"), We.ARE_STRICTER),
    "a space before a colon": (post(b"A : b\r\n" + CL, b"{}"), We.REFUSE),
    "a space before the first": (b"POST /x HTTP/1.1\r\n Host: x\r\n" + CL + b"\r\n{}", We.REFUSE),
    "no name": (post(b": b\r\n" + CL, b"{}"), We.REFUSE),
    "no colon": (post(b"Ab\r\n" + CL, b"{}"), We.REFUSE),
    # RFC 9112 section 2.2: a server SHOULD ignore empty lines before a request.
    "an empty line first": (b"\r\n" + get(b"GET /x HTTP/1.1"), We.ARE_LENIENT),
    # -- request lines
    "0.9": (b"GET /x\r\n\r\n", We.REFUSE),
    "HTTP/0.9": (get(b"GET /x HTTP/0.9"), We.ARE_STRICTER),
    "HTTP/1.2": (get(b"GET /x HTTP/1.2"), We.ARE_STRICTER),
    "HTTP/1.10": (get(b"GET /x HTTP/1.10"), We.REFUSE),
    "HTTP/2.0": (get(b"GET /x HTTP/2.0"), We.ARE_STRICTER),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", We.REFUSE),
    "http/1.1": (get(b"GET /x http/1.1"), We.REFUSE),
    # One request either way, with one target: llhttp skips the spaces.
    "two spaces": (get(b"GET  /x HTTP/1.1"), We.ARE_LENIENT),
    "tabs": (get(b"GET\t/x\tHTTP/1.1"), We.REFUSE),
    "a space in the target": (get(b"GET /x y HTTP/1.1"), We.REFUSE),
    "a control character in the target": (get(b"GET /x\x01 HTTP/1.1"), We.REFUSE),
    "UTF-8 in the target": (get("GET /ä HTTP/1.1".encode()), We.REFUSE),
    "a method in small letters": (get(b"get /x HTTP/1.1"), We.ARE_STRICTER),
    "an unknown method": (get(b"FOO /x HTTP/1.1"), We.ARE_STRICTER),
    # cpp-httplib decodes %uXXXX, and ends a path at the fragment.
    "an escape of another kind": (get(b"GET /slot%u0073 HTTP/1.1"), We.ARE_STRICTER),
    "an escape that is none": (get(b"GET /%zz HTTP/1.1"), We.ARE_STRICTER),
    "half an escape": (get(b"GET /%7 HTTP/1.1"), We.ARE_STRICTER),
    "a zero byte, escaped": (get(b"GET /x%00 HTTP/1.1"), We.ARE_STRICTER),
    "overlong UTF-8": (get(b"GET /%c0%af HTTP/1.1"), We.ARE_STRICTER),
    "a fragment before the query": (get(b"GET /slots#?x HTTP/1.1"), We.ARE_STRICTER),
    "escapes": (get(b"GET /%78%2f%C3%A4%25;?%u0069 HTTP/1.1"), We.AGREE),
    "whole URL": (get(b"GET http://y/x HTTP/1.1"), We.AGREE),
    "authority": (get(b"GET y:80 HTTP/1.1"), We.ARE_STRICTER),
    "CONNECT": (get(b"CONNECT y:80 HTTP/1.1"), We.REFUSE),
    "CONNECT to a path": (get(b"CONNECT /x HTTP/1.1"), We.REFUSE),
    "no host": (get(b"GET /x HTTP/1.1", b""), We.REFUSE),
    "two hosts": (get(b"GET /x HTTP/1.1", b"Host: x\r\nHost: y\r\n"), We.REFUSE),
    # -- HTTP/1.0: the connection ends after an answer, and nothing may follow a request
    "1.0": (get(b"GET /x HTTP/1.0", b""), We.ARE_STRICTER),
    "1.0 and chunked": (chunked(CHUNK, b"POST /x HTTP/1.0"), We.ARE_STRICTER),
    # -- several requests, and hop-by-hop headers
    "a body where there is none": (post(CL, b"{}", b"GET /x HTTP/1.1"), We.AGREE),
    "three at once": (get(b"GET /x HTTP/1.1") * 3, We.AGREE),
    "a body that looks like a request": (
        post(b"Content-Length: %d\r\n" % len(LAST), LAST),
        We.AGREE,
    ),
    "length of a hop": (post(b"Connection: content-length\r\n" + CL, b"{}"), We.AGREE),
    "chunked of a hop": (
        post(b"Connection: transfer-encoding\r\nTransfer-Encoding: chunked\r\n", CHUNK),
        We.AGREE,
    ),
    "host of a hop": (post(b"Connection: host\r\n" + CL, b"{}"), We.AGREE),
    "expectation": (post(b"Expect: 100-continue\r\n" + CL, b"{}"), We.AGREE),
}


@dataclass
class Reading:
    """h11's reading of some bytes: the requests, and whether h11 refused the rest."""

    requests: Seen
    refused: bool


def strict(raw: bytes) -> Reading:
    """Read `raw` with h11, which answers each request at once and declines every upgrade."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    connection.receive_data(b"")
    found: Seen = []
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                found.append((event.method, event.target, b""))
            elif isinstance(event, h11.Data):
                method, target, body = found[-1]
                found[-1] = (method, target, body + bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                if found[-1][0] == b"CONNECT":
                    return Reading(found[:-1], True)
                answer = h11.Response(status_code=200, headers=[("content-length", "0")])
                connection.send(answer)
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return Reading(found, False)
                connection.start_next_cycle()
            elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
                return Reading(found, False)
    except h11.RemoteProtocolError:
        whole = found[:-1] if found and connection.their_state is h11.ERROR else found
        return Reading(whole, True)


def seen_by(backend: Recorder) -> Seen:
    """Return the backend's requests; check the framing, and that no header is hop-by-hop."""
    assert backend.odd == []
    found = []
    for line, headers, body in backend.requests:
        method, target, version = line.split(b" ")
        names = [name.lower() for name, _ in headers]
        assert version == b"HTTP/1.1"
        assert names.count(b"host") == 1
        assert names.count(b"content-length") == (1 if body or method == b"POST" else 0)
        assert not HOP_BY_HOP & set(names)
        found.append((method, target, body))
    return found


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of all answers on a connection, as h11 reads them; 1xx left out."""
    client = h11.Connection(h11.CLIENT)
    found: list[int] = []
    client.receive_data(answer)
    client.receive_data(b"")
    while client.trailing_data[0]:
        client.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.ConnectionClosed):
                return found
            if isinstance(event, h11.Response):
                found.append(event.status_code)
        if client.their_state is not h11.DONE:
            assert client.trailing_data[0] == b"", "bytes after the last answer"
            return found
        client.start_next_cycle()
    return found


@pytest.mark.parametrize("we", We)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_backend_sees(backend: Recorder, kvferry: RunningRouter, we: We) -> None:
    wrong = []
    for name, (raw, what) in CASES.items():
        if what is not we:
            continue
        backend.requests.clear()
        answer = await exchange(kvferry.url, raw + LAST)
        reading, seen, told = strict(raw + LAST), seen_by(backend), statuses(answer)
        if not is_as_expected(we, reading, seen, told):
            wrong.append((name, reading.refused, seen, told))
    assert wrong == []


def is_as_expected(
    we: We, reading: Reading, seen: list[tuple[bytes, bytes, bytes]], told: list[int]
) -> bool:
    """Return whether the backend saw what a strict reader sees, or nothing."""
    match we:
        case We.AGREE:
            relative = [(m, t.removeprefix(b"http://y"), body) for m, t, body in reading.requests]
            return not reading.refused and seen == relative and told == [200] * len(seen)
        case We.ARE_LENIENT:
            return reading.refused and seen == [(b"GET", b"/x", b""), (b"GET", b"/last", b"")]
        case _:
            refused = len(told) == 1 and 400 <= told[0] < 500
            return reading.refused == (we is We.REFUSE) and seen == [] and refused


@pytest.mark.asyncio(loop_scope="module")
async def test_what_comes_with_a_refusal(backend: Recorder, kvferry: RunningRouter) -> None:
    """Bytes behind a refused request are not read; one before it in the packet is refused, too."""
    backend.requests.clear()
    good = get(b"GET /good HTTP/1.1")
    answer = await exchange(kvferry.url, good + post(b"Content-Length: +2\r\n", b"{}") + LAST)

    assert statuses(answer) == [400]
    assert seen_by(backend) == []


@pytest.mark.parametrize(
    "raw",
    [
        get(b"GET /x HTTP/1.1", b"Host: x\r\n" + UPGRADE),
        post(UPGRADE + CL, b"{}"),
        post(UPGRADE + b"Transfer-Encoding: chunked\r\n", CHUNK),
    ],
    ids=["none", "length", "chunked"],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_an_upgrade_is_declined(
    backend: Recorder, kvferry: RunningRouter, raw: bytes
) -> None:
    """The connection stays HTTP/1.1. JDK clients ask for HTTP/2 with each first request."""
    backend.requests.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(kvferry.url.rpartition(":")[2]))
    writer.write(raw)
    first = await reader.readuntil(b"{}")
    writer.write(LAST)
    answer = await reader.read()
    writer.close()

    assert statuses(first + answer) == [200, 200]
    assert seen_by(backend) == strict(raw + LAST).requests


@pytest.mark.parametrize(
    "raw",
    [
        get(b"GET /x HTTP/0.9"),
        get(b"GET /x HTTP/2.0"),
        b"GET /x\r\n\r\n",
        chunked(CHUNK, b"POST /x HTTP/1.0"),
        get(b"TRACE /x HTTP/1.1"),
        get(b"PURGE /x HTTP/1.1"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_with_nothing_behind_it(
    backend: Recorder, kvferry: RunningRouter, raw: bytes
) -> None:
    """Input that the parser rejects only when more follows is refused by itself, too."""
    backend.requests.clear()

    assert statuses(await exchange(kvferry.url, raw))[0] in (400, 405)
    assert seen_by(backend) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_headers_that_a_client_names_in_connection(
    backend: Recorder, kvferry: RunningRouter
) -> None:
    """Headers named in `Connection` are for the next hop alone: the router."""
    backend.requests.clear()
    fields = (
        b"Host: x\r\nConnection: close, X-Hop, x-OTHER\r\nx-hop: a\r\nX-Other: b\r\nX-Stays: c\r\n"
    )
    await exchange(kvferry.url, get(b"GET /x HTTP/1.1", fields))

    ((_, headers, _),) = backend.requests
    names = {name.lower() for name, _ in headers}
    assert names & {b"x-hop", b"x-other", b"x-stays"} == {b"x-stays"}


@pytest.mark.parametrize("path", [b"/completion", b"/v1/chat/completions", b"/embeddings"])
@pytest.mark.asyncio(loop_scope="module")
async def test_requests_that_take_a_slot(
    backend: Recorder, kvferry: RunningRouter, path: bytes
) -> None:
    """The router rewrites these bodies: the length is that of the body it sends."""
    backend.requests.clear()
    body = b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "id_slot": 0}'
    raw = post(b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    answer = await exchange(kvferry.url, raw.replace(b"/x", path, 1) + LAST)

    assert statuses(answer) == [200, 200]
    assert [target for _, target, _ in seen_by(backend)] == [path, b"/last"]
