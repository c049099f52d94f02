"""A restored state yields the same tokens as the slot that it was saved from."""

import dataclasses
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, probabilities
from tests.support.conversations.prompts import ids
from tests.support.servers.running_router import Answer, running

pytestmark = pytest.mark.thorough

GREEDY: dict[str, Any] = {"n_predict": 64, "n_probs": 5}


def tokens(answer: Answer) -> list[int]:
    return [entry["id"] for entry in probabilities(answer)]


@pytest.mark.parametrize("cut", [0, 37])
async def test_a_snapshot_answers_like_the_slot_it_came_from(
    llama_server: StartServer, cut: int
) -> None:
    """A prompt extends the held tokens, or diverges `cut` tokens before their end.

    On one server the state is never moved; behind the router it is displaced and restored. With one
    request at a time and equal reuse, the answers are equal token for token.
    """
    unmoved = await llama_server("llama", slots=1, ctx=8192)
    behind = await llama_server("llama", slots=1, ctx=8192)
    base = ids(1, 1500)
    prompt = base[: len(base) - cut] + ids(2, 40)
    async with running([("a", behind.url)], behind.kv_dir) as kvferry:
        direct = dataclasses.replace(kvferry, url=unmoved.url)
        await direct.complete(base, n_predict=1)
        resident = await direct.complete(prompt, **GREEDY)
        await kvferry.complete(base, n_predict=1)
        await kvferry.complete(ids(9, 1500))
        snapshot = await kvferry.complete(prompt, **GREEDY)

    assert snapshot.source == "snapshot"
    assert snapshot.cached == resident.cached == len(base) - cut
    assert tokens(snapshot) == tokens(resident)


async def test_first_token_as_after_a_cold_prefill(llama_server: StartServer) -> None:
    """Another split into batches changes only the last digits of a log probability."""
    server = await llama_server("llama", slots=1, ctx=8192)
    prompt = ids(1, 1500)
    async with running([("a", server.url)], server.kv_dir) as kvferry:
        cold = await kvferry.complete(prompt, cache_prompt=False, **GREEDY)
        assert cold.cached == 0
        await kvferry.complete(ids(5, 1200))
        await kvferry.complete(prompt)
        await kvferry.complete(ids(5, 1200))
        warm = await kvferry.complete(prompt, **GREEDY)

    assert warm.source == "snapshot"
    assert all_but_one(warm)
    expected = {rival["id"]: rival["logprob"] for rival in probabilities(cold)[0]["top_logprobs"]}
    actual = {rival["id"]: rival["logprob"] for rival in probabilities(warm)[0]["top_logprobs"]}
    assert actual == pytest.approx(expected, abs=0.02)
