"""One streamed chat request, measured as a client sees it."""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

from router.base.decoding import json_of

_ANSWER_TOKENS = 16
_LONG_ANSWER_TOKENS = 160


class ChatError(RuntimeError):
    """The request was not answered; the message says why."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer. `backend`, `slot` and `source` are kvferry's headers, "" without kvferry."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float  # from sending to the first text of the answer
    backend: str = ""
    slot: str = ""
    source: str = ""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass(slots=True)
class _Reading:
    """The values read from a stream so far."""

    text: str = ""
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class Chat:
    """One request. `run` sends it and sets `streams` when the first text arrives."""

    messages: list[dict[str, str]]
    long: bool = False
    streams: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, session: aiohttp.ClientSession, url: str) -> ChatAnswer:
        """Send the request and read the answer to its end. Raises ChatError."""
        try:
            return await self._run(session, url)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ChatError(f"the request to {url} failed: {error!r}") from error
        finally:
            self.streams.set()  # also after a failure: nothing may wait for it in vain

    async def _run(self, session: aiohttp.ClientSession, url: str) -> ChatAnswer:
        body = {
            "messages": self.messages,
            "max_tokens": _LONG_ANSWER_TOKENS if self.long else _ANSWER_TOKENS,
            "ignore_eos": self.long,  # the answer must last until the next request arrives
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reading = _Reading()
        begin = perf_counter()
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ChatError(f"{url} answered {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _read(reading, json_of(line[6:]), perf_counter() - begin)
                    if reading.ttft_s is not None:
                        self.streams.set()
            headers = response.headers
        if reading.prompt_tokens is None or reading.cached_tokens is None:
            raise ChatError(f"the answer of {url} has no token counts (usage)")
        return ChatAnswer(
            text=reading.text,
            prompt_tokens=reading.prompt_tokens,
            cached_tokens=reading.cached_tokens,
            ttft_s=reading.ttft_s if reading.ttft_s is not None else perf_counter() - begin,
            backend=headers.get("x-kvferry-backend", ""),
            slot=headers.get("x-kvferry-slot", ""),
            source=headers.get("x-kvferry-source", ""),
        )


def _read(reading: _Reading, event: dict[str, Any], now_s: float) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        piece = delta.get("content") or ""
        if (piece or delta.get("reasoning_content")) and reading.ttft_s is None:
            reading.ttft_s = now_s
        reading.text += piece
    usage = event.get("usage")
    if usage:
        reading.prompt_tokens = usage["prompt_tokens"]
        reading.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
