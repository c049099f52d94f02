"""`/v1/chat/completions/control` reaches the server that generates the named answer."""

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.conftest import StartServer
from tests.support.conversations.prompts import Json
from tests.support.parity.pair import Pair, client, difference
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

PATH = "/v1/chat/completions/control"
POLICIES = ("prefer_idle_slot_with_global_restore", "passthrough")
# An endless stream: it lasts until the test closes it.
TALK: Json = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}


@asynccontextmanager
async def being_written(kvferry: RunningRouter, **fields: object) -> AsyncIterator[tuple[str, str]]:
    """Start an answer; yield its backend and its id."""
    path = kvferry.url + "/v1/chat/completions"
    async with kvferry.session.post(path, json=TALK | fields) as response:
        line = await response.content.readline()
        name = json.loads(line.removeprefix(b"data: "))["id"]
        yield response.headers["x-kvferry-backend"], name


@pytest.mark.parametrize("policy", POLICIES)
async def test_it_gets_to_the_server_that_writes(llama_server: StartServer, policy: str) -> None:
    """Two servers of one model each generate an answer."""
    servers = {name: await llama_server(slots=1, ctx=32768) for name in ("a", "b")}
    urls = [(name, server.url) for name, server in servers.items()]
    async with AsyncExitStack() as stack:
        kvferry = await stack.enter_async_context(running(urls, None, yaml=f"policy: {policy}"))
        session = await stack.enter_async_context(client())
        plain = await stack.enter_async_context(being_written(kvferry))
        armed = await stack.enter_async_context(being_written(kvferry, reasoning_control=True))
        assert {plain[0], armed[0]} == {"a", "b"}
        end = {"action": "reasoning_end"}
        for (backend, name), success in ((plain, False), (armed, True)):
            pair = Pair(servers[backend].url, kvferry.url, session)
            direct, routed = await pair.ask("POST", PATH, json=end | {"id": name})
            assert difference(direct, routed) == ""
            assert json.loads(routed.body)["success"] is success
            assert routed.headers["x-kvferry-backend"] == backend
            odds: list[object] = [{}, [], end, {"id": name}, end | {"id": 7}, end | {"id": "no"}]
            for odd in odds:
                assert difference(*await pair.ask("POST", PATH, json=odd)) == "", odd


async def test_a_server_that_is_gone_is_passed_over(llama_server: StartServer) -> None:
    servers = {
        name: await llama_server(slots=1, ctx=32768, extra_args=["-a", name]) for name in ("a", "b")
    }
    urls = [(name, server.url) for name, server in servers.items()]
    async with running(urls, None, yaml="health: {interval: 1h}") as kvferry:
        first, second = kvferry.router.engine.infos  # in the order in which they are asked
        async with being_written(kvferry, model=second) as (backend, name):
            assert backend == second
            servers[first].kill()
            answer = await kvferry.post(PATH, {"id": name, "action": "reasoning_end"})
            assert answer.headers["x-kvferry-backend"] == second
