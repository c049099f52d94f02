"""The head of a relayed answer, for clients of HTTP/1.0 and of HTTP/1.1."""

from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import HttpVersion, HttpVersion10, HttpVersion11
from aiohttp.test_utils import make_mocked_request

from router.llama.http1 import Header
from router.llama.server_client import RelayedResponse
from router.web.server.relayed_response import RelayedAnswer

LENGTH = (b"Content-Length", b"2")


class Writer:
    """A writer that records what would go to the client, write by write."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.written.append(data)


async def sent(
    *headers: Header,
    body: tuple[bytes, ...] = (b"ok",),
    status: int = 200,
    method: str = "POST",
    version: HttpVersion = HttpVersion11,
    client: dict[str, str] | None = None,
    own: dict[str, str] | None = None,
) -> tuple[bool, list[str], bytes]:
    """Return whether the connection stays open, the head's lines without Date, and the rest."""
    upstream = SimpleNamespace(status=status, reason="Fine", headers=list(headers))
    answer = RelayedAnswer(cast(RelayedResponse, upstream), own or {})
    writer = Writer()
    request = make_mocked_request(method, "/", client, version=version, writer=writer)
    await answer.prepare(request)
    assert answer.prepared
    for chunk in body:
        await answer.write(chunk)
    await answer.write_eof()
    await answer.write_eof()  # aiohttp calls it a second time
    head, _, rest = b"".join(writer.written).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    assert [line for line in lines if line.startswith("Date: ")] or (b"Date", b"x") in headers
    return answer.keep_alive, [line for line in lines if not line.startswith("Date: ")], rest


async def test_what_the_backend_says_of_its_own_hop_stays_behind() -> None:
    keeps, head, rest = await sent(
        LENGTH, (b"Keep-Alive", b"timeout=5"), (b"CONNECTION", b"close"), (b"X-A", b"\xe4")
    )

    assert head == ["HTTP/1.1 200 Fine", "Content-Length: 2", "X-A: ä"]
    assert (keeps, rest) == (True, b"ok")


async def test_head_and_body_are_one_write() -> None:
    upstream = SimpleNamespace(status=200, reason="OK", headers=[LENGTH])
    answer, writer = RelayedAnswer(cast(RelayedResponse, upstream), {}), Writer()
    await answer.prepare(make_mocked_request("GET", "/", writer=writer))
    await answer.write_eof(b"ok")

    assert len(writer.written) == 1


async def test_headers_of_ours_replace_the_same_of_another_router() -> None:
    _, head, _ = await sent(LENGTH, (b"X-Kvferry-Slot", b"1"), own={"x-kvferry-slot": "0"})

    assert head[1:] == ["Content-Length: 2", "x-kvferry-slot: 0"]


async def test_a_body_of_unknown_length_goes_in_chunks() -> None:
    keeps, head, rest = await sent(body=(b"ok", b"", b"0123456789abcdef"))

    assert head[1:] == ["Transfer-Encoding: chunked"]
    assert (keeps, rest) == (True, b"2\r\nok\r\n10\r\n0123456789abcdef\r\n0\r\n\r\n")


async def test_to_an_old_client_it_ends_with_the_connection() -> None:
    keeps, head, rest = await sent(
        version=HttpVersion10, client={"Connection": "keep-alive"}, body=(b"o", b"k")
    )

    assert (keeps, head, rest) == (False, ["HTTP/1.0 200 Fine"], b"ok")


@pytest.mark.parametrize(
    ("version", "connection", "said"),
    [
        (HttpVersion11, "keep-alive", []),
        (HttpVersion11, "close", ["Connection: close"]),
        (HttpVersion10, "close", []),
    ],
)
async def test_the_connection_stays_open_as_the_client_wants(
    version: HttpVersion, connection: str, said: list[str]
) -> None:
    closing = connection == "close"
    upstream = SimpleNamespace(status=200, reason="OK", headers=[LENGTH])
    answer, writer = RelayedAnswer(cast(RelayedResponse, upstream), {}), Writer()
    request = make_mocked_request("GET", "/", version=version, writer=writer, closing=closing)
    await answer.prepare(request)
    await answer.write_eof(b"ok")
    head = b"".join(writer.written).partition(b"\r\n\r\n")[0].decode().split("\r\n")

    assert answer.keep_alive is not closing
    assert [line for line in head if line.startswith("Connection")] == said


@pytest.mark.parametrize(("method", "status"), [("HEAD", 200), ("GET", 204), ("GET", 304)])
async def test_what_has_no_body(method: str, status: int) -> None:
    """An answer to HEAD has the length of the answer to GET."""
    _, head, rest = await sent(LENGTH, method=method, status=status, body=())

    assert head[1:] == (["Content-Length: 2"] if method == "HEAD" else [])
    assert rest == b""


async def test_nobody_puts_a_header_into_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        await sent(LENGTH, own={"x-a": "b\r\nX-C: d"})
