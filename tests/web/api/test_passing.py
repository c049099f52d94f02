"""Forwarded requests and lists of models while a server hangs.

The process of a hanging server accepts connections and answers nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

HASTY = "health: {interval: 50ms, timeout: 100ms}"  # a hanging server is given up soon
BLIND = "health: {interval: 60s}"  # no check notices that a server hangs
PATIENCE_S = 10.0


class Hanging(FakeLlama):
    """A server that answers nothing while `goes_on` is cleared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.unanswered: list[tuple[str, str]] = []

    @web.middleware
    async def _front(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if not self.goes_on.is_set():
            self.unanswered.append((request.method, request.raw_path))
            await self._note()
        await self.goes_on.wait()
        return await super()._front(request, handler)


@pytest.fixture
async def a(tmp_path: Path) -> AsyncIterator[Hanging]:
    fake = Hanging(kv_dir=tmp_path, model="one")
    async with fake:
        yield fake


@pytest.fixture
async def b(tmp_path: Path) -> AsyncIterator[Hanging]:
    fake = Hanging(kv_dir=tmp_path, model="one")
    async with fake:
        yield fake


async def models(kvferry: RunningRouter) -> list[str]:
    async with asyncio.timeout(PATIENCE_S):
        answer = await kvferry.get("/v1/models")
    assert answer.status == 200
    return [model["id"] for model in answer.json["data"]]


@pytest.mark.parametrize(
    ("path", "policy"), [("/tokenize", ""), ("/unknown", ""), ("/completion", "passthrough")]
)
async def test_a_server_that_is_given_up_is_not_waited_for(
    a: Hanging, path: str, policy: str
) -> None:
    """Regression: these requests waited for `first_byte_timeout`, an hour.

    The server had been given up long before.
    """
    yaml = HASTY + (f"\npolicy: {policy}" if policy else "")
    async with running([("a", a.url)], None, yaml=yaml) as kvferry:
        a.goes_on.clear()
        async with asyncio.timeout(PATIENCE_S):
            answer = await kvferry.post(path, {"content": "x", "prompt": "x"})
        assert (answer.status, answer.json["error"]["type"]) == (502, "server_error")
        assert "went down" in answer.json["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("GET", "/some"), ("POST", "/tokenize")])
async def test_what_changes_nothing_is_asked_of_another(
    a: Hanging, b: Hanging, method: str, path: str
) -> None:
    async with running([("a", a.url), ("b", b.url)], None, yaml=HASTY) as kvferry:
        a.goes_on.clear()
        async with asyncio.timeout(PATIENCE_S):
            if method == "GET":
                answer = await kvferry.get(path)
            else:
                answer = await kvferry.post(path, {"content": "x"})
        assert answer.headers["x-kvferry-backend"] == "b"
        assert (method, path) in a.unanswered


async def test_what_may_change_something_is_sent_once(a: Hanging, b: Hanging) -> None:
    async with running([("a", a.url), ("b", b.url)], None, yaml=HASTY) as kvferry:
        a.goes_on.clear()
        async with asyncio.timeout(PATIENCE_S):
            answer = await kvferry.post("/unknown", {})
        assert answer.status == 502
        assert ("POST", "/unknown") in a.unanswered
        assert ("POST", "/unknown") not in b.seen


async def test_server_that_does_not_answer_is_checked_at_once(a: Hanging) -> None:
    """Regression: a failed request that took no slot triggered no check.

    Other requests went to the same server until the next regular check.
    """
    yaml = BLIND + "\nlimits: {first_byte_timeout: 200ms}"
    async with running([("a", a.url)], None, yaml=yaml) as kvferry:
        a.goes_on.clear()
        assert (await kvferry.post("/tokenize", {"content": "x"})).status == 504
        async with asyncio.timeout(PATIENCE_S):
            await a.until(lambda: ("GET", "/health") in a.unanswered)


async def test_the_models_of_a_server_that_hangs_are_left_out(
    a: Hanging, b: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the whole answer failed, after 10 s."""
    monkeypatch.setattr("router.web.api.passing._MODELS_WITHIN_S", 0.2)
    b.model = "two"
    async with running([("a", a.url), ("b", b.url)], None, yaml=BLIND) as kvferry:
        assert await models(kvferry) == ["one", "two"]
        b.goes_on.clear()
        assert await models(kvferry) == ["one"]
        a.goes_on.clear()
        assert (await kvferry.get("/v1/models")).status == 502


async def test_a_model_is_there_while_one_of_its_servers_answers(
    a: Hanging, b: Hanging, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.web.api.passing._MODELS_WITHIN_S", 0.2)
    async with Hanging(kv_dir=tmp_path, model="two") as c:
        backends = [("a", a.url), ("b", b.url), ("c", c.url)]
        async with running(backends, None, yaml=BLIND) as kvferry:
            a.goes_on.clear()
            assert await models(kvferry) == ["one", "two"]
