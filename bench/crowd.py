"""Many concurrent clients, each on a connection of its own, and how their requests ended."""

import asyncio
import random
import re
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import orjson

from tests.support.servers.fake_wire import generate

PATIENCE_S = 150.0
_READ = 64 * 1024
_CHUNK = re.compile(rb"([0-9a-fA-F]+)\r\n")


@dataclass(frozen=True)
class Client:
    """A client with one request for `n_tokens`; it knows the right answer.

    `expected`: the right text of a real server, where another text of the same length is `whole`;
    None: the fake's answer. `rate`: bytes that the client reads a second. `takes`: bytes after
    which reading stops. `stays_s`: seconds until the client disconnects; None: after the answer.
    """

    prompt: str
    n_tokens: int
    expected: str | None = None
    rate: int | None = None
    takes: int | None = None
    stays_s: float | None = None

    async def ask(self, url: str, go: asyncio.Event | None = None) -> str:
        """Connect, send the request once `go` is set, and return how it ended.

        The ending is `right`, `whole`, `wrong`, a status, `left`, `silent` or `broken (...)`.
        """
        answer = bytearray()
        try:
            async with asyncio.timeout(self.stays_s):
                async with asyncio.timeout(PATIENCE_S):
                    await self._ask(url, answer, go)
        except TimeoutError:
            return "left" if self.stays_s is not None else "silent"
        except OSError as error:
            return f"broken ({type(error).__name__})"
        return self._judge(bytes(answer))

    async def _ask(self, url: str, answer: bytearray, go: asyncio.Event | None) -> None:
        parts, loop = urlsplit(url), asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setblocking(False)
            if self.rate or self.takes is not None:  # keep the kernel from reading ahead
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(connection, (parts.hostname, parts.port))
            if go is not None:
                await go.wait()
            await loop.sock_sendall(connection, self._raw())
            while self.takes is None or len(answer) < self.takes:
                data = await loop.sock_recv(connection, self.rate or _READ)
                if not data:
                    return
                answer += data
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
            await asyncio.Event().wait()  # stay connected and read nothing

    def _raw(self) -> bytes:
        body = orjson.dumps(
            {
                "prompt": self.prompt,
                "n_predict": self.n_tokens,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
            }
        )
        head = (
            "POST /completion HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _judge(self, answer: bytes) -> str:
        head, _, body = answer.partition(b"\r\n\r\n")
        status = head[9:12].decode()
        if status == "503" and b"retry-after:" not in head.lower():
            return "503 without Retry-After"
        if status != "200":
            return status or "broken"
        whole = _dechunked(body) if b"chunked" in head.lower() else body
        if whole is None:
            return "broken (no end)"
        lines = [line[6:] for line in whole.split(b"\n") if line.startswith(b"data: {")]
        text = "".join(orjson.loads(line)["content"] for line in lines)
        if self.expected is None:
            return "right" if text == said_by_fake(self.prompt, self.n_tokens) else "wrong"
        # Beside other requests, a real server may choose another of two equally likely tokens.
        whole_length = orjson.loads(lines[-1]).get("tokens_predicted") == self.n_tokens
        return "right" if text == self.expected else "whole" if whole_length else "wrong"


def said_by_fake(prompt: str, n_tokens: int) -> str:
    """Return the fake's answer to a prompt."""
    return bytes(generate(list(prompt.encode()), n_tokens)).decode()


def _dechunked(body: bytes) -> bytes | None:
    """Return the content of the chunks; None if the last chunk is missing."""
    chunks, at = list[bytes](), 0
    while size := _CHUNK.match(body, at):
        n = int(size[1], 16)
        if n == 0:
            return b"".join(chunks)
        chunks.append(body[size.end() : size.end() + n])
        at = size.end() + n + 2
    return None


async def send(
    url: str, clients: Iterable[Client], go: asyncio.Event | None = None
) -> Counter[str]:
    """Run all clients at once, after `go` if given; return how many ended in each way."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.ask(url, go)) for client in clients]
    return Counter(task.result() for task in tasks)


async def connects(url: str, per_s: int, seconds: float) -> Counter[str]:
    """Open connections and close them again: at once, or after half a request."""
    loop, ends = asyncio.get_running_loop(), Counter[str]()
    start, n = loop.time(), round(per_s * seconds)
    chance = random.Random(1)
    async with asyncio.TaskGroup() as group:
        for number in range(n):
            await asyncio.sleep(max(start + number / per_s - loop.time(), 0.0))
            half = b"POST /completion HTTP/1.1\r\nContent-Length: 99\r\n" if number % 2 else b""
            group.create_task(_touch(url, half, chance.random() < 0.5, ends))
    return ends


async def _touch(url: str, raw: bytes, reset: bool, ends: Counter[str]) -> None:
    parts, loop = urlsplit(url), asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        if reset:  # close with RST instead of FIN
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await loop.sock_connect(connection, (parts.hostname, parts.port))
                with suppress(OSError):
                    await loop.sock_sendall(connection, raw)
        except (OSError, TimeoutError) as error:
            ends[f"broken ({type(error).__name__})"] += 1
        else:
            ends["closed"] += 1
