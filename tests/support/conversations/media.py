"""Chats with pictures and sounds, and the checks of their answers."""

import asyncio
import base64

from tests.conftest import StartServer
from tests.support.conversations.measuring import (
    CHAT,
    GREEDY,
    Direct,
    direct,
    other_first_token,
    other_words,
)
from tests.support.conversations.prompts import Json, chat
from tests.support.conversations.turns import named
from tests.support.models.mmproj import picture, sound, tiny_mmproj
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter, running

SYSTEM = 10  # sentences of about 35 tokens: enough to be saved, and a picture still counts
OVERESTIMATED = "kvferry_reuse_overestimated_tokens_total"
SHORT: Json = GREEDY | {"max_tokens": 16}


def flags() -> list[str]:
    return ["--mmproj", str(tiny_mmproj())]


async def sighted(llama_server: StartServer, name: str, *, slots: int = 1) -> LlamaServer:
    """Start a server that sees and hears, chosen by `model: name`."""
    return await named(llama_server, "llama", name, flags(), slots=slots)


def look(seed: int, question: str = "What is it?", *, system: int = 1) -> list[Json]:
    """Return a chat that shows a picture after a long system prompt."""
    seen = {"type": "image_url", "image_url": {"url": picture(seed)}}
    return about([words("Look at this:"), seen, words(question)], system=system)


def listen(seed: int, question: str = "What is it?", *, system: int = 1) -> list[Json]:
    """Return a chat that plays a sound after a long system prompt."""
    return about([words("Listen:"), heard(sound(seed)), words(question)], system=system)


def about(parts: list[Json], *, system: int = 1) -> list[Json]:
    """Return a chat with a long system prompt and these parts."""
    return [*chat(system, length=SYSTEM), {"role": "user", "content": parts}]


def words(text: str) -> Json:
    return {"type": "text", "text": text}


def heard(file: bytes, kind: str = "wav") -> Json:
    """Return a sound file as a part of a message."""
    data = base64.b64encode(file).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": kind}}


def ask(text: str, *, system: int = 1) -> list[Json]:
    """Return a chat without media, with the same system prompt."""
    return chat(system, text, length=SYSTEM)


async def expected(client: Direct, messages: list[Json]) -> Answer:
    """Return the answer of a server that computes the whole prompt."""
    return await client.post(CHAT, {"messages": messages, **SHORT, "cache_prompt": False})


def promised(answer: Answer) -> int:
    """Return the number of reused tokens that the router announced."""
    return int(answer.headers["x-kvferry-reused-tokens"])


async def check(
    kvferry: RunningRouter, client: Direct, messages: list[Json], **fields: object
) -> Answer:
    """Check that a chat is answered as without the router, with at least the announced reuse."""
    answer = await kvferry.post(CHAT, {"messages": messages, **SHORT} | fields)
    assert answer.status == 200, answer.body
    alone = await expected(client, messages)
    assert answer.prompt_tokens == alone.prompt_tokens
    assert other_first_token(answer, alone) == ""
    assert other_words(answer, alone) == ""
    assert promised(answer) <= answer.cached
    return answer


async def check_at_once(llama_server: StartServer, chats: list[list[Json]]) -> None:
    """Check chats that are sent at the same moment to one server of two slots.

    In one batch the numbers differ in their last digits, so only the first tokens are compared.
    """
    server, alone = await sighted(llama_server, "a", slots=2), await sighted(llama_server, "b")
    async with direct(alone) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        posts = [kvferry.post(CHAT, {"messages": messages, **SHORT}) for messages in chats]
        for messages, answer in zip(chats, await asyncio.gather(*posts), strict=True):
            assert answer.status == 200, answer.body
            assert other_first_token(answer, await expected(client, messages)) == ""
        await nothing_overestimated(kvferry)


async def nothing_overestimated(kvferry: RunningRouter) -> None:
    await kvferry.until_quiet()
    assert (await kvferry.metrics()).get(OVERESTIMATED, 0.0) == 0
