"""The client side of a measurement: blocking sockets, so that little of a time is the client's own.

A request is one write on a kept connection, as from a client library with a pool.
"""

import http.client
import json
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

Json = dict[str, Any]
TIMEOUT_S = 600.0
# Servers drop idle connections after 5 s: reconnect before the clock starts.
_STALE_S = 2.0


class WrongAnswerError(RuntimeError):
    """An answer that a measurement cannot use."""


@dataclass
class Reply:
    """An answer and its times, in seconds since the request was written."""

    body: bytes
    first_byte_s: float
    total_s: float

    def json(self) -> Json:
        """Return the parsed body, which must be JSON."""
        value: Json = json.loads(self.body)
        return value

    @property
    def server_s(self) -> float:
        """Return the server's own seconds for prompt and generation. Not for streams."""
        timings = self.json().get("timings") or {}
        return float(timings.get("prompt_ms", 0.0) + timings.get("predicted_ms", 0.0)) / 1000


def until(condition: Callable[[], bool]) -> None:
    """Ask again every tenth of a second until it is so. Raises WrongAnswerError after a minute."""
    pause, deadline = threading.Event(), perf_counter() + 60.0
    while not condition():
        if perf_counter() > deadline:
            raise WrongAnswerError("what was waited for did not come in a minute")
        pause.wait(0.1)


class Client:
    """One connection at a time to one server."""

    def __init__(self, url: str, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Send `headers` with every request."""
        self._headers = headers
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port or 80
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0

    def post(self, path: str, value: Json) -> Reply:
        """Send a POST with JSON."""
        return self.send("POST", path, json.dumps(value).encode())

    def get(self, path: str) -> Reply:
        """Send a GET."""
        return self.send("GET", path, None)

    def send(self, method: str, path: str, body: bytes | None) -> Reply:
        """Send one request. Raises WrongAnswerError unless the answer is a 200."""
        connection = self._connected()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        headers |= self._headers
        start = perf_counter()
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        chunks = [response.read1(1 << 16)]
        first_byte_s = perf_counter() - start
        while chunks[-1]:
            chunks.append(response.read1(1 << 16))
        total_s = perf_counter() - start
        response.close()  # `read1` leaves it open if the length was known
        self._used = perf_counter()
        # llama-server closes after every stream without saying so: close for all contenders.
        streamed = (response.getheader("Content-Type") or "").startswith("text/event-stream")
        if streamed or response.will_close or response.status != 200:
            self.close()
        reply = Reply(b"".join(chunks), first_byte_s, total_s)
        if response.status != 200:
            raise WrongAnswerError(f"{method} {path}: {response.status} {reply.body[:300]!r}")
        return reply

    def _connected(self) -> http.client.HTTPConnection:
        if self._connection is not None and perf_counter() - self._used > _STALE_S:
            self.close()
        if self._connection is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
            connection.connect()
            self._connection = connection
        return self._connection

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@dataclass
class Stream:
    """The result of one stream: its events, and the times of the reads that brought some."""

    n_events: int = 0
    reads_s: list[float] = field(default_factory=list)
    status: bytes = b""
    tail: bytes = b""

    @property
    def gaps_s(self) -> list[float]:
        """Return the seconds between consecutive reads that brought events."""
        pairs = zip(self.reads_s, self.reads_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs]


def stream_all(url: str, path: str, bodies: list[Json]) -> list[Stream]:
    """Send `bodies` at once, each on a connection of its own, and read all streams to the end.

    Raises WrongAnswerError unless each answer is a 200 that ends with [DONE].
    """
    parts = urlsplit(url)
    found: list[Stream] = []
    with selectors.DefaultSelector() as selector:
        for body in bodies:
            raw = json.dumps(body).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
            )
            connection = socket.create_connection((parts.hostname, parts.port or 80), TIMEOUT_S)
            connection.sendall(head.encode() + raw)
            stream = Stream()
            found.append(stream)
            selector.register(connection, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise WrongAnswerError(f"no byte of any stream for {TIMEOUT_S:.0f} s")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                if not _read(key.fileobj, key.data):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    for stream in found:
        if b" 200 " not in stream.status or b"data: [DONE]" not in stream.tail:
            raise WrongAnswerError(f"{stream.status!r} ... {stream.tail[-200:]!r}")
    return found


def _read(connection: socket.socket, stream: Stream) -> bool:
    data = connection.recv(1 << 16)
    if not stream.status:
        stream.status = data.partition(b"\r\n")[0]
    # A read may end within `data: `: count it in the read that completes it.
    seen = stream.tail[-5:] + data
    if n_events := seen.count(b"data: "):
        stream.n_events += n_events
        stream.reads_s.append(perf_counter())
    stream.tail = (stream.tail + data)[-300:]
    return bool(data)
