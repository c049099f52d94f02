"""Abandoned requests on a real llama-server.

The tests poll `/slots` only afterwards: with more than one poll a second the server does not notice
that a client has disconnected (llama-server.md section 5.6).
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Json, RunningRouter, running

pytestmark = [pytest.mark.thorough, pytest.mark.asyncio(loop_scope="module")]

# Seconds of prefill on one thread, so that a client can disconnect during it.
TOKENS = [3 + i * 7 % 400 for i in range(30_000)]
# Seconds of generation.
ENDLESS: Json = {"prompt": [5, 6, 7], "n_predict": 60_000, "temperature": 0, "ignore_eos": True}


async def _started(argv: list[str], kv_dir: Path, *flags: str) -> AsyncIterator[LlamaServer]:
    model = tiny_model("llama").path
    async with LlamaServer(
        model, slots=1, ctx=65536, kv_dir=kv_dir, argv=argv, extra_args=flags
    ) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LlamaServer]:
    async for started in _started(server_argv, tmp_path_factory.mktemp("kv")):
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caching(
    server_argv: list[str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LlamaServer]:
    """Yield a server with a cache in RAM, the default of llama-server."""
    kv_dir = tmp_path_factory.mktemp("kv")
    async for started in _started(server_argv, kv_dir, "--cache-ram", "512"):
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def kvferry(server: LlamaServer) -> AsyncIterator[RunningRouter]:
    """Yield a router without snapshots: these tests are only about stopping."""
    async with running([("a", server.url)], None, yaml="policy: least_busy") as router:
        yield router


async def look(server: LlamaServer, kvferry: RunningRouter) -> Json:
    """Return the server's slot as it is now (`GET /slots`)."""
    async with kvferry.session.get(server.url + "/slots") as response:
        slots: list[Json] = await response.json()
        return slots[0]


async def until_processing(server: LlamaServer, kvferry: RunningRouter) -> None:
    while True:
        if (await look(server, kvferry))["is_processing"]:
            return
        await asyncio.sleep(0.02)


async def assert_stopped(server: LlamaServer, kvferry: RunningRouter) -> Json:
    """Check that the server's slot is idle and that the router leases it again; return the slot."""
    await kvferry.until_quiet()
    first = await look(server, kvferry)
    assert not first["is_processing"]
    answer = await kvferry.complete([1, 2, 3], n_predict=1)
    assert answer.status == 200
    assert (await look(server, kvferry))["n_prompt_tokens"] == 3
    return first


