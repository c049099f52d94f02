"""Unified KV: the slots of a server share its cells, and nothing fails for want of them."""

import asyncio

import pytest

from tests.conftest import StartServer
from tests.e2e.test_flags import computed
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

CTX = 4096


@pytest.mark.parametrize("plain", [False, True], ids=["-kvu", "plain defaults"])
async def test_requests_that_do_not_fit_together_wait(
    llama_server: StartServer, plain: bool
) -> None:
    """Four of 917 tokens with answers of 250 need 4,668 cells: the server would end them all."""
    server = await llama_server(
        slots=None if plain else 4,
        ctx=CTX,
        extra_args=[] if plain else ["--kv-unified"],
        plain_defaults=plain,
    )
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        for _ in range(2):
            answers = await asyncio.gather(
                *(
                    kvferry.complete(ids(10 + i, 917), n_predict=250, ignore_eos=True)
                    for i in range(4)
                )
            )
            assert [answer.status for answer in answers] == [200] * 4, answers


async def test_conversations_that_do_not_fit_together_are_restored(
    llama_server: StartServer,
) -> None:
    """Idle slots are emptied before a restore, which else fails, or is lost to others."""
    server = await llama_server(slots=4, ctx=CTX, extra_args=["--kv-unified"])
    prompts = [ids(30 + i, 1350) for i in range(5)]
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        for number, prompt in enumerate(prompts, 1):
            await kvferry.complete(prompt)
            await kvferry.until(saved(1350, number))
        for _ in range(2):
            before = await computed(server)
            answers = [await kvferry.complete(prompt) for prompt in prompts]
            await kvferry.until_quiet()
            assert await computed(server) - before <= 80
            assert all(answer.status == 200 for answer in answers)
        metrics = await kvferry.metrics()

    assert metrics['kvferry_kv_failures_total{action="restore"}'] == 0
