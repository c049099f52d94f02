"""SIGTERM to a real `kvferry serve` in front of a real server.

New requests are refused, running ones end, and computed states are saved.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, ids
from tests.support.faults.breaking import BROKEN_OFF, until_at_work
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, configuration_text, read_answer
from tests.tools.test_cli import Process, serving

pytestmark = pytest.mark.thorough

Seen = Callable[[str, object], None]
LONG = 1500
# Slots are saved only when the router stops.
YAML = "store: {idle_save_after: 'off'}\nshutdown_grace: %s\n"


@asynccontextmanager
async def served(
    server: LlamaServer, tmp_path: Path, grace: str = "60s", more: str = ""
) -> AsyncIterator[tuple[Process, "Client"]]:
    """Start a router as a process; yield it and a client once its backend is up."""
    path = tmp_path / "kvferry.yaml"
    path.write_text(
        configuration_text([("a", server.url)], server.kv_dir, yaml=YAML % grace + more)
    )
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        serving("--config", str(path)) as process,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        url = (await process.event("listening"))["url"]
        await process.event("backend_up")
        yield process, Client(url, session)


class Client:
    """A client of a router in another process."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def complete(self, prompt: list[int], **fields: object) -> Answer | None:
        """Return the answer, or None if the connection was broken off."""
        body: Json = {"prompt": prompt, "n_predict": 8, "temperature": 0, **fields}
        try:
            async with self.session.post(self.url + "/completion", json=body) as response:
                return await read_answer(response)
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
            return None

    async def until_queued(self, n: int) -> None:
        """Wait until `n` requests are queued."""
        while True:
            async with self.session.get(self.url + "/kvferry/state") as response:
                if len((await response.json())["queue"]) == n:
                    return
            await asyncio.sleep(0.02)

    async def begin(self, server: LlamaServer, n_predict: int) -> "asyncio.Task[Answer | None]":
        """Start a stream, and return its task when the server is at work."""
        fields: Json = {"stream": True, "n_predict": n_predict, "ignore_eos": True}
        task = asyncio.get_running_loop().create_task(self.complete(ids(1, LONG), **fields))
        await until_at_work(self.session, {"a": server})
        return task


@pytest.mark.fault("router gets SIGTERM", "streaming, with a queue and a state to save")
async def test_running_ones_end_and_are_saved(
    llama_server: StartServer, tmp_path: Path, record_property: Seen
) -> None:
    server = await llama_server(slots=1, ctx=8192)
    async with served(server, tmp_path) as (process, client):
        running = await client.begin(server, 1000)
        queued = asyncio.get_running_loop().create_task(client.complete(ids(2, 50)))
        await client.until_queued(1)
        process.send(signal.SIGTERM)
        await process.event("stopping")
        refused = [await queued, await client.complete(ids(3, 50))]
        assert not running.done()
        for answer in refused:
            assert answer is not None
            assert (answer.status, answer.json["error"]["type"]) == (503, "unavailable_error")
            assert int(answer.headers["Retry-After"]) >= 1
        whole = await running
        assert whole is not None
        assert whole.events[-1]["tokens_predicted"] == 1000
        assert await process.end() == 0
        assert "Traceback" not in "".join(process.log)
    record_property(
        "client", "running: the whole answer; others: 503 with Retry-After; exit code 0"
    )

    await server.restart()  # so that only the files are left
    async with served(server, tmp_path) as (process, client):
        again = await client.complete(ids(1, LONG))
        assert again is not None
        assert (again.source, again.cached) == ("snapshot", LONG - 1)
        assert await process.end(signal.SIGTERM) == 0


@pytest.mark.fault("router gets SIGTERM", "streaming with `policy: passthrough`")
async def test_what_is_only_passed_on_ends_as_well(
    llama_server: StartServer, tmp_path: Path, record_property: Seen
) -> None:
    server = await llama_server(slots=1, ctx=8192)
    async with served(server, tmp_path, more="policy: passthrough\n") as (process, client):
        running = await client.begin(server, 6000)
        process.send(signal.SIGTERM)
        await process.event("stopping")
        refused = await client.complete(ids(3, 50))
        assert not running.done()
        assert refused is not None
        assert (refused.status, refused.json["error"]["type"]) == (503, "unavailable_error")
        whole = await running
        assert whole is not None
        assert whole.events[-1]["tokens_predicted"] == 6000
        assert await process.end() == 0
    record_property("client", "running: the whole answer; others: 503; exit code 0")


@pytest.mark.fault("router gets SIGTERM", "streaming for longer than `shutdown_grace`")
async def test_those_that_take_too_long_are_broken_off(
    llama_server: StartServer, tmp_path: Path, record_property: Seen
) -> None:
    server = await llama_server(slots=1, ctx=8192)
    async with served(server, tmp_path, "200ms") as (process, client):
        running = await client.begin(server, 6000)
        process.send(signal.SIGTERM)
        await process.event("stopped_with_requests_running")
        assert await running is None
        assert await process.end() == 0
        assert "Traceback" not in "".join(process.log)
    record_property("client", f"{BROKEN_OFF}; exit code 0")


@pytest.mark.fault("router gets a second SIGTERM", "while it waits for a stream to end")
async def test_a_second_signal_ends_it_at_once(
    llama_server: StartServer, tmp_path: Path, record_property: Seen
) -> None:
    server = await llama_server(slots=1, ctx=8192)
    async with served(server, tmp_path) as (process, client):
        running = await client.begin(server, 6000)
        process.send(signal.SIGTERM)
        await process.event("stopping")
        assert await process.end(signal.SIGTERM) == 130
        assert await running is None
    record_property("client", f"{BROKEN_OFF}; exit code 130")

    async with served(server, tmp_path) as (process, client):
        answer = await client.complete(ids(2, 50))
        assert answer is not None
        assert answer.status == 200
        assert await process.end(signal.SIGTERM) == 0
