"""A backend that records every byte and answers like a llama-server that is up.

The recorder has a strict parser of its own. Bytes that it cannot read are kept in `odd`, and a
second request that no client sent would be in `requests`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.support.servers.fake_wire import models_json

Raw = tuple[bytes, list[tuple[bytes, bytes]], bytes]
"""Request line, headers and body, as they came."""

_PROPS = {
    "default_generation_settings": {"n_ctx": 1024},
    "total_slots": 1,
    "model_path": "m.gguf",
    "chat_template": "",
    "build_info": "b1-x",
}
# Configuration of a router in front: nothing is tokenized or probed.
QUIET = "tokenizer: {mode: 'off'}\nprobe: {enabled: false}"
# Paths that the router itself requests when it attaches a backend.
OWN = {b"/health", b"/props", b"/v1/models", b"/lora-adapters", b"/slots", b"/metrics"}


def plain(body: bytes = b"{}", status: bytes = b"200 OK") -> bytes:
    """Return a whole answer."""
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@dataclass
class Recorder:
    """The recorder. `requests`: those of clients. `answers`: path to raw bytes; others get a
    default."""

    url: str = ""
    requests: list[Raw] = field(default_factory=list)
    came_on: list[int] = field(default_factory=list)  # for each request, its connection's number
    odd: list[bytes] = field(default_factory=list)
    answers: dict[bytes, bytes] = field(default_factory=dict)
    then_close: bool = False
    connections: int = 0
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def say(self, raw: bytes) -> None:
        """Send unrequested bytes on all connections; return once the other side has closed them."""
        writers = [writer for writer in self._writers if not writer.is_closing()]
        for writer in writers:
            writer.write(raw)
        for writer in writers:
            await writer.wait_closed()

    def _answer(self, path: bytes) -> bytes:
        bare = path.partition(b"?")[0]
        if bare in self.answers:
            return self.answers[bare]
        known: dict[bytes, object] = {
            b"/health": {"status": "ok"},
            b"/props": _PROPS,
            b"/v1/models": models_json("m", 1024),
            b"/lora-adapters": [],
            b"/slots": [{"id": 0, "n_ctx": 1024, "is_processing": False}],
        }
        return plain(json.dumps(known.get(bare, {})).encode())

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, request by request."""
        self.connections += 1
        self._writers.append(writer)
        number = self.connections
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await self._head(reader):
                line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
                headers = [(n, v.strip()) for n, _, v in (f.partition(b":") for f in fields)]
                lengths = [v for n, v in headers if n.lower() == b"content-length"]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                path = line.split(b" ")[1]
                if path.partition(b"?")[0] not in OWN:
                    self.requests.append((line, headers, body))
                    self.came_on.append(number)
                writer.write(self._answer(path))
                await writer.drain()
                if self.then_close and path.partition(b"?")[0] not in OWN:
                    break
        writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                self.odd.append(error.partial)
            return b""


@asynccontextmanager
async def recording() -> AsyncIterator[Recorder]:
    """Yield a recorder that listens."""
    recorder = Recorder()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    recorder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield recorder
    finally:
        server.close()


async def exchange(url: str, raw: bytes, patience_s: float = 10.0) -> bytes:
    """Send bytes over a new connection; return all that comes until the other side closes it."""
    host, _, port = url.partition("://")[2].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(raw)
        async with asyncio.timeout(patience_s):
            return await reader.read()
    finally:
        writer.close()
