"""A model that is made for embeddings and cannot generate: what it answers through the router."""

import asyncio
from pathlib import Path

import pytest

from router.demo.launcher import LlamaServer
from tests.conftest import START_TIMEOUT_S
from tests.e2e.measuring import direct
from tests.encoder import tiny_encoder
from tests.fleet import Answer, Json, is_quiet, running

TEXTS = ("a ferry", "a boat", "the northern pier")


def expected(answer: Answer) -> list[object]:
    """Equal but for rounding: what is in a batch changes the last digits (docs/llama-server.md,
    "Comparing answers")."""
    assert answer.status == 200, answer.body
    return [pytest.approx(one["embedding"], abs=1e-4) for one in answer.json["data"]]


def numbers(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    return [one["embedding"] for one in answer.json["data"]]


async def test_a_model_without_kv(server_argv: list[str], tmp_path: Path) -> None:
    """Alone, side by side and several in one request it says what it says directly; what it
    refuses is its own to refuse. Its slots have been used before."""
    server = LlamaServer(
        tiny_encoder(),
        slots=2,
        ctx=1024,
        kv_dir=tmp_path / "kv",
        extra_args=["--embeddings"],
        argv=server_argv,
        start_timeout_s=START_TIMEOUT_S,
    )
    one: list[Json] = [{"input": text} for text in TEXTS]
    refused = ("/completion", {"prompt": "a ferry", "n_predict": 2})
    async with server, direct(server) as client:
        alone = [expected(await client.post("/v1/embeddings", body)) for body in one]
        together = expected(await client.post("/v1/embeddings", {"input": TEXTS}))
        async with running([("a", server.url)], server.kv_dir) as fleet:
            asked = [fleet.post("/v1/embeddings", body) for body in one * 4]
            assert [numbers(answer) for answer in await asyncio.gather(*asked)] == alone * 4
            assert numbers(await fleet.post("/v1/embeddings", {"input": TEXTS})) == together
            answer = await fleet.post(*refused)
            assert answer.status == 500
            assert "logits computation" in answer.json["error"]["message"]
            state = await fleet.until_quiet()
            assert is_quiet(state)
            assert "no KV" in state["backends"][0]["note"]
