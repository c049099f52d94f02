"""A stream of a llama-server whose gaps are measured while other things happen beside it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from time import perf_counter

import aiohttp

from bench.client import Json
from bench.report import median


class Stream:
    """The times at which the events of one stream came, in seconds."""

    def __init__(self) -> None:
        self.begun = perf_counter()
        self.times: list[float] = []
        self.first = asyncio.Event()

    def longest_gap_s(self, since: float) -> float:
        """Return the longest time without an event after `since`, up to now."""
        before = [time for time in self.times if time < since][-1:]
        after = [time for time in self.times if time >= since]
        return max((b - a for a, b in pairwise([*before, *after, perf_counter()])), default=0.0)

    def median_gap_s(self) -> float:
        """Return the median time between two events."""
        return median([b - a for a, b in pairwise(self.times)])


@asynccontextmanager
async def streaming(session: aiohttp.ClientSession, url: str, body: Json) -> AsyncIterator[Stream]:
    """Send a completion that goes on until the block ends; yield after its first event."""
    stream = Stream()
    reading = asyncio.create_task(_read(session, url, body, stream))  # noqa: TID251
    begun = asyncio.create_task(stream.first.wait())  # noqa: TID251
    await asyncio.wait([reading, begun], return_when=asyncio.FIRST_COMPLETED)
    begun.cancel()
    if reading.done():
        await reading
    try:
        yield stream
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _read(session: aiohttp.ClientSession, url: str, body: Json, stream: Stream) -> None:
    more = {"stream": True, "temperature": 0, "ignore_eos": True, "n_predict": 100_000}
    async with session.post(f"{url}/completion", json=more | body) as response:
        response.raise_for_status()
        async for _ in response.content.iter_any():
            stream.times.append(perf_counter())
            stream.first.set()
