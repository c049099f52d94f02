"""A chat with a picture is reused like one without, on models that cannot go back."""

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import CHAT, Direct, direct
from tests.support.conversations.media import flags, look, words
from tests.support.conversations.prompts import Json, chat, sentences
from tests.support.models.mmproj import N_POSITIONS
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

KINDS = ["lfm2", "gemma3", "mamba"]
TURNS = 8
TEXT: list[Json] = [
    *chat(2, length=10),
    {"role": "user", "content": [words("Look at this:What is it?")]},
]


async def ask(client: RunningRouter | Direct, messages: list[Json]) -> Answer:
    answer = await client.post(CHAT, {"messages": messages, "max_tokens": 8, "temperature": 0})
    assert answer.status == 200, answer.body
    return answer


async def talk(
    kvferry: RunningRouter, alone: Direct, messages: list[Json]
) -> tuple[int, int, list[Json]]:
    """Hold a chat; return what it computed here and by a server alone, and the last prompt."""
    here = there = 0
    for turn in range(TURNS):
        answer, same = await ask(kvferry, messages), await ask(alone, messages)
        here += answer.prompt_tokens - answer.cached
        there += same.prompt_tokens - same.cached
        if turn < TURNS - 1:
            said = answer.json["choices"][0]["message"]["content"]
            question = {"role": "user", "content": sentences(40 + turn, 2)}
            messages = [*messages, {"role": "assistant", "content": said}, question]
        await kvferry.until_quiet()
    return here, there, messages


@pytest.mark.parametrize("kind", KINDS)
async def test_turns_compute_what_is_new(
    llama_server: StartServer, server_argv: list[str], kind: str
) -> None:
    server, alone = [
        await llama_server(kind, slots=2, ctx=16384, extra_args=flags()) for _ in range(2)
    ]
    async with direct(alone) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        text, _, _ = await talk(kvferry, client, TEXT)
        picture, by_server, last = await talk(kvferry, client, look(1))
        assert picture <= min(1.1 * text + N_POSITIONS, by_server)

        if "router.servers.prebuilt" not in server_argv:
            return  # b11434 puts no checkpoints into its state files: nothing goes back there
        # After other chats, out of a state that was saved.
        await kvferry.until(saved(900), 10)
        for seed in (3, 4):
            await ask(kvferry, chat(seed, sentences(seed, 20), length=10))
        again = await ask(kvferry, last)
        assert again.prompt_tokens - again.cached <= 8


@pytest.mark.parametrize("kind", KINDS)
async def test_another_picture_computes_itself(llama_server: StartServer, kind: str) -> None:
    """Its system prompt was saved before the first picture."""
    server = await llama_server(kind, slots=2, ctx=16384, extra_args=flags())
    yaml = "policy: {reuse_probability: 1.0}"  # so that a save of the tiny model's pays
    async with running([("a", server.url)], server.kv_dir, yaml=yaml) as kvferry:
        await ask(kvferry, look(1))
        await ask(kvferry, look(1))
        await kvferry.until_quiet()
        sibling = await ask(kvferry, look(2))
        assert sibling.prompt_tokens - sibling.cached <= N_POSITIONS + 32
