"""What a real llama-server does when a client leaves the router.

Its /slots is looked at afterwards: asking more than once a second keeps it from noticing that a
client has left (llama-server.md section 5.6).
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from router.demo.launcher import LlamaServer
from tests.fleet import Fleet, Json, running
from tests.models import tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Seconds of prefill on one thread, so that there is a middle to leave in.
TOKENS = [3 + i * 7 % 400 for i in range(30_000)]
# Seconds of generation.
ENDLESS: Json = {"prompt": [5, 6, 7], "n_predict": 60_000, "temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LlamaServer]:
    kv_dir: Path = tmp_path_factory.mktemp("kv")
    model = tiny_model("llama").path
    async with LlamaServer(model, slots=1, ctx=65536, kv_dir=kv_dir, argv=server_argv) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def fleet(server: LlamaServer) -> AsyncIterator[Fleet]:
    """Without snapshots: here it is only about stopping."""
    async with running([("a", server.url)], None, yaml="policy: least_busy") as router:
        yield router


async def look(server: LlamaServer, fleet: Fleet) -> Json:
    """The server's slot as it is now."""
    async with fleet.session.get(server.url + "/slots") as response:
        slots: list[Json] = await response.json()
        return slots[0]


async def until_processing(server: LlamaServer, fleet: Fleet) -> None:
    while True:
        if (await look(server, fleet))["is_processing"]:
            return
        await asyncio.sleep(0.02)


async def assert_stopped(server: LlamaServer, fleet: Fleet) -> Json:
    """The router leases the slot again, the server's slot is idle, and both stay so."""
    await fleet.until_quiet()
    first = await look(server, fleet)
    assert not first["is_processing"]
    answer = await fleet.complete([1, 2, 3], n_predict=1)
    assert answer.status == 200
    assert (await look(server, fleet))["n_prompt_tokens"] == 3
    return first


@pytest.mark.fault("a client leaves", "computing a prompt")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_during_a_silent_prefill(server: LlamaServer, fleet: Fleet, stream: bool) -> None:
    """The server notices within a second or so, before its next batch."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.complete(TOKENS, stream=stream))
        await until_processing(server, fleet)
        task.cancel()

    stopped = await assert_stopped(server, fleet)
    assert stopped["n_prompt_tokens"] < len(TOKENS)


async def test_during_the_routers_own_prefill(server: LlamaServer, tmp_path: Path) -> None:
    kv_dir = server.kv_dir
    async with running([("a", server.url)], kv_dir, yaml="policy: {coalesce_above: 10ms}") as fleet:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(fleet.complete(TOKENS))
            await fleet.until(lambda state: state["slots"][0]["phase"] == "preparing")
            await until_processing(server, fleet)
            task.cancel()
        stopped = await assert_stopped(server, fleet)
        assert stopped["n_prompt_tokens"] < len(TOKENS)


@pytest.mark.fault("a client leaves", "mid-stream")
async def test_in_the_middle_of_a_stream(server: LlamaServer, fleet: Fleet) -> None:
    body = ENDLESS | {"stream": True}
    async with fleet.session.post(fleet.url + "/completion", json=body) as response:
        for _ in range(5):
            await response.content.readuntil(b"\n\n")

    stopped = await assert_stopped(server, fleet)
    assert 3 + 4 <= stopped["n_prompt_tokens"] < 60_000


@pytest.mark.fault("a client leaves a request that does not stream", "generating")
async def test_of_a_request_that_does_not_stream(server: LlamaServer, fleet: Fleet) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(fleet.post("/completion", ENDLESS))
        await until_processing(server, fleet)
        task.cancel()

    stopped = await assert_stopped(server, fleet)
    assert stopped["n_prompt_tokens"] < 60_000


async def test_conversation_id_does_not_keep_it_going(server: LlamaServer, fleet: Fleet) -> None:
    """llama-server goes on for a client that sends this header and leaves; the router drops it."""
    body = ENDLESS | {"stream": True}
    headers = {"X-Conversation-Id": "abc"}
    async with fleet.session.post(
        fleet.url + "/completion", json=body, headers=headers
    ) as response:
        await response.content.readuntil(b"\n\n")

    stopped = await assert_stopped(server, fleet)
    assert stopped["n_prompt_tokens"] < 60_000
