"""The client's side of a request: nothing was sent yet, a stream begins, or an answer is sent."""

from collections.abc import Callable, Mapping
from http import HTTPStatus

from aiohttp import web

from router.llama.http1 import ignored
from router.llama.replies import error_of
from router.llama.wire import ParsedRequest
from router.web.server.relayed_response import AnswerHead, RelayedAnswer
from router.web.server.settings import Settings
from router.web.server.stream_start import StreamStart


class Sink:
    """What the client of one request gets. The owner of the request calls `end` at its end."""

    def __init__(self, http: web.BaseRequest) -> None:
        self._http = http
        self.start: StreamStart | None = None  # of a request for a stream
        self.answer: web.StreamResponse | None = None  # its head is on the way to the client

    def expect_stream(
        self, parsed: ParsedRequest, own: Mapping[str, str], settings: Settings
    ) -> None:
        """Begin to ping. `own`: the router's headers of a head that comes before any backend."""
        self.start = StreamStart(self._http, parsed, own, settings)

    def on_head(self, own: Mapping[str, str]) -> Callable[[AnswerHead], None]:
        """Return the callback that starts the client's stream when the server's head arrives."""
        start = self.start
        if start is None:
            return ignored

        def came(head: AnswerHead) -> None:
            if head.status == HTTPStatus.OK and _is_stream(head):
                start.head_due(head, own)

        return came

    async def take(self, head: AnswerHead, own: Mapping[str, str]) -> RelayedAnswer:
        """Return the answer to write to: the stream that has begun, or a new one for `head`.

        Raises ConnectionResetError.
        """
        begun = None if self.start is None else await self.start.hand_over()
        return RelayedAnswer(head, own) if begun is None else begun

    def give_back(self, answer: RelayedAnswer) -> None:
        """Go on as before `take`: no event of the answer was sent, and another may be."""
        if self.start is not None:
            self.start.resume(answer if answer.prepared else None)

    async def fail(self, response: web.Response) -> web.StreamResponse:
        """Return an error as the answer; in a stream that has begun, as its last event.

        Raises ConnectionError.
        """
        stream = None if self.start is None else await self.start.hand_over()
        if stream is None:
            return response
        assert self.start is not None
        assert isinstance(response.body, bytes)
        await self.start.fail(error_of(response.body, response.status))
        return stream

    @property
    def begun(self) -> web.StreamResponse | None:
        """Return the answer, or the stream without an event, if the client has got something."""
        if self.answer is None and self.start is not None:
            return self.start.stream
        return self.answer

    def abort(self) -> None:
        """Close the connection at once: a partial answer must not look complete."""
        if self._http.transport is not None:
            self._http.transport.abort()

    def end(self) -> None:
        """Send no more pings, and no head of the router's own."""
        if self.start is not None:
            self.start.end()


def _is_stream(head: AnswerHead) -> bool:
    """Return whether pings may follow a head: not in a body of a stated length."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in head.headers
    )
