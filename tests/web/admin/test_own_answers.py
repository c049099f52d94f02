"""The router's own answers: to browsers, about itself, and after a bug."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
import structlog
from aiohttp import web

from router.web.api import passing, sending
from router.web.server.call import Call
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

ORIGIN = {"Origin": "http://localhost:3000"}
INTERNAL = 'kvferry_requests_total{outcome="internal_error"}'
SECRET = "what only the log may say"


@pytest.fixture
async def kvferry(tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], None) as router:
        yield router


@pytest.fixture
async def two_models() -> AsyncIterator[RunningRouter]:
    async with (
        FakeLlama(model="one") as one,
        FakeLlama(model="two") as two,
        running([("a", one.url), ("b", two.url)], None) as router,
    ):
        yield router


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/completion", 400),
        ("GET", "/slots", 200),
        ("GET", "/slots/0", 403),
        ("POST", "/kvferry/plan", 400),
        ("GET", "/metrics", 200),
        ("GET", "/kvferry/health", 200),
        ("GET", "/kvferry/state", 200),
    ],
)
async def test_names_itself_and_not_its_library(
    kvferry: RunningRouter, method: str, path: str, status: int
) -> None:
    async with kvferry.session.request(method, kvferry.url + path) as response:
        assert (response.status, response.headers.getall("Server")) == (status, ["kvferry"])


async def test_a_page_can_read_what_is_wrong_with_its_request(kvferry: RunningRouter) -> None:
    """llama-server names the origin in all of its answers; a browser hides an answer without it."""
    async with kvferry.session.post(kvferry.url + "/completion", headers=ORIGIN) as response:
        assert response.status == 400
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]
    async with kvferry.session.post(kvferry.url + "/completion") as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_page_can_read_the_list_of_all_models(two_models: RunningRouter) -> None:
    kvferry = two_models
    async with kvferry.session.get(kvferry.url + "/v1/models", headers=ORIGIN) as response:
        assert len((await response.json())["data"]) == 2
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]


async def test_no_page_can_read_what_is_for_operators(kvferry: RunningRouter) -> None:
    """Any page that an operator visits could send the request from the operator's browser."""
    for path in ("/kvferry/state", "/kvferry/health", "/metrics"):
        async with kvferry.session.get(kvferry.url + path, headers=ORIGIN) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


# --- bugs -----------------------------------------------------------------------------------------


@pytest.fixture
def log() -> Iterator[list[structlog.typing.EventDict]]:
    """Yield the log entries, which are not written."""
    with structlog.testing.capture_logs() as entries:
        yield entries


async def _broken(*_: object, **__: object) -> None:
    raise RuntimeError(SECRET)


@pytest.mark.parametrize(
    ("target", "name", "method", "path"),
    [
        (sending, "relay", "POST", "/completion"),
        (passing, "relay", "GET", "/lora-adapters"),
        (passing, "merge_models", "GET", "/v1/models"),
    ],
)
async def test_a_bug_before_the_answer(
    two_models: RunningRouter,
    log: list[structlog.typing.EventDict],
    monkeypatch: pytest.MonkeyPatch,
    target: object,
    bugs: Counter[str],
    name: str,
    method: str,
    path: str,
) -> None:
    """The client gets an error of the usual shape, the log the reason; the slot is free again."""
    kvferry = two_models

    def merge(_: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(target, name, merge if name == "merge_models" else _broken)
    async with kvferry.session.request(
        method,
        kvferry.url + path,
        headers=ORIGIN,
        json={"prompt": "x"} if method == "POST" else None,
    ) as response:
        body = await response.text()

    assert response.status == 500
    assert json.loads(body)["error"].keys() == {"code", "message", "type"}
    assert SECRET not in body
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN["Origin"]
    (logged,) = [entry for entry in log if entry["event"] == "request_failed"]
    assert logged["request_id"] == response.headers["x-kvferry-request-id"]
    assert SECRET in str(logged["exc_info"])
    assert (await kvferry.metrics())[INTERNAL] == 1
    await kvferry.until_quiet()


@pytest.mark.usefixtures("log")
async def test_a_bug_in_a_view(
    kvferry: RunningRouter, monkeypatch: pytest.MonkeyPatch, bugs: Counter[str]
) -> None:
    monkeypatch.setattr(type(kvferry.router.engine.state), "stopping", property(_raise))
    answer = await kvferry.get("/kvferry/health")
    monkeypatch.undo()

    assert (answer.status, answer.json["error"]["type"]) == (500, "server_error")
    assert (await kvferry.metrics())[INTERNAL] == 1


def _raise(_: object) -> None:
    raise RuntimeError(SECRET)


@pytest.mark.usefixtures("log")
async def test_a_bug_in_the_middle_of_an_answer(
    kvferry: RunningRouter, monkeypatch: pytest.MonkeyPatch, bugs: Counter[str]
) -> None:
    """A partial answer must not look complete."""

    async def breaks(call: Call, *_: object, **__: object) -> None:
        response = web.StreamResponse()
        await response.prepare(call.http)
        await response.write(b"half")
        raise RuntimeError(SECRET)

    monkeypatch.setattr(sending, "relay", breaks)
    with pytest.raises(aiohttp.ClientError):
        await kvferry.complete("x")

    assert (await kvferry.metrics())[INTERNAL] == 1
    await kvferry.until_quiet()


# --- clients that do not read ---------------------------------------------------------------------


async def test_a_client_that_does_not_take_what_is_ours_is_cut_off(tmp_path: Path) -> None:
    """The client sends many requests and reads nothing; its connection is the only one allowed."""
    yaml = "limits: {send_timeout: 100ms, connections_per_client: 1}"
    once = aiohttp.TCPConnector(force_close=True)
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], None, yaml=yaml) as router,
        aiohttp.ClientSession(connector=once) as others,
    ):
        await router.session.close()

        async def health() -> int:
            async with others.get(router.url + "/kvferry/health") as response:
                return response.status

        loop, parts = asyncio.get_running_loop(), urlsplit(router.url)
        with socket.socket() as greedy:
            greedy.setblocking(False)
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await loop.sock_connect(greedy, (parts.hostname, parts.port))
            await loop.sock_sendall(greedy, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
            assert await health() == 503
            while await health() != 200:
                pass
