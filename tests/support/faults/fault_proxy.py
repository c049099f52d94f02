"""A TCP relay in front of a llama-server that corrupts chosen answers.

Within `async with Meddler(server.url) as meddler` the router gets `meddler.url`. Then call
`meddler.spoil("POST /completion", corrupted_replies.half_body)`. The server itself does what it was
asked: only its answer is corrupted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from router.base.tasks import Tasks
from tests.support.faults.corrupted_replies import HEAD_END, Spoiling, body_of, unchanged


class Meddler:
    """The relay: see the module. `met` counts corrupted answers."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._spoilt: dict[str, Spoiling] = {}
        self._tasks = Tasks()
        self._news = asyncio.Event()
        self.met: Counter[str] = Counter()

    def spoil(self, what: str, how: Spoiling, *, once: bool = False) -> None:
        """Corrupt the answers to requests with `what` in their first line, from now on.

        `once`: only the next of these answers.
        """

        def at_once(answer: asyncio.StreamReader) -> AsyncIterator[bytes]:
            self._spoilt.pop(what, None)
            return how(answer)

        self._spoilt[what] = at_once if once else how

    def behave(self) -> None:
        """Stop corrupting answers."""
        self._spoilt.clear()

    async def until_met(self, what: str, n: int = 1) -> None:
        """Wait until `n` answers to `what` were corrupted."""
        while self.met[what] < n:
            await self._news.wait()

    async def __aenter__(self) -> Self:
        def begin(asks: asyncio.StreamReader, router: asyncio.StreamWriter) -> None:
            self._tasks.spawn(self._relay(asks, router), name="meddler")

        self._listener = await asyncio.start_server(begin, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        await self._tasks.aclose()

    async def _relay(self, asks: asyncio.StreamReader, router: asyncio.StreamWriter) -> None:
        """Relay one connection of the router over one connection to the server.

        Requests pass one after the other, until either side closes or an answer was cut.
        """
        passing = Tasks()
        try:
            answers, server = await asyncio.open_connection(*self._address)
        except OSError:
            router.close()
            return
        try:
            while True:
                head = await asks.readuntil(HEAD_END)
                body = await body_of(head, asks)
                await passing.aclose()  # an answer is over when the next request comes
                how = self._how(head.partition(b"\r\n")[0].decode())
                server.write(head + body)
                passing.spawn(self._pass(how(answers), router), name="meddler's answer")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            server.close()
            router.close()
            await passing.aclose()

    def _how(self, line: str) -> Spoiling:
        for what, how in self._spoilt.items():
            if what in line:
                self.met[what] += 1
                self._news.set()
                self._news = asyncio.Event()
                return how
        return unchanged

    async def _pass(self, answer: AsyncIterator[bytes], router: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            async for data in answer:
                router.write(data)
                await router.drain()
        router.close()