@pytest.mark.fault("a client leaves", "computing a prompt")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_during_a_silent_prefill(
    server: LlamaServer, kvferry: RunningRouter, stream: bool
) -> None:
    """The server notices the disconnect within a second or so, before its next batch."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.complete(TOKENS, stream=stream))
        await until_processing(server, kvferry)
        task.cancel()

    stopped = await assert_stopped(server, kvferry)
    assert stopped["n_prompt_tokens"] < len(TOKENS)


async def test_during_the_routers_own_prefill(server: LlamaServer, tmp_path: Path) -> None:
    kv_dir = server.kv_dir
    async with running(
        [("a", server.url)], kv_dir, yaml="policy: {coalesce_above: 10ms}"
    ) as kvferry:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(TOKENS))
            await kvferry.until(lambda state: state["slots"][0]["phase"] == "preparing")
            await until_processing(server, kvferry)
            task.cancel()
        stopped = await assert_stopped(server, kvferry)
        assert stopped["n_prompt_tokens"] < len(TOKENS)


@pytest.mark.fault("a client leaves", "mid-stream")
async def test_in_the_middle_of_a_stream(server: LlamaServer, kvferry: RunningRouter) -> None:
    body = ENDLESS | {"stream": True}
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        for _ in range(5):
            await response.content.readuntil(b"\n\n")

    stopped = await assert_stopped(server, kvferry)
    assert 3 + 4 <= stopped["n_prompt_tokens"] < 60_000


@pytest.mark.fault("a client leaves a request that does not stream", "generating")
async def test_of_a_request_that_does_not_stream(
    server: LlamaServer, kvferry: RunningRouter
) -> None:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(kvferry.post("/completion", ENDLESS))
        await until_processing(server, kvferry)
        task.cancel()

    stopped = await assert_stopped(server, kvferry)
    assert stopped["n_prompt_tokens"] < 60_000


async def test_conversation_id_does_not_keep_it_going(
    server: LlamaServer, kvferry: RunningRouter
) -> None:
    """llama-server goes on with an abandoned request that has this header; the router drops it."""
    body = ENDLESS | {"stream": True}
    headers = {"X-Conversation-Id": "abc"}
    async with kvferry.session.post(
        kvferry.url + "/completion", json=body, headers=headers
    ) as response:
        await response.content.readuntil(b"\n\n")

    stopped = await assert_stopped(server, kvferry)
    assert stopped["n_prompt_tokens"] < 60_000


# --- every route ----------------------------------------------------------------------------------

_LONG = "the quick brown fox jumps over the lazy dog, and then " * 1500
_WITHOUT_END: Json = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}


def _bodies(text: str, n: int) -> dict[str, Json]:
    """Return a body for each route: a prompt of `text` and up to `n` tokens of answer."""
    messages = [{"role": "user", "content": text}]
    return {
        "/completion": {"prompt": text, "n_predict": n, **_WITHOUT_END},
        "/v1/completions": {"prompt": text, "max_tokens": n, **_WITHOUT_END},
        "/v1/chat/completions": {"messages": messages, "max_tokens": n, **_WITHOUT_END},
        "/v1/messages": {"messages": messages, "max_tokens": n, "temperature": 0},
        "/v1/responses": {"input": text, "max_output_tokens": n, **_WITHOUT_END},
        "/infill": {"input_prefix": text, "input_suffix": "x", "n_predict": n, **_WITHOUT_END},
    }


_ROUTES = list(_bodies("", 0))
# Two cases run often, all of them in the slow run.
_OFTEN = {("/v1/chat/completions", False, "generation"), ("/v1/messages", True, "generation")}


@pytest.mark.parametrize(
    ("path", "stream", "where"),
    [
        pytest.param(*case, marks=[] if case in _OFTEN else [pytest.mark.slow])
        for case in (
            (path, stream, where)
            for path in _ROUTES
            for stream in (False, True)
            for where in ("prefill", "generation")
        )
    ],
)
async def test_on_every_route(caching: LlamaServer, path: str, stream: bool, where: str) -> None:
    """The server also keeps states in RAM here.

    The next request, pinned to a slot that is still busy, would take away the slot's content
    (llama-server.md section 0.1).
    """
    server = caching
    text, n = (_LONG, 1) if where == "prefill" else ("hi", 60_000)
    body = _bodies(text, n)[path] | {"stream": stream}
    async with running([("a", server.url)], None, yaml="policy: least_busy") as kvferry:
        whole = (await kvferry.post("/tokenize", {"content": _LONG})).json["tokens"]
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.post(path, body))
            await until_processing(server, kvferry)
            assert not task.done()
            task.cancel()
        stopped = await assert_stopped(server, kvferry)
        assert stopped["n_prompt_tokens"] < (len(whole) if where == "prefill" else n)


async def test_of_a_queue_nothing_reaches_the_server(
    server: LlamaServer, kvferry: RunningRouter
) -> None:
    """Requests on all routes wait for a busy slot, and are abandoned in the queue."""

    async def computed() -> float:
        async with kvferry.session.get(server.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        (value,) = [line.split()[1] for line in lines if line.startswith(_PROMPT_TOKENS + " ")]
        return float(value)

    async with asyncio.TaskGroup() as group:
        first = group.create_task(kvferry.post("/completion", ENDLESS))
        await until_processing(server, kvferry)
        bodies = _bodies("one two three", 1).items()
        queued = [
            group.create_task(kvferry.post(path, body | {"stream": stream}))
            for path, body in bodies
            for stream in (False, True)
        ]
        await kvferry.until(lambda state: len(state["queue"]) == len(queued))
        for task in queued:
            task.cancel()
        await kvferry.until(lambda state: not state["queue"])
        before = await computed()
        first.cancel()

    await kvferry.until_quiet()
    assert await computed() <= before + 3  # the first request's own, if not counted yet


_PROMPT_TOKENS = "llamacpp:prompt_tokens_total"
