"""HTTP methods, headers, targets and versions: all that a client can vary besides the body.

As in `test_parity.py`, each request goes to the same server directly and through the router. The
differences are in `docs/parity.md` and below.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import orjson
import pytest
import pytest_asyncio

from tests.support.parity.corpus import BASES
from tests.support.parity.pair import NOT_COMPARED, Pair, Seen, difference
from tests.support.parity.policies import POLICIES, paired

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("policy", POLICIES),
]

MAIN = ("/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
JSON = {"Content-Type": "application/json"}
PAGE = {"Origin": "http://localhost:3000"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pairs(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Pair]]:
    async with paired(server_argv, tmp_path_factory.mktemp("kv")) as made:
        yield made


def body_of(path: str, *, stream: bool = False) -> bytes:
    return orjson.dumps(BASES[path] | {"stream": stream})


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"])
async def test_methods(pairs: dict[str, Pair], policy: str, method: str) -> None:
    for path in MAIN:
        for body in (b"", body_of(path)):
            direct, routed = await pairs[policy].ask(method, path, data=body, headers=PAGE)
            assert difference(direct, routed) == "", (path, body)
            assert routed.headers.get("Content-Length") == direct.headers.get("Content-Length")


async def test_preflight(pairs: dict[str, Pair], policy: str) -> None:
    """A browser's preflight, sent before a page's requests, is answered alike."""
    for path in MAIN:
        for method in ("POST", "DELETE"):
            asked = {
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
            }
            direct, routed = await pairs[policy].ask("OPTIONS", path, headers=PAGE | asked)
            assert difference(direct, routed) == ""
            assert routed.headers["Access-Control-Allow-Origin"] == PAGE["Origin"]


HEADERS: list[dict[str, str]] = [
    {"Accept-Encoding": "gzip"},
    {"Accept-Encoding": "gzip, deflate, br, zstd"},
    {"Accept-Encoding": "identity;q=0"},
    {"Accept": "text/event-stream"},
    {"Connection": "close"},
    {"Expect": "100-continue"},
    {"Range": "bytes=0-9"},
    {"If-None-Match": "*"},
    PAGE,
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_headers(pairs: dict[str, Pair], policy: str, stream: bool) -> None:
    for path in MAIN:
        for more in HEADERS:
            raw = body_of(path, stream=stream)
            direct, routed = await pairs[policy].ask("POST", path, data=raw, headers=JSON | more)
            assert difference(direct, routed) == "", (path, more)


TARGETS = ["?", "?a=b", "?stream=true", "?beta=true", "?model=another", "?x=%20+%26&x=", "/", "//"]
TARGETS += ["/?a=b", "/x", "%2f", "%20"]


async def test_targets(pairs: dict[str, Pair], policy: str) -> None:
    """A query changes nothing, and a path with anything appended is no route."""
    for path in MAIN:
        for more in TARGETS:
            direct, routed = await pairs[policy].ask("POST", path + more, data=body_of(path))
            assert difference(direct, routed) == "", (path, more)
            assert (direct.status == 200) == more.startswith("?")


@dataclass(frozen=True)
class Said:
    """Everything that came on a connection until its end."""

    version: bytes
    seen: Seen

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Return the headers in order, without hop-by-hop headers, date and length."""
        return list(self.seen.compared_headers.items())


