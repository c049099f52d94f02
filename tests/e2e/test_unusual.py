"""Requests that need several slots, or are served in a special way, beside conversations.

Each answer equals that of the server alone, and the records of slots and files stay true.
"""

import asyncio

import aiohttp
import orjson
import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, differs_in_earnest, saved
from tests.support.conversations.measuring import Direct, direct
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

# Chat, embeddings and, with `rank`, reranking: one server does all of it.
EMBEDS = ("--embeddings", "--pooling", "mean")
RANKS = ("--embeddings", "--pooling", "rank")
GREEDY: Json = {"temperature": 0, "seed": 7, "cache_prompt": False}
PROMPT = ids(1, 600)


async def plain(kvferry: RunningRouter, **more: object) -> Answer:
    return await kvferry.complete(PROMPT, n_probs=5, **more)


async def plain_directly(client: Direct) -> Answer:
    return await client.post(
        "/completion", {"prompt": PROMPT, "n_predict": 8, "n_probs": 5, **GREEDY}
    )


def same(found: Answer, expected: Answer) -> str:
    assert found.json["completion_probabilities"]
    return differs_in_earnest(found, expected)


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_prompt_restored_after_several_answers(
    llama_server: StartServer, max_tokens: int
) -> None:
    """A restored prompt is intact after a request with several answers.

    The server copies the shared prompt to the answers' slots only with its next batch. If each
    answer ends with its first token, the copy would overwrite content restored there meanwhile.
    """
    reference, server = await llama_server("llama"), await llama_server("llama", slots=2)
    one: Json = GREEDY | {"n_predict": 1, "n_probs": 5}
    async with direct(reference) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        await plain(kvferry)
        await kvferry.until(saved(len(PROMPT)))
        for turn in range(6):
            talk = chat(30 + turn, sentences(30 + turn, 2), length=10)
            await kvferry.chat(talk, n=2, max_tokens=max_tokens)
            prompt = PROMPT + ids(100 + turn, 40)
            ours = await kvferry.complete(prompt, n_predict=1, n_probs=5)
            theirs = await client.post("/completion", one | {"prompt": prompt})
            assert ours.source == "snapshot"
            assert differs_in_earnest(ours, theirs) == ""


async def test_an_embedding_takes_one_slot(llama_server: StartServer) -> None:
    """An embedding displaces one slot; the others stay known, however fast the embedding is over.

    The server takes the least recently used slot, so a fourth embedding would take the
    conversation's.
    """
    server = await llama_server("llama", slots=4, ctx=16384, extra_args=EMBEDS)
    async with running([("a", server.url)], None) as kvferry:
        await plain(kvferry, id_slot=0)
        for _ in range(3):
            assert (await kvferry.post("/v1/embeddings", {"input": "a ferry"})).status == 200
            state = await kvferry.until_quiet()
            assert state["slots"][0]["resident_tokens"] >= len(PROMPT)
        again = await plain(kvferry)
        assert (again.slot, again.source) == (("a", 0), "resident")
        assert all_but_one(again)


@pytest.mark.parametrize("prompts", [["one"], ["one", "two"]])
async def test_prompts_in_a_form(llama_server: StartServer, prompts: list[str]) -> None:
    """One prompt runs in the slot that the server picks, and the other slot stays known.

    Two prompts are a batch, in all slots of the server.
    """
    server = await llama_server("llama", slots=2)
    async with running([("a", server.url)], None) as kvferry:
        for index in (0, 1):
            await plain(kvferry, id_slot=index)
        fields = [*(("prompt", prompt) for prompt in prompts), ("grammar", 'root ::= "yes"')]
        body = aiohttp.FormData(fields, default_to_multipart=True)
        async with kvferry.session.post(kvferry.url + "/completion", data=body) as response:
            found = orjson.loads(await response.read())
        answers = found if isinstance(found, list) else [found]
        assert [answer["content"] for answer in answers] == ["yes"] * len(prompts)
        state = await kvferry.until_quiet()
        kept = sum(slot["resident_tokens"] >= len(PROMPT) for slot in state["slots"])
        assert kept == 2 - len(prompts)


async def test_reranking_beside_a_conversation(llama_server: StartServer) -> None:
    """Scores are not compared: even the server's own depend on what its slots held before."""
    reference = await llama_server("llama", slots=2, extra_args=RANKS)
    server = await llama_server("llama", slots=2, extra_args=RANKS)
    body: Json = {"query": "ferry", "documents": ["a boat", "a car", "a ferry"]}
    async with direct(reference) as client, running([("a", server.url)], server.kv_dir) as kvferry:
        expected = await plain_directly(client)
        for _ in range(3):
            again = await plain(kvferry)
            assert same(again, expected) == ""
            ours = await kvferry.post("/v1/rerank", body)
            assert {result["index"] for result in ours.json["results"]} == {0, 1, 2}


