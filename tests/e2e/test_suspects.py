"""A request that ends its llama-server: it ends two at most, and takes no innocent answer along.

No request here ends a server by itself: each server is killed while it computes the suspect.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from router.base.tasks import spawn
from tests.conftest import StartServer
from tests.e2e.test_servers_on_demand import ask, config, model, servers
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import RunningRouter, running

pytestmark = [pytest.mark.real, pytest.mark.thorough]

LENGTH = 7500  # tokens: nothing else in a slot is as long
GRAMMAR = 'root ::= "a" | "b"'


def suspect(seed: int = 1) -> Json:
    return {"prompt": ids(seed, LENGTH), "n_predict": 1, "grammar": GRAMMAR}


@asynccontextmanager
async def ending(
    kvferry: RunningRouter, kill: Callable[[str], Awaitable[None]]
) -> AsyncIterator[list[str]]:
    """Kill each server that computes a suspect; yield the names of those that were killed."""
    killed: list[str] = []

    async def watch() -> None:
        while True:
            for slot in (await kvferry.state())["slots"]:
                at_work = slot["phase"] == "running" and slot["pending_tokens"] == LENGTH
                if at_work and slot["request"] not in killed:
                    killed.append(slot["request"])
                    names.append(slot["backend"])
                    await kill(slot["backend"])
            await asyncio.sleep(0.01)

    names: list[str] = []
    task = spawn(watch(), name="kill")
    yield names
    task.cancel()


async def innocent(kvferry: RunningRouter, number: int, length: int = 3000) -> tuple[str, int]:
    body: Json = {"prompt": ids(number, 50), "n_predict": length, "ignore_eos": True}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        await response.read()
        return response.headers.get("x-kvferry-backend", ""), response.status


async def until_at_work(url: str) -> None:
    """Wait until a server itself computes a suspect: killed before, it was not ended by it."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/slots") as response:
                slots = await response.json()
            if any(slot["is_processing"] and slot["n_prompt_tokens"] > 3500 for slot in slots):
                return
            await asyncio.sleep(0.01)


async def three(llama_server: StartServer) -> dict[str, LlamaServer]:
    return {f"s{at}": await llama_server(slots=2, ctx=16384) for at in range(3)}


async def all_at_work(kvferry: RunningRouter, n: int) -> None:
    await kvferry.until(
        lambda state: sum(slot["doing"] == "answer" for slot in state["slots"]) == n
    )


@pytest.mark.parametrize("more", [{}, {"stream": True}], ids=["whole", "stream"])
async def test_two_servers_end_and_no_innocent_answer_elsewhere(
    llama_server: StartServer, more: Json
) -> None:
    """All servers are at work: the second try waits until it has one to itself."""
    there = await three(llama_server)
    backends = [(name, server.url) for name, server in there.items()]

    async def kill(name: str) -> None:
        await until_at_work(there[name].url)
        there[name].kill()

    async with running(backends, None) as kvferry:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(innocent(kvferry, n)) for n in range(5)]
            await all_at_work(kvferry, 5)
            async with ending(kvferry, kill) as killed:
                first = await kvferry.post("/completion", suspect() | more)
        assert first.status == 503 or b"ended 2 times" in first.body
        assert len(killed) == 2
        lost = [task.result() for task in tasks if task.result()[1] != 200]
        assert all(name == killed[0] for name, _ in lost)

        # It is refused now, and its like, whatever they ask.
        for seed in (1, 2):
            refused = await kvferry.post("/completion", suspect(seed))
            assert refused.status == 503
            assert "refused for" in refused.json["error"]["message"]
        assert (await kvferry.complete("hello")).status == 200


async def test_a_request_whose_server_was_killed_is_answered(llama_server: StartServer) -> None:
    """It was sent last, and others are at work on the other servers: it is not given up."""
    there = await three(llama_server)
    backends = [(name, server.url) for name, server in there.items()]
    async with running(backends, None) as kvferry, asyncio.TaskGroup() as group:
        tasks = [group.create_task(innocent(kvferry, n)) for n in range(5)]
        await all_at_work(kvferry, 5)
        asked = group.create_task(kvferry.post("/completion", suspect()))
        state = await kvferry.until(
            lambda state: any(slot["pending_tokens"] == LENGTH for slot in state["slots"])
        )
        (name,) = [s["backend"] for s in state["slots"] if s["pending_tokens"] == LENGTH]
        there[name].kill()
        answer = await asked
    assert answer.status == 200
    assert answer.headers["x-kvferry-backend"] != name
    assert all(status == 200 for where, status in map(asyncio.Task.result, tasks) if where != name)


async def test_a_server_on_demand_is_not_given_up_for_such_requests(tmp_path: Path) -> None:
    yaml = config([model("a")], loaded=1, kv_dir=str(tmp_path / "kv"))
    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        assert (await ask(kvferry, "a", ids(1, 50))).status == 200

        async def kill(name: str) -> None:
            os.kill((await servers(kvferry))[name]["pid"], signal.SIGKILL)

        for seed in range(4):
            async with ending(kvferry, kill):
                body = suspect(seed) | {"model": "a", "grammar": f'root ::= "{seed}"'}
                found = await kvferry.post("/completion", body)
            assert found.status in (502, 503)
        assert (await servers(kvferry))["a"]["failures"] == 0
        assert (await ask(kvferry, "a", ids(1, 50))).status == 200
