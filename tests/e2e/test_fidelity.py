"""A restored state answers as the slot it was saved from would have: the same tokens."""

from dataclasses import replace
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, probabilities
from tests.support.conversations.prompts import ids
from tests.support.servers.router_fleet import Answer, running

GREEDY: dict[str, Any] = {"n_predict": 64, "n_probs": 5}


def tokens(answer: Answer) -> list[int]:
    return [entry["id"] for entry in probabilities(answer)]


@pytest.mark.parametrize("cut", [0, 37])
async def test_a_snapshot_answers_like_the_slot_it_came_from(
    llama_server: StartServer, cut: int
) -> None:
    """Strict extension of what is held, and divergence from it `cut` tokens before its end.

    Never moved on a server of its own, displaced and restored behind the router; one request at
    a time and the same reuse on both sides: token for token equal.
    """
    unmoved = await llama_server("llama", slots=1, ctx=8192)
    behind = await llama_server("llama", slots=1, ctx=8192)
    base = ids(1, 1500)
    prompt = base[: len(base) - cut] + ids(2, 40)
    async with running([("a", behind.url)], behind.kv_dir) as fleet:
        direct = replace(fleet, url=unmoved.url)
        await direct.complete(base, n_predict=1)
        resident = await direct.complete(prompt, **GREEDY)
        await fleet.complete(base, n_predict=1)
        await fleet.complete(ids(9, 1500))
        snapshot = await fleet.complete(prompt, **GREEDY)

    assert snapshot.source == "snapshot"
    assert snapshot.cached == resident.cached == len(base) - cut
    assert tokens(snapshot) == tokens(resident)


async def test_first_token_as_after_a_cold_prefill(llama_server: StartServer) -> None:
    """Another split into batches changes the last digits of a log probability, no more."""
    server = await llama_server("llama", slots=1, ctx=8192)
    prompt = ids(1, 1500)
    async with running([("a", server.url)], server.kv_dir) as fleet:
        cold = await fleet.complete(prompt, cache_prompt=False, **GREEDY)
        assert cold.cached == 0
        await fleet.complete(ids(5, 1200))
        await fleet.complete(prompt)
        await fleet.complete(ids(5, 1200))
        warm = await fleet.complete(prompt, **GREEDY)

    assert warm.source == "snapshot"
    assert all_but_one(warm)
    expected = {rival["id"]: rival["logprob"] for rival in probabilities(cold)[0]["top_logprobs"]}
    actual = {rival["id"]: rival["logprob"] for rival in probabilities(warm)[0]["top_logprobs"]}
    assert actual == pytest.approx(expected, abs=0.02)
