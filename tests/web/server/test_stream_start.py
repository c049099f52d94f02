"""Heads of servers that become the head of a stream before there is an event."""

from typing import cast

import pytest
from aiohttp import web

from router.llama.http1 import Header
from router.web.server.relayed_response import AnswerHead
from router.web.server.stream_start import START, OwnHead, head_of


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
    head_of(cast(web.BaseRequest, {START: start}), {})(head)
    assert start.heads == ([head] if is_due else [])


def test_a_request_without_a_stream_has_no_start() -> None:
    head_of(cast(web.BaseRequest, {}), {})(OwnHead(()))
