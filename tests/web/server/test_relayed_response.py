"""The head of a relayed answer, for clients of HTTP/1.0 and of HTTP/1.1."""

from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import HttpVersion, HttpVersion11
from aiohttp.test_utils import make_mocked_request

from router.llama.http1 import Header, Response
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
    answer = RelayedAnswer(cast(Response, upstream), own or {})
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


async def test_headers_of_ours_replace_the_same_of_another_router() -> None:
    _, head, _ = await sent(LENGTH, (b"X-Kvferry-Slot", b"1"), own={"x-kvferry-slot": "0"})

    assert head[1:] == ["Content-Length: 2", "x-kvferry-slot: 0"]


async def test_nobody_puts_a_header_into_another() -> None:
    with pytest.raises(ValueError, match="line break"):
        await sent(LENGTH, own={"x-a": "b\r\nX-C: d"})
