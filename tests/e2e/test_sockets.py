"""Unix sockets: a llama-server behind one, and kvferry itself at one, for another proxy."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from router.assembly.backends import StartError
from router.assembly.router import build, listening
from router.tools.cli import main
from tests.conftest import StartServer
from tests.support.conversations.conversing import use_like_any
from tests.support.conversations.prompts import ids
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import Json, configuration, running


@asynccontextmanager
async def at_socket(path: Path, backend: str, yaml: str = "") -> AsyncIterator[str]:
    """Run a router that listens on a socket; yield its URL."""
    text = f"listen: 'unix:{path}'\n{yaml}"
    async with (
        build(configuration([("a", backend)], None, yaml=text)) as router,
        listening(router) as url,
    ):
        yield url


@asynccontextmanager
async def client(path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.UnixConnector(str(path))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        yield session


@pytest.mark.real
async def test_server_at_a_socket(llama_server: StartServer, tmp_path: Path) -> None:
    """Its prompts are read, its slots saved and restored, its routes passed on."""
    server = await llama_server("llama", extra_args=["--host", str(tmp_path / "llama.sock")])
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        await use_like_any(kvferry)
        await server.stop()
        os.unlink(str(server.socket))  # llama-server leaves it, and would not start again
        await server.start()
        assert (await kvferry.complete(ids(2, 300))).status == 200


async def test_router_at_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "kvferry.sock"
    async with FakeLlama() as fake, at_socket(path, fake.url) as url, client(path) as session:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        body: Json = {"prompt": "x" * 200, "n_predict": 4}
        async with session.post("/completion", json=body) as answer:
            assert answer.status == 200
        async with session.post("/kvferry/reload", json={}) as answer:  # as from this machine
            assert answer.status != 403
        forwarded = {"X-Forwarded-For": "10.0.0.1"}
        async with session.post("/kvferry/reload", json={}, headers=forwarded) as answer:
            assert answer.status == 403
    assert not path.exists()


async def test_command_asks_a_router_at_a_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kvferry.sock"
    async with FakeLlama() as fake, at_socket(path, fake.url) as url:
        assert await asyncio.to_thread(main, ["top", "--once", "--url", url]) == 0
    assert "kvferry unix:/" in capsys.readouterr().out


async def test_socket_of_a_router_that_was_killed_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kvferry.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with FakeLlama() as fake, at_socket(path, fake.url), client(path) as session:
        assert (await session.get("/kvferry/state")).status == 200


async def test_socket_of_a_running_router_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "kvferry.sock"
    async with FakeLlama() as fake, at_socket(path, fake.url), client(path) as session:
        with pytest.raises(StartError, match=r"^listen \(--listen\): Address already in use"):
            async with at_socket(path, fake.url):
                pass
        assert (await session.get("/kvferry/state")).status == 200


async def test_socket_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    """A router that stops takes its socket away, and not that of one that has begun meanwhile."""
    path = tmp_path / "kvferry.sock"
    async with FakeLlama() as fake:
        async with at_socket(path, fake.url):
            path.unlink()
            with socket.socket(socket.AF_UNIX) as other:
                other.bind(str(path))
        assert path.is_socket()


async def test_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kvferry.sock"
    path.write_text("mine")
    async with FakeLlama() as fake:
        with pytest.raises(StartError, match=r"^listen"):
            async with at_socket(path, fake.url):
                pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
async def test_queue_is_fair_between_the_clients_of_a_trusted_proxy(
    tmp_path: Path, header: str
) -> None:
    """Ten requests of one client do not stand before the one of another."""
    path = tmp_path / "kvferry.sock"
    yaml = "limits: {trusted_proxies: [192.0.2.0/24]}"
    async with (
        FakeLlama(n_slots=1) as fake,
        at_socket(path, fake.url, yaml) as url,
        client(path) as session,
        asyncio.TaskGroup() as group,
    ):
        assert url
        order: list[str] = []
        body: Json = {"prompt": [3] * 200, "n_predict": 1}
        assert (await session.post("/completion", json=body)).status == 200  # the server is up
        fake.prefill_gate.clear()

        async def ask(sender: str, n: int) -> None:
            told = f"for={sender};proto=https" if header == "Forwarded" else f"1.1.1.1, {sender}"
            body: Json = {"prompt": [5 + n] * 200, "n_predict": 1}
            async with session.post("/completion", json=body, headers={header: told}) as answer:
                assert answer.status == 200
            order.append(sender)

        async def queued(n: int) -> None:
            while True:
                async with session.get("/kvferry/state") as answer:
                    if len((await answer.json())["queue"]) == n:
                        return

        for n in range(4):
            group.create_task(ask("203.0.113.1", n))
        await queued(3)
        group.create_task(ask("203.0.113.2", 9))
        await queued(4)
        fake.prefill_gate.set()
    assert order.index("203.0.113.2") < 3
