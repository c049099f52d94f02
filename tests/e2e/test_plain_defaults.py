"""Backends with llama-server's plain defaults (four slots, unified KV, RAM cache): served
correctly, and never worse than without kvferry."""

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import reuse
from tests.support.conversations.prompts import Json, chat, sentences
from tests.support.servers.running_router import Answer, read_answer, running

pytestmark = pytest.mark.thorough


def conversation(seed: int, turns: int) -> list[list[Json]]:
    """Return the messages of each turn of a conversation with given answers."""
    messages = chat(seed, sentences(seed, 4), length=35)
    bodies = []
    for turn in range(turns):
        bodies.append(list(messages))
        messages = [
            *messages,
            {"role": "assistant", "content": sentences(77 + turn, 1)},
            {"role": "user", "content": sentences(1000 * seed + turn, 2)},
        ]
    return bodies


async def test_never_worse_than_without(llama_server: StartServer) -> None:
    """Six alternating conversations of three turns reuse no less than without the router."""
    alone = await llama_server("llama", slots=None, ctx=16384, plain_defaults=True)
    behind = await llama_server("llama", slots=None, ctx=16384, plain_defaults=True)
    talks = [conversation(seed, 3) for seed in range(6)]
    sequence = [talk[turn] for turn in range(3) for talk in talks]

    direct: list[Answer] = []
    async with aiohttp.ClientSession() as session:
        for messages in sequence:
            body = {"messages": messages, "max_tokens": 8, "temperature": 0}
            async with session.post(alone.url + "/v1/chat/completions", json=body) as response:
                direct.append(await read_answer(response))
    async with running([("a", behind.url)], behind.kv_dir) as kvferry:
        state = await kvferry.state()
        assert state["backends"][0]["keeps_idle_slots"] is False
        routed = [await kvferry.chat(messages) for messages in sequence]

    assert [answer.status for answer in routed] == [200] * len(sequence)
    assert reuse(routed) >= reuse(direct)
