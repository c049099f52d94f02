"""Flags of a server that change what its slots reuse: seen by the probe, and nothing is wasted.

What was computed is counted by the server itself.
"""

import aiohttp
import pytest

from router.base.types import BackendId
from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import Json, chat, sentences
from tests.support.models.lora import tiny_lora
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import RunningRouter, running

pytestmark = pytest.mark.thorough

FIRST = chat(1, sentences(2, 17), length=45)
FORK = chat(1, sentences(2, 17), "Yes.", sentences(5, 17), length=45)


async def computed(server: LlamaServer) -> int:
    """Return the prompt tokens that the server has computed so far."""
    async with aiohttp.ClientSession() as session, session.get(f"{server.url}/metrics") as response:
        for line in (await response.text()).splitlines():
            if line.startswith("llamacpp:prompt_tokens_total"):
                return int(float(line.split()[-1]))
    raise AssertionError("no such metric")


async def cost(
    kvferry: RunningRouter, server: LlamaServer, messages: list[Json]
) -> tuple[int, int]:
    """Send a chat; return its tokens and how many the server computed for it."""
    before = await computed(server)
    answer = await kvferry.chat(messages)
    assert answer.status == 200, answer.body
    await kvferry.until_quiet()
    return answer.prompt_tokens, await computed(server) - before


async def note(kvferry: RunningRouter) -> str:
    return (await kvferry.state())["backends"][0]["note"] or ""


async def test_no_cache_prompt(llama_server: StartServer) -> None:
    """kvferry asks for reuse in requests that do not say; what it says itself, it says always."""
    server = await llama_server("llama", slots=1, extra_args=["--no-cache-prompt"])
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        assert "--no-cache-prompt" in await note(kvferry)
        tokens, first = await cost(kvferry, server, FIRST)
        _, again = await cost(kvferry, server, FIRST)
        plain = await kvferry.chat(FIRST, cache_prompt=False)

    assert first == tokens
    assert again <= 8
    assert plain.cached == 0


async def test_no_cache_prompt_on_a_route_that_cannot_ask(llama_server: StartServer) -> None:
    """`/v1/messages` drops `cache_prompt`: nothing is computed ahead for it."""
    server = await llama_server("llama", slots=1, extra_args=["--no-cache-prompt"])
    body: Json = {"messages": FIRST[1:], "system": FIRST[0]["content"], "max_tokens": 4}
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        for _ in range(2):
            before = await computed(server)
            answer = await kvferry.post("/v1/messages", body)
            assert answer.status == 200, answer.body
            await kvferry.until_quiet()
            assert await computed(server) - before <= answer.json["usage"]["input_tokens"] + 8


@pytest.mark.parametrize("checkpoints", [0, 1, 2])
async def test_few_checkpoints(llama_server: StartServer, checkpoints: int) -> None:
    """Going back finds a saved state where the server keeps no checkpoint for it."""
    flags = ["--ctx-checkpoints", str(checkpoints)]
    server = await llama_server("lfm2", slots=1, extra_args=flags)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        said = await note(kvferry)
        tokens, first = await cost(kvferry, server, FIRST)
        await kvferry.until(saved(int(0.9 * tokens)))
        _, again = await cost(kvferry, server, FIRST)
        _, turn = await cost(kvferry, server, FORK)
        _, back = await cost(kvferry, server, FIRST)
        if checkpoints == 2:  # the probe sees two; that there are no more shows a miss
            await cost(kvferry, server, FORK)
            _, back = await cost(kvferry, server, FIRST)

    assert ("--ctx-checkpoints" in said) == (checkpoints < 2)
    assert first == tokens
    assert again <= 0.05 * tokens
    assert turn <= 0.4 * tokens
    assert back <= 0.05 * tokens


async def test_an_adapter_that_is_changed_on_the_server(llama_server: StartServer) -> None:
    """States of the old adapter are not restored, nor what its slots hold."""
    server = await llama_server("llama", slots=2, extra_args=["--lora", str(tiny_lora())])
    reference = await llama_server("llama", slots=1, extra_args=["--lora", str(tiny_lora())])
    async with (
        direct(reference) as client,
        direct(server) as there,
        running([("a", server.url)], server.kv_dir) as kvferry,
    ):
        first = await kvferry.chat(FIRST, logprobs=True)
        await kvferry.until(saved(int(0.9 * first.prompt_tokens)))
        namespace = (await kvferry.state())["backends"][0]["namespace"]
        for one in (client, there):
            await one.post("/lora-adapters", [{"id": 0, "scale": 0.0}])
        await kvferry.until(
            lambda state: state["backends"][0].get("namespace", namespace) != namespace
        )
        for _ in range(2):
            answer = await kvferry.chat(FIRST)
            expected = await client.post(
                "/v1/chat/completions",
                {"messages": FIRST, "max_tokens": 8, "temperature": 0, "cache_prompt": False},
            )
            assert answer.text == expected.text != first.text


async def test_states_from_before_a_changed_adapter_is_noticed(llama_server: StartServer) -> None:
    """They were saved under the name of the old adapters, which may come back."""
    server = await llama_server("llama", slots=2, extra_args=["--lora", str(tiny_lora())])
    async with (
        direct(server) as there,
        running([("a", server.url)], server.kv_dir, yaml="health: {interval: 1h}") as kvferry,
    ):
        await there.post("/lora-adapters", [{"id": 0, "scale": 0.0}])
        wrong = await kvferry.chat(FIRST)
        await kvferry.until(saved(int(0.9 * wrong.prompt_tokens)))
        monitor = kvferry.router.selection.monitors[BackendId("a")]
        namespace = (await kvferry.state())["backends"][0]["namespace"]
        await monitor.check_again()
        await kvferry.until(lambda state: not state["snapshots"]["count"])
        await there.post("/lora-adapters", [{"id": 0, "scale": 1.0}])
        monitor._adapters_asked_at = 0.0  # not asked for a while
        await monitor.check_again()

        answer = await kvferry.chat(FIRST)

        assert (await kvferry.state())["backends"][0]["namespace"] == namespace
        assert answer.cached == 0
