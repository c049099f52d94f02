"""Heads of servers that become the head of a stream before there is an event."""

from typing import cast

import pytest
from aiohttp.test_utils import make_mocked_request

from router.llama.http1 import Header, Response
from router.llama.routes import Shape
from router.llama.wire import parse_request
from router.web.server.settings import Settings
from router.web.server.sink import OwnHead, Sink


@pytest.mark.parametrize(
    ("status", "headers", "is_due"),
    [
        (200, ((b"content-type", b"text/event-stream; charset=utf-8"),), True),
        (200, ((b"Content-Type", b"application/json"), (b"Content-Length", b"9")), False),
        (200, (), False),
        (400, ((b"Content-Type", b"text/event-stream"),), False),
    ],
)
async def test_only_the_head_of_a_stream(
    status: int, headers: tuple[Header, ...], is_due: bool
) -> None:
    """Pings would end up in a body of a stated length."""
    sink = Sink(make_mocked_request("POST", "/completion"))
    sink.expect_stream(parse_request(Shape.COMPLETION, {"stream": True}), {}, Settings())
    came = sink.on_head({})
    assert came is not None
    came(cast(Response, OwnHead(headers, status)))
    assert (sink._head_timer is not None) is is_due
    sink.end()


def test_a_request_without_a_stream_has_no_start() -> None:
    assert Sink(make_mocked_request("POST", "/completion")).on_head({}) is None
