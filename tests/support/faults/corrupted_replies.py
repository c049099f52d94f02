"""Ways in which an answer on its way suffers: for `tests.meddler`."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable

Spoiling = Callable[[asyncio.StreamReader], AsyncIterator[bytes]]
"""A server's answer in, what is passed on out. Where it ends, the connection is cut."""

HEAD_END = b"\r\n\r\n"
NONSENSE = b"\x00\xff nonsense\r\n\r\n"
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


async def unchanged(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """As it comes."""
    while data := await answer.read(1 << 16):
        yield data


async def dripping(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """All of it, byte by byte."""
    while data := await answer.read(1):
        yield data


def late(seconds: float) -> Spoiling:
    """All of it, each piece so much later."""

    async def spoil(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
        while data := await answer.read(1 << 16):
            await asyncio.sleep(seconds)
            yield data

    return spoil


async def no_http(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Nonsense instead of a head; it is for the other side to end it."""
    await answer.readuntil(HEAD_END)
    yield NONSENSE
    await asyncio.Event().wait()


async def nothing(_: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Cut at once, whatever the server is about to say."""
    yield b""


async def head_alone(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Cut behind the head."""
    yield await answer.readuntil(HEAD_END)


async def nonsense_inside(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The head, and as many bytes as it says, but others."""
    head = await answer.readuntil(HEAD_END)
    yield head + b"\xff" * len(await body_of(head, answer))
    await asyncio.Event().wait()


async def half_body(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Cut in the middle of a body."""
    head = await answer.readuntil(HEAD_END)
    body = await body_of(head, answer)
    yield head + body[: len(body) // 2]


async def body_of(head: bytes, message: asyncio.StreamReader) -> bytes:
    """What follows a head that says how long it is; nothing if it does not."""
    length = _LENGTH.search(head)
    return await message.readexactly(int(length[1])) if length else b""


def half_event(n: int = 2, then: bytes = b"") -> Spoiling:
    """So many events of a stream and half of the next, perhaps some more bytes, and a cut."""

    async def spoil(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
        for _ in range(n + 1):
            yield await answer.readuntil(b"data: ")
        yield await answer.readexactly(10) + then

    return spoil
