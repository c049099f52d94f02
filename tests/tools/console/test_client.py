"""Calls to a router over HTTP: the router's words for a refusal, few words for a failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from math import inf

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.tools.console import client
from router.tools.console.client import CallError, RouterClient, connected

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(handler: Handler) -> AsyncIterator[RouterClient]:
    async def any_path(request: web.Request) -> web.StreamResponse:
        response = await handler(request)
        response.headers["x-kvferry-request-id"] = "r"
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", any_path)
    async with TestServer(app) as server, connected(f"{server.make_url('/')}") as made:
        yield made


@pytest.mark.parametrize("body", ["", "<html>", "[]", '{"error": "x"}'])
async def test_an_error_without_words(body: str) -> None:
    async def fail(_: web.BaseRequest) -> web.Response:
        return web.Response(text=body, status=502)

    async with answering(fail) as router:
        with pytest.raises(CallError, match="/x was answered with 502"):
            await router.call("GET", "/x")
        with pytest.raises(CallError, match="is not a kvferry"):
            await router.state()


@pytest.mark.parametrize(
    ("status", "body", "found"),
    [(200, '{"requests": [{"id": "r"}]}', [{"id": "r"}]), (200, "{}", []), (404, "no", [])],
)
async def test_decisions_are_optional(status: int, body: str, found: list[object]) -> None:
    async def answer(request: web.BaseRequest) -> web.Response:
        assert request.path_qs == "/kvferry/requests?limit=7"
        return web.Response(text=body, status=status)

    async with answering(answer) as router:
        assert await router.decisions(7) == found


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:9", "Connection refused"),
        ("nonsense", "begins with http:// or https://"),
        ("localhost:8080", "begins with http:// or https://"),
        ("127.0.0.1:8080", "begins with http:// or https://"),
        ("http://[::", "not a valid URL; an example: http://"),
        ("ftp://x", "not a valid URL; an example: http://"),
    ],
)
async def test_nobody_answers(url: str, why: str) -> None:
    async with connected(url) as router:
        with pytest.raises(CallError, match="no router answers at") as caught:
            await router.state()
    assert why in str(caught.value)


async def test_a_router_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.05)
    enough = asyncio.Event()

    async def hang(_: web.BaseRequest) -> web.Response:
        await enough.wait()
        return web.Response()

    async with answering(hang) as router:
        with pytest.raises(CallError, match=r"no answer within 0\.05 s"):
            await router.state()
        enough.set()


async def test_what_takes_long_may_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload goes on in the router, however long large directories take to read."""
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.05)
    enough = asyncio.Event()

    async def hang(_: web.BaseRequest) -> web.Response:
        await enough.wait()
        return web.json_response({"done": True})

    async with answering(hang) as router, asyncio.TaskGroup() as group:
        reloading = group.create_task(router.call("POST", "/x", timeout_s=inf))
        with pytest.raises(CallError, match="no answer within"):
            await router.call("POST", "/x")
        enough.set()
    assert reloading.result() == {"done": True}
