"""Backends attached and detached under load, with real servers.

No request fails, and what was computed on a detached backend is restored on another.
"""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import (
    Answer,
    RunningRouter,
    configuration_text,
    read_answer,
    running,
)
from tests.tools.test_cli import serving

pytestmark = pytest.mark.thorough

LONG = 2400
# Only a drain saves slots.
NEVER_SAVED = "store: {idle_save_after: 'off', fsync: false}"
CLIENTS = 2


@asynccontextmanager
async def steady_load(kvferry: RunningRouter) -> AsyncIterator[list[Answer]]:
    """Run clients from before the block until after it; yield their answers.

    Each client sends one short request after the other, streamed and not.
    """
    answers: list[Answer] = []
    over = asyncio.Event()
    begun = asyncio.Event()

    async def client(number: int) -> None:
        while not over.is_set():
            prompt = ids(1000 + len(answers), 60)
            stream = bool(number % 2)
            answers.append(await kvferry.complete(prompt, n_predict=24, stream=stream))
            begun.set()

    async with asyncio.TaskGroup() as group:
        for number in range(CLIENTS):
            group.create_task(client(number))
        await begun.wait()
        yield answers
        n_before = len(answers)
        while len(answers) < n_before + CLIENTS:  # requests succeed afterwards, too
            begun.clear()
            await begun.wait()
        over.set()


def assert_all_good(answers: list[Answer]) -> None:
    assert {answer.status for answer in answers} == {200}
    assert all(answer.timings["predicted_n"] > 0 for answer in answers)


async def test_drain_under_load(llama_server: StartServer) -> None:
    a = await llama_server("llama", slots=2, ctx=16384)
    b = await llama_server("llama", slots=2, ctx=16384)
    prompt = ids(1, LONG)
    backends = [("a", a.url), ("b", b.url)]
    async with running(backends, a.kv_dir, yaml=NEVER_SAVED) as kvferry:
        first = await kvferry.complete(prompt)
        home = first.slot[0]
        other = "b" if home == "a" else "a"
        async with steady_load(kvferry) as answers:
            await kvferry.operate(home, "drain")
            state = await kvferry.until_is(home, "drained")
            assert any(item["tokens"] >= LONG for item in state["snapshots"]["items"])
            (a if home == "a" else b).kill()  # as if to change its driver or model
            again = await kvferry.complete(prompt)
            assert (again.slot[0], again.source) == (other, "snapshot")
            assert all_but_one(again)
            assert again.text == first.text

            await (a if home == "a" else b).restart()
            await kvferry.operate(home, "undrain")
            await kvferry.until_is(home, "up")
        assert_all_good(answers)


async def test_add_and_remove_under_load(llama_server: StartServer, tmp_path: Path) -> None:
    """The whole fleet is replaced, two servers by two others, and every conversation continues."""
    servers = [await llama_server("llama", slots=2, ctx=16384) for _ in range(4)]
    named = list(zip("abcd", (server.url for server in servers), strict=True))
    kv_dir, path = servers[0].kv_dir, tmp_path / "kvferry.yaml"
    prompts = [ids(number, LONG) for number in (1, 2, 3)]
    async with running(named[:2], kv_dir, yaml=NEVER_SAVED, path=path) as kvferry:
        first = [await kvferry.complete(prompt) for prompt in prompts]
        async with steady_load(kvferry) as answers:
            path.write_text(configuration_text(named[2:], kv_dir, yaml=NEVER_SAVED))
            assert (await kvferry.reload()).json["backends"] == {
                "added": ["c", "d"],
                "removed": ["a", "b"],
                "changed": [],
            }
            for name in "ab":
                await kvferry.until_is(name, "gone")
            for name in "cd":
                await kvferry.until_is(name, "up")
            for server in servers[:2]:
                server.kill()
            again = [await kvferry.complete(prompt) for prompt in prompts]
        assert_all_good(answers)
        assert {answer.slot[0] for answer in again} <= {"c", "d"}
        assert [answer.source for answer in again] == ["snapshot"] * 3
        assert all(all_but_one(answer) for answer in again)
        assert [answer.text for answer in again] == [answer.text for answer in first]


async def test_a_signal_to_the_process(llama_server: StartServer, tmp_path: Path) -> None:
    """SIGHUP applies a valid file and rejects one with mistakes; the router serves throughout."""
    a = await llama_server(slots=1)
    b = await llama_server(slots=1)
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text([("a", a.url)], a.kv_dir))
    async with serving("--config", str(path)) as process, aiohttp.ClientSession() as session:
        url = (await process.event("listening"))["url"]
        await process.event("backend_up")

        path.write_text("backends: [{url: nonsense}]\npolice: best\n")
        process.send(signal.SIGHUP)
        failed = await process.event("reload_failed")
        assert f"{path}:1: backends[0].url" in failed["reason"]
        assert "did you mean `policy`" in failed["reason"]

        path.write_text(configuration_text([("b", b.url)], b.kv_dir, yaml="policy: cheapest"))
        process.send(signal.SIGHUP)
        told = await process.event("reloaded")
        assert told["backends"] == {"added": ["b"], "removed": ["a"], "changed": []}
        assert [change["key"] for change in told["changed"]] == ["policy.name"]
        while (await process.event("backend_up"))["backend"] != "b":
            pass
        body = {"prompt": ids(1, 50), "n_predict": 4}
        async with session.post(f"{url}/completion", json=body) as response:
            answer = await read_answer(response)
        assert (answer.status, answer.slot[0]) == (200, "b")

        assert await process.end(signal.SIGTERM) == 0
        assert "Traceback" not in "".join(process.log)


async def test_a_signal_without_a_file(llama_server: StartServer) -> None:
    server = await llama_server(slots=1)
    flags = ("--backend", server.url, "--listen", "127.0.0.1:0")
    async with serving(*flags) as process:
        await process.event("listening")
        assert await process.end(signal.SIGHUP) == 0  # its terminal was closed
