"""No prompt is computed twice: not on another slot or server, and not after a restart.

Every number was reported by a real llama-server.
"""

import asyncio

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, reuse, saved
from tests.support.conversations.prompts import chat, ids, sentences
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

LONG = 2400


async def test_after_a_server_was_killed_and_restarted(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=1)
    prompt = ids(1, LONG)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        first = await kvferry.complete(prompt)
        await kvferry.until(saved(LONG))
        server.kill()
        await kvferry.until(lambda state: not state["backends"][0]["up"])
        await server.restart()
        await kvferry.until_up()

        again = await kvferry.complete(prompt)

        assert again.source == "snapshot"
        assert all_but_one(again)
        assert again.text == first.text


async def test_after_the_router_was_restarted(llama_server: StartServer) -> None:
    """The router finds snapshots by their records, and reads a slot that was in use."""
    server = await llama_server("llama", slots=2, ctx=16384)
    saved_prompt, unsaved = ids(1, LONG), ids(2, LONG)
    backends = [("a", server.url)]
    async with running(backends, server.kv_dir) as kvferry:
        await kvferry.complete(saved_prompt)
        await kvferry.until(saved(LONG))
    quick = "store: {idle_save_after: 'off', save_on_shutdown: false}"
    async with running(backends, server.kv_dir, yaml=quick) as kvferry:
        await kvferry.complete(unsaved)
    async with running(backends, server.kv_dir) as kvferry:
        await kvferry.until(saved(LONG, count=2))
        for prompt in (saved_prompt, unsaved):
            assert all_but_one(await kvferry.complete(prompt))


@pytest.mark.parametrize("conversations", [3, 20])
async def test_conversations_in_turn_on_one_slot(
    llama_server: StartServer, conversations: int
) -> None:
    """Conversations share a system prompt and grow; each return reuses all that was said before."""
    server = await llama_server("llama", slots=1)
    talks = [chat(7, sentences(100 + i, 15), length=30) for i in range(conversations)]
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        firsts = [await kvferry.chat(talk) for talk in talks]
        for talk, first in zip(talks, firsts, strict=True):
            again = await kvferry.chat(talk)
            assert all_but_one(again), talk[1]
            assert again.text == first.text
        for talk, first in zip(talks, firsts, strict=True):
            follow = [{"role": "assistant", "content": first.text}]
            talk += [*follow, {"role": "user", "content": "and then?"}]
            grown = await kvferry.chat(talk)
            assert grown.cached >= first.prompt_tokens


async def test_eleven_prompts_on_two_servers_with_two_slots(llama_server: StartServer) -> None:
    a = await llama_server("llama", slots=2, ctx=8192)
    b = await llama_server("llama", slots=2, ctx=8192)
    prompts = [ids(seed, 1000) for seed in range(11)]
    async with running([("a", a.url), ("b", b.url)], a.kv_dir) as kvferry:
        for prompt in prompts:
            await kvferry.complete(prompt)
        for _ in range(2):
            answers = [await kvferry.complete(prompt) for prompt in prompts]
            assert reuse(answers) >= 0.99


async def test_a_burst_of_one_prompt_is_computed_once(llama_server: StartServer) -> None:
    """One of eight concurrent requests computes the prompt; seven wait and reuse the result."""
    server = await llama_server("llama", slots=4, ctx=4 * 4096)
    prompt = ids(1, LONG)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        answers = await asyncio.gather(*(kvferry.complete(prompt) for _ in range(8)))
        metrics = await kvferry.metrics()

    assert {answer.text for answer in answers} == {answers[0].text}
    assert sorted(answer.cached for answer in answers) == [0, *[LONG - 1] * 7]
    # The prompt once, and the last token of each of the others.
    assert metrics['kvferry_prompt_tokens_total{source="computed"}'] == LONG + 7


async def test_a_burst_of_chats_that_share_a_system_prompt(llama_server: StartServer) -> None:
    """The shared prefix is computed once; each chat computes its own question."""
    server = await llama_server("llama", slots=4, ctx=4 * 4096)
    talks = [chat(1, sentences(50 + i, 2), length=70) for i in range(8)]
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        answers = await asyncio.gather(*(kvferry.chat(talk) for talk in talks))
        metrics = await kvferry.metrics()

    assert all(answer.status == 200 for answer in answers)
    total = sum(answer.prompt_tokens for answer in answers)
    computed = metrics['kvferry_prompt_tokens_total{source="computed"}']
    assert computed < 0.3 * total
