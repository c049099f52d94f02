"""Log lines of requests: their content, and what no line ever contains."""

import asyncio
import gzip
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from aiohttp import web
from structlog.testing import capture_logs

from router.base.api_keys import hash_text
from router.web.server.listener import Listener
from router.web.server.settings import Settings
from tests.conftest import StartServer
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, configuration_text, running
from tests.tools.test_cli import serving

pytestmark = pytest.mark.thorough

SECRET = "xyzzyplugh"
BODY = {"prompt": "x", "n_predict": 4}
Lines = list[Any]


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    async with running([("a", fake.url)], tmp_path) as router:
        yield router


def about(lines: Lines) -> Lines:
    return [line for line in lines if line["event"] == "request"]


async def test_the_clients_own_id_comes_back_and_is_logged(kvferry: RunningRouter) -> None:
    ours = "x-kvferry-request-id"
    with capture_logs() as lines:
        first = await kvferry.post("/completion", BODY, headers={"X-Request-Id": "mine-1"})
        second = await kvferry.post("/completion", BODY)
        await kvferry.until_quiet()
    assert (first.headers["x-request-id"], "x-request-id" in second.headers) == ("mine-1", False)
    a, b = about(lines)
    assert (a["request_id"], a["client_request_id"]) == (first.headers[ours], "mine-1")
    assert b["request_id"] == second.headers[ours]
    assert "client_request_id" not in b


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/v1/chat/completions", {"messages": 1}, 200), ("/slots/0", {}, 403), ("/props", None, 200)],
)
async def test_also_where_no_slot_is_taken(
    kvferry: RunningRouter, path: str, body: object, status: int
) -> None:
    headers = {"X-Request-Id": "mine"}
    method = "GET" if body is None else "POST"
    with capture_logs() as lines:
        async with kvferry.session.request(
            method, kvferry.url + path, json=body, headers=headers
        ) as response:
            assert response.headers["x-request-id"] == "mine"
            assert "x-kvferry-request-id" in response.headers
        await kvferry.until_quiet()
    assert all(line["client_request_id"] == "mine" for line in about(lines))


@pytest.mark.parametrize("bad", ["x" * 129, "two words", "\u00e9"])
async def test_an_id_that_is_fit_for_no_log(kvferry: RunningRouter, bad: str) -> None:
    with capture_logs() as lines:
        answer = await kvferry.post("/completion", BODY, headers={"X-Request-Id": bad})
        await kvferry.until_quiet()
    assert "x-request-id" not in answer.headers
    assert "client_request_id" not in about(lines)[0]


@pytest.mark.parametrize("status", [400, 401])
async def test_a_body_that_cannot_be_read_is_one_line(
    caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """The log gets no traceback, which any client could cause without a key."""
    yaml = f"auth: {{keys: [{{name: a, tenant: a, hash: '{hash_text(SECRET)}'}}]}}"
    headers = {"Content-Encoding": "gzip"}
    if status == 400:
        headers["Authorization"] = f"Bearer {SECRET}"
    broken = [
        b"{}",
        gzip.compress(b"{}")[:-8] + b"no sum..",
        gzip.compress(b"{}")[:12] + b"\xff" * 9,
    ]
    async with running([("a", "http://127.0.0.1:9")], None, yaml=yaml, wait_for=[]) as kvferry:
        for raw in broken:
            caplog.clear()
            with capture_logs() as lines:
                async with kvferry.session.post(
                    f"{kvferry.url}/completion", data=raw, headers=headers
                ) as response:
                    assert response.status == status
                    await response.read()
                await asyncio.sleep(0.1)
            assert [line["event"] for line in lines] == ["request"]
            assert caplog.records == []


async def test_what_else_ends_a_connection_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A bug still gets its traceback."""
    connection = Listener(Mock(), Settings(), Mock(), Mock())()
    connection.log_exception("Unhandled exception", exc_info=web.RequestPayloadError())
    connection.log_exception("Unhandled exception", exc_info=ValueError())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


async def test_no_line_says_what_was_said(llama_server: StartServer, tmp_path: Path) -> None:
    """The log holds neither prompts nor keys, even at the lowest level and after all errors."""
    server = await llama_server(slots=1)
    path = tmp_path / "kvferry.yaml"
    yaml = "logging: {level: debug, format: json}\nqueue: {no_backend_wait: 200ms}"
    path.write_text(configuration_text([("a", server.url)], server.kv_dir, yaml=yaml))
    user = {"role": "user", "content": f"{SECRET} " * 100}
    headers = {
        "Authorization": f"Bearer {SECRET}",
        "X-Api-Key": SECRET,
        "X-Session-Id": SECRET,
        "Cookie": SECRET,
    }
    bodies: list[tuple[str, object]] = [
        ("/v1/chat/completions", {"messages": [user], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [user], "max_tokens": 4, "stream": True}),
        ("/v1/chat/completions", {"messages": [user | {"role": SECRET}], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": SECRET}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": {SECRET: 1}}]}),
        ("/v1/chat/completions", {"messages": [user], "max_tokens": 4, "tools": SECRET}),
        (
            "/v1/chat/completions",
            {"messages": [user], "max_tokens": 4, "response_format": {"type": SECRET}},
        ),
        (
            "/v1/chat/completions",
            {"messages": [user], "max_tokens": 4, "chat_template_kwargs": SECRET},
        ),
        ("/v1/messages", {"messages": [user], "max_tokens": 4, "system": SECRET}),
        ("/v1/responses", {"input": SECRET, "max_output_tokens": 4}),
        ("/completion", {"prompt": SECRET * 3, "n_predict": 4, "grammar": SECRET}),
        ("/completion", {"prompt": [SECRET, 5, 10**9], "n_predict": 4}),
        ("/completion", {"prompt": {SECRET: SECRET}}),
        ("/completion", {"prompt": f"{SECRET} " * 9000, "n_predict": 4}),
        ("/tokenize", {"content": SECRET}),
        ("/apply-template", {"messages": SECRET}),
    ]
    async with serving("--config", str(path)) as process, aiohttp.ClientSession() as session:
        url = (await process.event("listening"))["url"]
        await process.event("backend_up")
        for route, body in bodies:
            async with session.post(url + route, json=body, headers=headers) as response:
                await response.read()
        for raw in (f'{{"prompt": "{SECRET}', f"{SECRET}", f'{{"prompt": {SECRET}}}'):
            async with session.post(f"{url}/completion", data=raw, headers=headers) as response:
                assert response.status == 400
        long = {"prompt": f"{SECRET} " * 300, "n_predict": 4000}
        impatient = aiohttp.ClientTimeout(total=0.05)
        with pytest.raises(TimeoutError):
            await session.post(f"{url}/completion", json=long, headers=headers, timeout=impatient)
        server.kill()
        async with session.post(url + bodies[0][0], json=bodies[0][1], headers=headers) as response:
            assert response.status >= 500

        assert await process.end(signal.SIGTERM) == 0
        lines = "".join(process.log).splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    assert len([line for line in logged if line["event"] == "request"]) >= len(bodies)
    assert {"debug", "info"} <= {line["level"] for line in logged}
    assert [line for line in lines if SECRET in line] == []
