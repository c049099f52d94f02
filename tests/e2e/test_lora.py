"""LoRA adapters for single requests (docs/llama-server.md section 1.7).

Requests with an adapter never reuse KV of other requests, nor the other way round.
"""

import asyncio
from collections.abc import Sequence

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import differs_in_earnest, saved
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.models.lora import tiny_lora
from tests.support.servers.running_router import Answer, RunningRouter, is_quiet, running

pytestmark = pytest.mark.thorough

# Applied to all requests; `--lora-init-without-apply` changes nothing for the server's requests.
FLAGS = ("--lora", str(tiny_lora()))
LORA: list[Json] = [{"id": 0, "scale": 0.0}]
PROMPT = ids(1, 300)
BODY: Json = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "n_probs": 5}


async def fresh(client: Direct, **more: object) -> Answer:
    return await client.post("/completion", BODY | {"cache_prompt": False} | more)


async def ask(kvferry: RunningRouter, **more: object) -> Answer:
    answer = await kvferry.post("/completion", BODY | more)
    assert answer.status == 200, answer.body
    return answer


def same(found: Answer, expected: Answer) -> str:
    """Return the difference of two answers, as `differs_in_earnest` does.

    Assert that the answer has probabilities.
    """
    assert found.json["completion_probabilities"]
    return differs_in_earnest(found, expected)


@pytest.mark.parametrize(
    "snapshots",
    [
        pytest.param(True, id="slot actions"),
        pytest.param(False, id="no slot actions", marks=pytest.mark.slow),
    ],
)
async def test_each_goes_on_from_its_own(
    llama_server: StartServer, server_argv: Sequence[str], snapshots: bool
) -> None:
    """One slot serves the same prompt with the adapter and without, alternately."""
    reference = await llama_server("llama", slots=1, extra_args=FLAGS)
    server = await llama_server("llama", slots=1, extra_args=FLAGS)
    if not snapshots:
        await server.stop()
        server.kv_dir = None
        await server.start()
    kv_dir = server.kv_dir
    async with direct(reference) as client, running([("a", server.url)], kv_dir) as kvferry:
        plain, adapted = await fresh(client), await fresh(client, lora=LORA)
        assert same(plain, adapted), "the adapter changes nothing"

        first = await ask(kvferry)
        assert same(first, plain) == ""
        if snapshots:
            await kvferry.until(saved(len(PROMPT)))
        for lora in (LORA, LORA, None, LORA, [{"id": 0, "scale": 0.5}]):
            found = await ask(kvferry, **({} if lora is None else {"lora": lora}))
            expected = await fresh(client, **({} if lora is None else {"lora": lora}))
            assert same(found, expected) == "", lora
            assert lora is None or found.cached == 0
        last = await ask(kvferry)
        assert same(last, plain) == ""
        if snapshots:
            assert (last.source, last.cached) == ("snapshot", len(PROMPT) - 1)
        state = await kvferry.until_quiet()
        assert all(item["tokens"] <= len(PROMPT) + 8 for item in state["snapshots"]["items"])


async def test_a_chat_beside_it_on_a_route_without_pins(llama_server: StartServer) -> None:
    """`/v1/messages` runs on the slot with the longest common prefix, never on the adapted one."""
    messages = chat(1, sentences(2, 3), length=20)
    body: Json = {"messages": messages, "max_tokens": 4, "temperature": 0}
    claude: Json = body | {"system": messages[0]["content"], "messages": messages[1:]}
    reference = await llama_server("llama", slots=1, extra_args=FLAGS)
    server = await llama_server("llama", slots=2, extra_args=FLAGS)
    async with direct(reference) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        expected = await client.post("/v1/messages", claude)
        adapted = await kvferry.post("/v1/chat/completions", body | {"lora": LORA})
        assert adapted.status == 200
        found = await kvferry.post("/v1/messages", claude)
        assert found.json["content"] == expected.json["content"]
        assert adapted.text != expected.json["content"][0]["text"], "the adapter changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"n_cmpl": 2}, {"prompt": [PROMPT, [*PROMPT, 300]]}], ids=["n", "batch"]
)
async def test_several_answers_at_once(llama_server: StartServer, more: Json) -> None:
    """Several answers are server-placed: the content of no slot is trusted."""
    reference = await llama_server("llama", slots=1, extra_args=FLAGS)
    server = await llama_server("llama", slots=2, extra_args=FLAGS)
    async with direct(reference) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        plain = await fresh(client)
        async with kvferry.session.post(
            kvferry.url + "/completion", json=BODY | {"lora": LORA} | more
        ) as response:
            assert response.status == 200
            await response.read()
        for index in range(2):
            found = await ask(kvferry, id_slot=index)
            assert same(found, plain) == "", index


async def test_a_client_that_leaves(llama_server: StartServer) -> None:
    """The slot of an abandoned request is wiped as well."""
    reference = await llama_server("llama", slots=1, extra_args=FLAGS)
    server = await llama_server("llama", slots=1, extra_args=FLAGS)
    async with direct(reference) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        plain = await fresh(client)
        long = {"lora": LORA, "n_predict": 3000, "stream": True, "ignore_eos": True}
        async with kvferry.session.post(kvferry.url + "/completion", json=BODY | long) as response:
            await response.content.readuntil(b"\n\n")
        found = await ask(kvferry)
        assert same(found, plain) == ""
        assert is_quiet(await kvferry.until_quiet())


async def test_what_was_there_before_the_router(llama_server: StartServer) -> None:
    """A starting router learns from the server that the last request of a slot had adapters."""
    reference = await llama_server("llama", slots=1, extra_args=FLAGS)
    server = await llama_server("llama", slots=1, extra_args=FLAGS)
    async with direct(reference) as client, direct(server) as before:
        plain = await fresh(client)
        await before.post("/completion", BODY | {"lora": LORA})
        async with running([("a", server.url)], server.kv_dir) as kvferry:
            found = await asyncio.wait_for(ask(kvferry), 60)
            assert same(found, plain) == ""
