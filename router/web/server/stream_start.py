"""Streams that begin before their backend is known: comments while a model is being loaded.

Clients and proxies give up on a connection that is silent for a minute or so; a large model takes
longer to load. The head is sent then, so a later error is an event of the stream.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import orjson
from aiohttp import HttpVersion11, web

from router.base.tasks import spawn
from router.web.server.error_responses import OWN_HEADERS, open_to_browsers

# llama-server pings after 30 s of silence (llama-server.md section 5.6). Chosen: below the shortest
# idle timeout of a proxy in common use, 30 s.
PING_S = 10.0
_COMMENT = b": the model is being loaded\n\n"


class EarlyStream(web.StreamResponse):
    """A stream of events, begun by the router."""

    def __init__(
        self, request: web.BaseRequest, headers: Mapping[str, str], *, anthropic: bool
    ) -> None:
        self._request = request
        own = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        super().__init__(headers=OWN_HEADERS | own | dict(headers))
        self.enable_chunked_encoding()
        self._anthropic = anthropic
        open_to_browsers(request, self)

    async def begin(self) -> None:
        """Send the head, once."""
        await self.prepare(self._request)

    async def ping(self) -> None:
        """Send a comment, which clients skip. Raises ConnectionError."""
        await self.begin()
        await self.write(_COMMENT)

    async def fail(self, error: Mapping[str, object]) -> None:
        """End the stream with an error in the dialect of its route. Raises ConnectionError."""
        await self.begin()
        event = b"event: error\n" if self._anthropic else b""
        told = {"type": "error", "error": error} if self._anthropic else {"error": error}
        await self.write(event + b"data: " + orjson.dumps(told) + b"\n\n")
        await self.write_eof()


# The stream of a request, if it has begun before its backend answers.
EARLY = web.RequestKey("early", EarlyStream)


@asynccontextmanager
async def kept_alive(
    request: web.BaseRequest, headers: Mapping[str, str], *, anthropic: bool
) -> AsyncIterator[None]:
    """Send comments to a client of a stream while the body of this context waits."""
    if request.version < HttpVersion11:
        yield
        return
    pings = spawn(_ping(request, headers, anthropic=anthropic), name="pings")
    try:
        yield
    finally:
        # Not awaited: a request cancelled here would keep the lease that it has just been given.
        pings.cancel()


async def _ping(request: web.BaseRequest, headers: Mapping[str, str], *, anthropic: bool) -> None:
    with suppress(ConnectionError):  # the client is gone: its request is cancelled
        while True:
            await asyncio.sleep(PING_S)
            stream = request.get(EARLY)
            if stream is None:
                stream = EarlyStream(request, headers, anthropic=anthropic)
                request[EARLY] = stream
            await stream.ping()
