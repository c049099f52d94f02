"""Headers of one hop, and the kept part of a relayed response."""

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest
from aiohttp import HttpVersion11, web

from router.base.clock import MonotonicClock
from router.base.types import Outcome, RequestId
from router.config.schema import LimitsConfig
from router.engine.loop_throttle import LoopThrottle
from router.llama.http1 import Response
from router.web.server.call import Call
from router.web.server.relay import Capture, relay
from router.web.server.settings import Settings

MEGABYTE = 2**20
TURNSTILE = LoopThrottle(MonotonicClock())


@pytest.mark.parametrize("chunk_bytes", [1000, 2**16, MEGABYTE // 2])
def test_of_a_huge_one_the_two_ends(chunk_bytes: int) -> None:
    """The kept part is bounded, however long the response gets."""
    capture = Capture()
    sent = 0
    while sent < 20 * MEGABYTE:
        capture.add(sent.to_bytes(8, "big") * (chunk_bytes // 8))
        sent += chunk_bytes // 8 * 8
    kept = b"".join(capture.chunks)

    assert not capture.complete
    assert capture.size_bytes == sent
    assert len(kept) <= MEGABYTE + 2**16
    assert kept.startswith(bytes(8))
    assert kept.endswith((sent - chunk_bytes // 8 * 8).to_bytes(8, "big"))


class _Stuck(dict[object, object]):
    """A request; its client takes nothing of what is written."""

    path, method, version, keep_alive = "/completion", "POST", HttpVersion11, True

    def __init__(self, unsent: int = 5) -> None:
        super().__init__()
        self.unsent = unsent
        self.writer = self.transport = self
        self.aborted = False

    async def write(self, _: bytes) -> None:
        await asyncio.Event().wait()

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


class _Whole:
    """A backend's answer that has come completely."""

    status, reason, headers, is_complete = 200, "OK", [(b"Content-Length", b"100000")], True

    async def read(self) -> bytes:
        return b"x" * 100_000


class _Pipelining(_Stuck):
    """A request; its client sends many and reads none of the bytes kept by the transport."""

    async def write(self, data: bytes) -> None:
        self.unsent += len(data)

    async def drain(self) -> None:
        if self.unsent > 2**16:
            await asyncio.Event().wait()


class _Small(_Whole):
    status, reason, headers, is_complete = 200, "OK", [(b"Content-Length", b"2")], True

    async def read(self) -> bytes:
        return b"{}"


class _SmallStream(_Small):
    is_complete = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{}"


@pytest.mark.parametrize("upstream", [_Small(), _SmallStream()])
async def test_what_one_client_has_not_taken_is_bounded(upstream: object) -> None:
    settings = Settings(LimitsConfig.model_construct(idle_timeout_s=60.0, send_timeout_s=0.02))

    async def outcome(request: _Stuck) -> Outcome:
        call = Call(cast(web.BaseRequest, request), RequestId("r"))
        answer = cast(Response, upstream)
        return (await relay(call, answer, {}, settings, TURNSTILE))[1]

    assert await outcome(_Pipelining(unsent=2**15)) is Outcome.OK
    stuck = _Pipelining(unsent=2**16)
    async with asyncio.timeout(5):
        assert await outcome(stuck) is Outcome.CLIENT_GONE
    assert stuck.aborted
