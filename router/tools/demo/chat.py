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


@dataclass(slots=True)
class ChatAnswer:
    """The answer. `backend`, `slot` and `source` are kvferry's headers, "" without kvferry."""

    text: str = ""
    prompt_tokens: int = -1  # -1: not told
    cached_tokens: int = 0
    ttft_s: float = 0.0  # from sending to the first text of the answer
    backend: str = ""
    slot: str = ""
    source: str = ""
    started: bool = False  # there is a text, or a thought

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


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
        answer = ChatAnswer()
        begin = perf_counter()
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise ChatError(f"{url} answered {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _read(answer, json_of(line[6:]))
                    if answer.started and not self.streams.is_set():
                        answer.ttft_s = perf_counter() - begin
                        self.streams.set()
            for name in ("backend", "slot", "source"):
                setattr(answer, name, response.headers.get(f"x-kvferry-{name}", ""))
        if answer.prompt_tokens < 0:
            raise ChatError(f"the answer of {url} has no token counts (usage)")
        answer.ttft_s = answer.ttft_s or perf_counter() - begin
        return answer


def _read(answer: ChatAnswer, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or []:
        delta = choice.get("delta") or {}
        answer.text += delta.get("content") or ""
        answer.started |= bool(answer.text or delta.get("reasoning_content"))
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
