"""Heads of servers that become the head of a stream before there is an event."""

from typing import cast

import pytest
from aiohttp import web

from router.llama.http1 import Header
from router.web.server.relayed_response import AnswerHead
from router.web.server.sink import Sink
from router.web.server.stream_start import OwnHead, StreamStart


class Due:
    """A start that notes which heads are due."""

    def __init__(self) -> None:
        self.heads: list[AnswerHead] = []

    def head_due(self, head: AnswerHead, _own: object) -> None:
        self.heads.append(head)


@pytest.mark.parametrize(
    ("status", "headers", "is_due"),
    [
        (200, ((b"content-type", b"text/event-stream; charset=utf-8"),), True),
        (200, ((b"Content-Type", b"application/json"), (b"Content-Length", b"9")), False),
        (200, (), False),
        (400, ((b"Content-Type", b"text/event-stream"),), False),
    ],
)
def test_only_the_head_of_a_stream(status: int, headers: tuple[Header, ...], is_due: bool) -> None:
    """Pings would end up in a body of a stated length."""
    start, head = Due(), OwnHead(headers, status)
    sink = Sink(cast(web.BaseRequest, None))
    sink.start = cast(StreamStart, start)
    sink.on_head({})(head)
    assert start.heads == ([head] if is_due else [])


def test_a_request_without_a_stream_has_no_start() -> None:
    Sink(cast(web.BaseRequest, None)).on_head({})(OwnHead(()))
