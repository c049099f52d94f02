"""Prompts with tokens that the router does not know.

The server finds their shared prefix with its slots as well as it does alone.
"""

import asyncio
from random import Random

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import runs_on
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, sentences
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

UNREAD = "tokenizer: {mode: 'off'}"
N = 12


def infill(text: str) -> tuple[str, Json]:
    return "/infill", {"input_prefix": text, "input_suffix": " end", "n_predict": 4}


def chatting(text: str) -> tuple[str, Json]:
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 4}


KINDS = {"infill": (infill, UNREAD), "chat": (chatting, UNREAD)}


async def typed(client: Direct | RunningRouter, kind: str, seed: int) -> list[Answer]:
    """Send requests like typing in two files, in random order; return the answers."""
    random, files = Random(5), [sentences(2 * seed + i, 40) for i in range(2)]
    answers = []
    for _ in range(N):
        i = random.randrange(2)
        files[i] += " more"
        path, body = KINDS[kind][0](files[i])
        answers.append(await client.post(path, body))
        assert answers[-1].json["timings"], answers[-1].body
    return answers


@pytest.mark.parametrize("kind", KINDS)
async def test_the_server_finds_as_much_as_alone(llama_server: StartServer, kind: str) -> None:
    reference, server = await llama_server("llama"), await llama_server("llama")
    async with (
        direct(reference) as client,
        running([("a", server.url)], server.kv_dir, yaml=KINDS[kind][1]) as kvferry,
    ):
        alone = sum(answer.cached for answer in await typed(client, kind, 1))
        answers = await typed(kvferry, kind, 1)
    cached = sum(answer.cached for answer in answers)
    assert cached >= alone > sum(answer.prompt_tokens for answer in answers) / 2


@pytest.mark.parametrize("kind", KINDS)
async def test_two_are_answered_side_by_side(llama_server: StartServer, kind: str) -> None:
    server = await llama_server("llama")
    async with (
        running([("a", server.url)], server.kv_dir, yaml=KINDS[kind][1]) as kvferry,
        asyncio.TaskGroup() as group,
    ):
        tasks = []
        for seed in (1, 2):
            path, body = KINDS[kind][0](sentences(seed, 10))
            body |= {"n_predict": -1, "ignore_eos": True, "stream": True}
            tasks.append(group.create_task(kvferry.post(path, body)))
        await kvferry.until(lambda state: all(runs_on("a", i)(state) for i in range(2)))
        for task in tasks:
            assert not task.done()
            task.cancel()
