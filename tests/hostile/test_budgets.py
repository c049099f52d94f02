"""Tenants that would use more than their tokens: at once, by leaving, by a door without servers."""

import asyncio
from collections import Counter

import aiohttp
import pytest

from tests.conftest import StartServer
from tests.e2e.test_usage import auth, counted, of
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.hosts import hosts
from tests.support.servers.running_router import Answer, RunningRouter, running

pytestmark = pytest.mark.hostile

COMPLETION = "/completion"


async def spent(kvferry: RunningRouter) -> tuple[int, int]:
    await kvferry.until_quiet()
    rows = (await kvferry.get("/kvferry/usage")).json["usage"]
    return sum(r["computed_tokens"] for r in rows), sum(r["generated_tokens"] for r in rows)


async def test_two_hundred_chats_at_once(llama_server: StartServer) -> None:
    """Those that are answered cost 300 tokens and one request; all others get 429."""
    server = await llama_server(slots=4, ctx=8192, extra_args=["--metrics"])
    limited = auth("tokens_per_day: 300")
    async with running([("a", server.url)], None, yaml=limited) as kvferry:
        before = await counted(server)

        async def ask(n: int) -> Answer:
            body = {"prompt": ids(n, 40), "n_predict": 20, "ignore_eos": True}
            return await kvferry.post(COMPLETION, body, headers=of("alice"))

        answers = await asyncio.gather(*(ask(n) for n in range(200)))
        other = await kvferry.post(
            COMPLETION, {"prompt": ids(300, 40), "n_predict": 1}, headers=of("bob")
        )
        after = await counted(server)
    statuses = Counter(answer.status for answer in answers)
    assert set(statuses) == {200, 429}
    assert 300 <= statuses[200] * 60 <= 360
    cost = sum(after) - sum(before) - 41
    assert cost <= 300 + 60
    refused = next(answer for answer in answers if answer.status == 429)
    assert "try again in" in refused.json["error"]["message"]
    assert int(refused.headers["Retry-After"]) > 0
    assert other.status == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_prompts_that_are_left_are_counted(llama_server: StartServer, stream: bool) -> None:
    """Twelve clients leave while their prompts are computed, and come back for them."""
    server = await llama_server(slots=2, ctx=16384, extra_args=["--metrics"])
    async with running(
        [("a", server.url)], None, yaml=auth("tokens_per_day: 10_000_000")
    ) as kvferry:
        before = await counted(server)
        for n in range(12):
            body = {"prompt": ids(n, 3000), "n_predict": 400, "ignore_eos": True, "stream": stream}
            limit = aiohttp.ClientTimeout(sock_read=0.05 + 0.02 * n)
            with pytest.raises(TimeoutError):
                await kvferry.post(COMPLETION, body, headers=of("alice"), timeout=limit)
        computed, generated = await spent(kvferry)
        prompts, answers = (a - b for a, b in zip(await counted(server), before, strict=True))
    assert computed + generated == pytest.approx(prompts + answers, rel=0.02)


async def test_left_prompts_use_the_budget(llama_server: StartServer) -> None:
    server = await llama_server(slots=2, ctx=16384)
    async with running([("a", server.url)], None, yaml=auth("tokens_per_day: 3000")) as kvferry:
        statuses: list[int] = []
        for n in range(6):
            body: Json = {"prompt": ids(n, 2000), "n_predict": 3000, "ignore_eos": True}
            limit = aiohttp.ClientTimeout(sock_read=0.5)
            try:
                answer = await kvferry.post(COMPLETION, body, headers=of("alice"), timeout=limit)
            except TimeoutError:
                statuses.append(0)
            else:
                statuses.append(answer.status)
            await kvferry.until_quiet()
    assert statuses.count(429) >= 3
    assert statuses[-3:] == [429] * 3


async def test_a_door_without_servers_is_no_way_around(llama_server: StartServer) -> None:
    """Requests by a front door are limited where they are served."""
    server = await llama_server(slots=2, ctx=8192)
    async with hosts([server], [], yaml=auth("tokens_per_day: 300")) as (_, front):
        statuses = []
        for n in range(12):
            body = {"prompt": ids(n, 80), "n_predict": 20, "ignore_eos": True}
            answer = await front.post(COMPLETION, body, headers=of("alice"))
            statuses.append(answer.status)
        other = await front.post(COMPLETION, {"prompt": ids(1, 9)}, headers=of("bob"))
    assert statuses == [200] * 3 + [429] * 9
    assert other.status == 200


async def test_embeddings_at_once_are_limited(llama_server: StartServer) -> None:
    """Their prompts are not read: each reserves its bytes."""
    server = await llama_server(slots=8, extra_args=["--embeddings", "--pooling", "mean"])
    async with running([("a", server.url)], None, yaml=auth("tokens_per_day: 300")) as kvferry:
        body = {"input": "a ferry leaves the pier " * 20, "model": "any"}
        asked = (kvferry.post("/v1/embeddings", body, headers=of("alice")) for _ in range(60))
        answers = await asyncio.gather(*asked)
        (row,) = (await kvferry.get("/kvferry/usage")).json["usage"]
    good = [answer for answer in answers if answer.status == 200]
    cost = good[0].json["usage"]["prompt_tokens"]
    assert {answer.status for answer in answers} == {200, 429}
    assert row["computed_tokens"] == cost * len(good) <= 300 + cost


async def test_a_form_is_counted(llama_server: StartServer) -> None:
    """llama-server takes a completion as a form, too; kvferry does not read its prompt."""
    server = await llama_server(slots=2, ctx=8192, extra_args=["--metrics", "-n", "40"])
    async with running([("a", server.url)], None, yaml=auth("tokens_per_day: 300")) as kvferry:
        before, statuses = await counted(server), []
        for _ in range(8):
            form = aiohttp.FormData({"prompt": "the ferry " * 20}, default_to_multipart=True)
            async with kvferry.session.post(
                kvferry.url + COMPLETION, data=form, headers=of("alice")
            ) as response:
                statuses.append(response.status)
                await response.read()
            await kvferry.until_quiet()
        computed, generated = await spent(kvferry)
        true = [a - b for a, b in zip(await counted(server), before, strict=True)]
    assert 429 in statuses, statuses
    assert [computed, generated] == pytest.approx(true, rel=0.02)