async def say(base: str, raw: bytes) -> Said:
    """Send bytes on a connection; return everything received until its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    version, status, *_ = first.split(b" ")
    headers = dict(line.decode().split(": ", 1) for line in lines)
    if "Transfer-Encoding" in headers:
        body = _without_chunks(body)
    return Said(version, Seen(int(status), headers, body))


def _without_chunks(raw: bytes) -> bytes:
    found = []
    while raw:
        size, _, rest = raw.partition(b"\r\n")
        found.append(rest[: int(size, 16)])
        raw = rest[int(size, 16) + 2 :]
    return b"".join(found)


def request(path: str, body: bytes, *, version: str = "1.1", connection: str = "close") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nConnection: {connection}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_closes(pairs: dict[str, Pair], policy: str, stream: bool) -> None:
    """The headers are the same in the same order, and the connection ends."""
    for path in MAIN:
        for body in (body_of(path, stream=stream), b"{}"):
            raw = request(path, body)
            direct = await say(pairs[policy].direct, raw)
            routed = await say(pairs[policy].routed, raw)
            assert difference(direct.seen, routed.seen) == "", (path, body)
            assert direct.lines == routed.lines
            assert direct.seen.headers["Connection"] == routed.seen.headers["Connection"] == "close"


async def test_streams_that_can_be_resumed(pairs: dict[str, Pair], policy: str) -> None:
    """Requests about resumable streams are answered alike.

    (1) A stream that no client requested is unknown. (2) With `passthrough` a requested stream is
    known on both ways; otherwise only one that was requested from the server itself.
    """
    pair, name = pairs[policy], f"wire {policy}"
    target = f"/v1/stream?conv_id={name.replace(' ', '%20')}"
    lookups: list[object] = [{"conversation_ids": [name]}, {"conversation_ids": 7}, {}, []]
    for method in ("GET", "HEAD"):
        assert difference(*await pair.ask(method, "/v1/stream")) == ""
        assert difference(*await pair.ask(method, target)) == ""
    for body in lookups:
        assert difference(*await pair.ask("POST", "/v1/streams/lookup", json=body)) == ""
    path = "/v1/chat/completions"
    headers = JSON | {"X-Conversation-Id": name}
    base = pair.routed if policy == "passthrough" else pair.direct
    whole = await pair.one(base, "POST", path, data=body_of(path, stream=True), headers=headers)
    for more in ("", "&from=10", "&from=x"):
        direct, routed = await pair.ask("GET", target + more)
        assert difference(direct, routed) == ""
        if more == "&from=10":
            assert direct.body == whole.body[10:]
    for body in lookups:
        direct, routed = await pair.ask("POST", "/v1/streams/lookup", json=body)
        assert direct.body == routed.body
    routed = await pair.one(pair.routed, "DELETE", target)
    assert (routed.status, routed.body) == (204, b"")
    assert (await pair.one(pair.direct, "GET", target)).status == 404


# --- what differs, as docs/parity.md lists it -----------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_http_1_0(pairs: dict[str, Pair], policy: str, stream: bool) -> None:
    """The router answers in HTTP/1.0.

    The server answers in HTTP/1.1 with chunked streams, which such a client cannot read.
    """
    for path in MAIN:
        raw = request(path, body_of(path, stream=stream), version="1.0")
        direct = await say(pairs[policy].direct, raw)
        routed = await say(pairs[policy].routed, raw)
        assert (direct.version, routed.version) == (b"HTTP/1.1", b"HTTP/1.0")
        assert ("Transfer-Encoding" in direct.seen.headers) is stream
        assert "Transfer-Encoding" not in routed.seen.headers
        assert direct.lines == routed.lines
        assert direct.seen.masked == routed.seen.masked


@pytest.mark.parametrize(
    ("raw", "statuses"),
    [
        (b"TRACE /completion HTTP/1.1\r\nHost: x\r\n\r\n", (400, 405)),
        (b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n", (200, 400)),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", (200, 400)),
        (b"GET http://x/health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", (404, 200)),
    ],
    ids=["TRACE", "no Host", "OPTIONS *", "a whole URL"],
)
async def test_http_as_it_is_written(
    pairs: dict[str, Pair], policy: str, raw: bytes, statuses: tuple[int, int]
) -> None:
    direct = await say(pairs[policy].direct, raw)
    routed = await say(pairs[policy].routed, raw)
    assert (direct.seen.status, routed.seen.status) == statuses


async def test_the_connection_is_the_clients(pairs: dict[str, Pair], policy: str) -> None:
    """The router keeps the client's connection after streams and errors.

    The server ends its connection then; the router drops the server's `Keep-Alive`.
    """
    assert {"connection", "keep-alive"} <= NOT_COMPARED
    path = "/v1/chat/completions"
    for body in (body_of(path), body_of(path, stream=True), b"{}"):
        port = int(pairs[policy].routed.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(path, body, connection="keep-alive"))
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"keep-alive" not in head.lower()
        writer.write(request(path, body))
        rest = await reader.read()
        assert rest.count(b"HTTP/1.1 ") == 1, "the second answer came on the same connection"
        writer.close()


async def test_a_slash_too_many(pairs: dict[str, Pair], policy: str) -> None:
    """A path with a trailing slash is no route, even with a body that is no JSON.

    Software in between may drop the slash, so the router reads the body.
    """
    for path in MAIN:
        direct, routed = await pairs[policy].ask("POST", path + "/", data=b"{bad")
        assert (direct.status, routed.status) == (404, 404 if policy == "passthrough" else 400)
