"""Fewer requests at once than slots: the others wait, and conversations stay in their slots."""

import asyncio

from router.base.tasks import spawn
from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import Answer, running


async def test_more_conversations_than_running_requests(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=4, ctx=16_384)
    backend = f"{{name: a, url: '{server.url}', max_running: 2}}"
    async with running([], None, yaml=f"backends: [{backend}]") as kvferry:
        most, answers = 0, list[Answer]()

        async def watch() -> None:
            nonlocal most
            while True:
                slots = (await kvferry.state())["slots"]
                most = max(most, sum(slot["phase"] != "idle" for slot in slots))

        watching = spawn(watch(), name="watch")
        prompts = [ids(seed, 600) for seed in range(4)]
        for turn in range(2):
            asked = [[*prompt, *ids(50 + turn, 20 * turn)] for prompt in prompts]
            answers = await asyncio.gather(*(kvferry.complete(one, n_predict=60) for one in asked))
            await kvferry.until_quiet()
        watching.cancel()

        assert most == 2
        assert len({answer.slot for answer in answers}) == 4
        assert [answer.source for answer in answers] == ["resident"] * 4
