"""Corruptions of an answer on its way to the router, for `Meddler` in `fault_proxy`."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable

Spoiling = Callable[[asyncio.StreamReader], AsyncIterator[bytes]]
"""Yields the bytes to pass on for a server's answer. At their end the connection is cut."""

HEAD_END = b"\r\n\r\n"
NONSENSE = b"\x00\xff nonsense\r\n\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


async def unchanged(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the answer as it comes."""
    while data := await answer.read(1 << 16):
        yield data


async def dripping(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the whole answer, byte by byte."""
    while data := await answer.read(1):
        yield data


def late(seconds: float) -> Spoiling:
    """Pass the whole answer on, each chunk so many seconds later."""

    async def spoil(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while data := await answer.read(1 << 16):
            await asyncio.sleep(seconds)
            yield data

    return spoil


async def no_http(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield nonsense instead of a head; the other side must end the connection."""
    await answer.readuntil(HEAD_END)
    yield NONSENSE
    await asyncio.Event().wait()


async def nothing(_: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Cut the connection at once, whatever the server answers."""
    yield b""


async def head_alone(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Cut the connection after the head."""
    yield await answer.readuntil(HEAD_END)


async def nonsense_inside(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the head and as many bytes as it announces, but other bytes."""
    head = await answer.readuntil(HEAD_END)
    yield head + b"\xff" * len(await body_of(head, answer))
    await asyncio.Event().wait()


async def half_body(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Cut the connection in the middle of the body."""
    head = await answer.readuntil(HEAD_END)
    body = await body_of(head, answer)
    yield head + body[: len(body) // 2]


async def body_of(head: bytes, message: asyncio.StreamReader) -> bytes:
    """Return the body after a head that gives its length; nothing if the head gives none."""
    length = _LENGTH.search(head)
    return await message.readexactly(int(length[1])) if length else b""


def half_event(n: int = 2, then: bytes = b"") -> Spoiling:
    """Pass on `n` events of a stream, half of the next and `then`; cut the connection."""

    async def spoil(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
        for _ in range(n + 1):
            yield await answer.readuntil(b"data: ")
        yield await answer.readexactly(10) + then

    return spoil
