"""Models for embeddings, which cannot generate, behind the router."""

import asyncio
from pathlib import Path

import pytest

from tests.conftest import START_TIMEOUT_S, StartServer
from tests.support.conversations.measuring import direct
from tests.support.conversations.prompts import chat
from tests.support.models.encoder import tiny_encoder
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, Json, is_quiet, running

pytestmark = pytest.mark.thorough

TEXTS = ("a ferry", "a boat", "the northern pier")


def expected(answer: Answer) -> list[object]:
    """Return the embeddings, to be compared but for rounding.

    Other requests in a batch change the last digits (docs/llama-server.md, "Comparing answers").
    """
    assert answer.status == 200, answer.body
    return [pytest.approx(one["embedding"], abs=1e-4) for one in answer.json["data"]]


def numbers(answer: Answer) -> list[list[float]]:
    assert answer.status == 200, answer.body
    return [one["embedding"] for one in answer.json["data"]]


def embedder(argv: list[str], kv_dir: Path) -> LlamaServer:
    return LlamaServer(
        tiny_encoder(),
        slots=2,
        ctx=1024,
        kv_dir=kv_dir,
        extra_args=["--embeddings"],
        argv=argv,
        start_timeout_s=START_TIMEOUT_S,
    )


async def test_a_model_without_kv(server_argv: list[str], tmp_path: Path) -> None:
    """Embeddings equal the direct ones: alone, concurrently and several in one request.

    Refusals are the server's own. The server's slots were used before the router starts.
    """
    server = embedder(server_argv, tmp_path / "kv")
    one: list[Json] = [{"input": text} for text in TEXTS]
    refused = ("/completion", {"prompt": "a ferry", "n_predict": 2})
    async with server, direct(server) as client:
        alone = [expected(await client.post("/v1/embeddings", body)) for body in one]
        together = expected(await client.post("/v1/embeddings", {"input": TEXTS}))
        async with running([("a", server.url)], server.kv_dir) as kvferry:
            asked = [kvferry.post("/v1/embeddings", body) for body in one * 4]
            assert [numbers(answer) for answer in await asyncio.gather(*asked)] == alone * 4
            assert numbers(await kvferry.post("/v1/embeddings", {"input": TEXTS})) == together
            answer = await kvferry.post(*refused)
            assert answer.status == 500
            assert "logits computation" in answer.json["error"]["message"]
            state = await kvferry.until_quiet()
            assert is_quiet(state)
            assert "no KV" in state["backends"][0]["note"]


async def test_who_names_no_model_does_not_mean_one_without_kv(
    server_argv: list[str], llama_server: StartServer, tmp_path: Path
) -> None:
    """A request without a model goes to one that generates, although another is first and idle."""
    able = await llama_server(slots=2, kv_dir=tmp_path / "kv")
    async with (
        embedder(server_argv, tmp_path / "kv") as server,
        running([("e", server.url), ("g", able.url)], tmp_path / "kv") as kvferry,
    ):
        asked = [kvferry.complete([1, 2, 3 + n], n_predict=20) for n in range(4)]
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 4
        body: Json = {"messages": chat(1, "a ferry", length=2), "max_tokens": 2}
        told = await kvferry.post("/v1/chat/completions", body)
        assert told.status == 200, told.body


async def test_who_names_no_model_means_the_one_for_embeddings(
    server_argv: list[str], llama_server: StartServer, tmp_path: Path
) -> None:
    """A chat server refuses with 501, and is first and idle."""
    able = await llama_server(slots=2, kv_dir=tmp_path / "kv")
    async with (
        embedder(server_argv, tmp_path / "kv") as server,
        running([("a", able.url), ("e", server.url)], tmp_path / "kv") as kvferry,
    ):
        asked = [kvferry.post("/v1/embeddings", {"input": text}) for text in TEXTS * 2]
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 6
