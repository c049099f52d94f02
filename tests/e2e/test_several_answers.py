"""Several answers at once: they take as many slots as they have tasks, and all are counted."""

import orjson
import pytest

from tests.conftest import StartServer
from tests.e2e.test_usage import auth, counted, of
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import Json, chat, ids, sentences
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.thorough

COMPLETION, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
LIST = [sentences(1, 20), sentences(2, 20)]
ONE = {"prompt": sentences(3, 20)}
ASKED: dict[str, tuple[str, Json]] = {
    "list": (COMPLETION, {"prompt": LIST}),
    "list of ids": (COMPLETION, {"prompt": [ids(1, 90), ids(2, 90)]}),
    "list, two answers": (COMPLETION, {"prompt": LIST, "n_cmpl": 2}),
    "n": (COMPLETION, {**ONE, "n_cmpl": 3}),
    "text": (TEXT, {**ONE, "n": 3}),
    "text list": (TEXT, {"prompt": LIST, "cache_prompt": False}),
    "chat": (CHAT, {"messages": chat(1, sentences(4, 9), length=2), "n": 3}),
    "picked": (COMPLETION, {**ONE, "response_fields": ["content"]}),
    "picked list": (COMPLETION, {"prompt": LIST, "response_fields": ["content", "id_slot"]}),
    "picked count": (COMPLETION, {**ONE, "response_fields": ["timings/prompt_n", "content"]}),
}
LONG: Json = {"n_predict": 30_000, "ignore_eos": True, "stream": True}


async def sums(kvferry: RunningRouter) -> tuple[int, int]:
    await kvferry.until_quiet()
    (row,) = (await kvferry.get("/kvferry/usage")).json["usage"]
    return row["computed_tokens"], row["generated_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("case", ASKED)
async def test_all_are_counted(llama_server: StartServer, case: str, stream: bool) -> None:
    """As the server's own counters say, within 1 % over a few requests."""
    path, body = ASKED[case]
    server = await llama_server(slots=4, ctx=8192, extra_args=["--metrics"])
    async with running([("a", server.url)], None) as kvferry:
        before = await counted(server)
        for seed in range(4):
            more = {"n_predict": 24, "max_tokens": 24, "seed": seed, "stream": stream}
            answer = await kvferry.post(path, body | more | {"ignore_eos": True})
            assert answer.status == 200, answer.body
        found, after = await sums(kvferry), await counted(server)
    true = [now - then for now, then in zip(after, before, strict=True)]
    # The rest of a list in a plain answer of OpenAI's shape is estimated by its length.
    assert found == pytest.approx(true, rel=0.03 if case == "text list" else 0.01)


@pytest.mark.parametrize("case", ["picked", "picked list", "picked count"])
async def test_picked_fields_come_as_from_the_server(llama_server: StartServer, case: str) -> None:
    path, body = ASKED[case]
    server = await llama_server(slots=2)
    for stream in (False, True):
        more = {"n_predict": 4, "temperature": 0, "stream": stream, "cache_prompt": False}
        async with direct(server) as client, running([("a", server.url)], None) as kvferry:
            alone = await client.post(path, body | more)
            answer = await kvferry.post(path, body | more)
        assert _keys(answer) == _keys(alone)


def _keys(answer: Answer) -> list[list[str]]:
    """Return the keys of an answer, of each answer of a list, or of each event."""
    if answer.events:
        # The server begins some streams with `null`.
        return sorted(sorted(event) for event in answer.events if event)
    found = orjson.loads(answer.body)
    return [list(one) for one in (found if isinstance(found, list) else [found])]


@pytest.mark.parametrize("case", ["list", "n", "chat"])
async def test_they_wait_for_no_stranger(llama_server: StartServer, case: str) -> None:
    """Beside an answer that does not end; and another chat is served beside them."""
    path, body = ASKED[case]
    body = {**body, **dict.fromkeys({"n", "n_cmpl"} & body.keys(), 2)}  # one slot is left
    server = await llama_server(slots=4, ctx=131_072)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        url = kvferry.url + COMPLETION
        async with kvferry.session.post(url, json=LONG | {"prompt": ids(9, 100)}) as stranger:
            await stranger.content.readany()
            answer = await kvferry.post(path, body | {"n_predict": 4, "max_tokens": 4})
            assert answer.status == 200
            streamed = body | {"n_predict": 30_000, "max_tokens": 30_000, "ignore_eos": True}
            async with kvferry.session.post(
                kvferry.url + path, json=streamed | {"stream": True}
            ) as several:
                await several.content.readany()
                plain = await kvferry.complete(ids(8, 60), n_predict=2)
                assert plain.status == 200
                assert not several.content.at_eof()
                several.close()
            assert not stranger.content.at_eof()
            stranger.close()


async def test_conversations_in_other_slots_are_left_alone(llama_server: StartServer) -> None:
    """Two tasks on four slots: at least two of three conversations are still in theirs."""
    server = await llama_server(slots=4, ctx=16384)
    talks = [ids(seed, 400) for seed in (1, 2, 3)]
    async with running([("a", server.url)], None) as kvferry:
        for index, talk in enumerate(talks):
            await kvferry.complete(talk, id_slot=index, n_predict=2)
        await kvferry.post(COMPLETION, {"prompt": LIST, "n_predict": 16})
        await kvferry.until_quiet()
        again = [await kvferry.complete([*talk, *ids(7, 5)], n_predict=1) for talk in talks]
    assert sum(answer.cached >= 400 for answer in again) >= 2


@pytest.mark.parametrize("texts", ["one text", ["one text", "and another"]])
async def test_embeddings_are_counted_and_limited(
    llama_server: StartServer, texts: str | list[str]
) -> None:
    server = await llama_server(slots=2, extra_args=["--embeddings", "--pooling", "mean"])
    async with running([("a", server.url)], None, yaml=auth("tokens_per_day: 100")) as kvferry:
        body, told, statuses = {"input": texts, "model": "any"}, 0, []
        for _ in range(40):
            answer = await kvferry.post("/v1/embeddings", body, headers=of("alice"))
            statuses.append(answer.status)
            told += answer.json.get("usage", {}).get("prompt_tokens", 0)
            await kvferry.until_quiet()
        assert statuses[-1] == 429
        totals = (await kvferry.get("/kvferry/usage")).json["usage"]
    assert sum(row["computed_tokens"] for row in totals) == told