async def test_messages_run_on_the_slot_that_was_meant(llama_server: StartServer) -> None:
    """`/v1/messages` cannot be pinned, but each request is steered to its slot.

    The router prefills all but the last token there, so that the server reports one computed token.
    Two conversations alternate.
    """
    server = await llama_server("llama", slots=2)
    talks = [chat(seed, sentences(seed, 2), length=15) for seed in (1, 2)]
    meant: list[set[tuple[str, int]]] = [set(), set()]
    async with (
        direct(server) as client,
        running([("a", server.url)], None, yaml="answers: {counts: server}") as kvferry,
    ):
        for turn in range(4):
            for which, (system, *messages) in enumerate(talks):
                body = {"system": system["content"], "messages": messages, "max_tokens": 4}
                answer = await kvferry.post("/v1/messages", body | {"temperature": 0})
                usage = answer.json["usage"]
                assert usage["input_tokens"] == 1, usage
                meant[which].add(answer.slot)
                await kvferry.until_quiet()
                async with client.session.get(server.url + "/slots") as response:
                    slot = (await response.json())[answer.slot[1]]
                held = usage["cache_read_input_tokens"] + 1 + usage["output_tokens"] - 1
                assert slot["n_prompt_tokens"] == held
                said = {"role": "assistant", "content": answer.json["content"][0]["text"]}
                asked = {"role": "user", "content": sentences(10 * turn + which, 1)}
                talks[which] += [said, asked]
    assert meant == [{("a", 0)}, {("a", 1)}]


async def test_next_message_at_once_finds_what_was_computed(llama_server: StartServer) -> None:
    """An answer may end before its slot is known; the next request waits for that knowledge."""
    server = await llama_server("llama", slots=2)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        reused = set()
        for seed in range(12):
            system, *messages = chat(seed, sentences(seed, 2), length=15)
            body = {"system": system["content"], "messages": messages, "max_tokens": 1}
            await kvferry.post("/v1/messages", body)
            answer = await kvferry.post("/v1/messages", body)
            usage = answer.json["usage"]
            planned = int(answer.headers["x-kvferry-reused-tokens"])
            reused.add(usage["cache_read_input_tokens"] - planned)
    assert reused == {0}


@pytest.mark.slow
async def test_a_client_that_wants_no_reuse(llama_server: StartServer) -> None:
    """A request that declines reuse computes its whole prompt, which others may reuse.

    The prompt is not saved: neither while its slot is idle, nor when it is displaced. A longer
    prompt that reuses it is saved.
    """
    server = await llama_server("llama", slots=1)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        first = await plain(kvferry)
        await kvferry.until(saved(len(PROMPT)))
        declined = await plain(kvferry, cache_prompt=False)
        assert declined.cached == 0
        assert same(declined, first) == ""
        assert all_but_one(await plain(kvferry))
        state = await kvferry.until_quiet()
        assert state["snapshots"]["count"] == 1

        fresh, other = ids(2, 500), ids(3, 900)
        for _ in range(2):
            assert (await kvferry.complete(fresh, cache_prompt=False)).cached == 0
        assert (await kvferry.state())["slots"][0]["resident_tokens"] >= len(fresh)
        await asyncio.sleep(1.0)  # an idle save comes after a tenth of it
        await kvferry.complete(other)
        state = await kvferry.until(saved(len(other)))
        listed = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
        for found in (state["snapshots"]["items"], listed):
            assert sorted(item["tokens"] // 100 for item in found) == [6, 9]

        await kvferry.complete(fresh, cache_prompt=False)
        longer = await kvferry.complete([*fresh, *ids(4, 200)])
        assert longer.cached == len(fresh)
        await kvferry.until(saved(len(fresh), count=3))


async def test_a_slot_that_the_client_names(llama_server: StartServer) -> None:
    """`id_slot` is obeyed if there is such a slot, even if another slot holds the prompt.

    A busy slot is waited for. A number that no server has is ignored.
    """
    server = await llama_server("llama", slots=2)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        for index in (1, 0, 1, 1):
            answer = await plain(kvferry, id_slot=index)
            assert answer.slot == ("a", index)
            assert answer.json["id_slot"] == index
        for other in (-1, 7):
            assert all_but_one(await plain(kvferry, id_slot=other))


@pytest.mark.slow
async def test_a_server_that_falls_asleep(llama_server: StartServer) -> None:
    """Slots are empty after sleep: a snapshot is restored, and the answer is right.

    The server sleeps after 1 s, between two polls of its slots. Each poll counts as use, so that
    with more than 2 s the server would stay awake.
    """
    server = await llama_server("llama", slots=1, extra_args=["--sleep-idle-seconds", "1"])
    reference = await llama_server("llama", slots=1)

    async def asleep(client: Direct) -> None:
        while True:
            async with client.session.get(client.server.url + "/props") as response:
                if (await response.json())["is_sleeping"]:
                    return

    async with (
        direct(reference) as client,
        direct(server) as sleeper,
        running([("a", server.url)], server.kv_dir) as kvferry,
    ):
        expected = await plain_directly(client)
        await plain(kvferry)
        await kvferry.until(saved(len(PROMPT)))
        for _ in range(2):
            await asleep(sleeper)
            assert same(await plain(kvferry), expected) == ""
            again = await plain(kvferry)
            assert same(again, expected) == ""
            assert all_but_one(again)
        assert (await kvferry.state())["backends"][0]["up"]
