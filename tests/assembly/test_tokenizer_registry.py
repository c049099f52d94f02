"""Tokenizers by namespace: shared by its backends, and dropped with the last of them."""

from pathlib import Path

import structlog

from router.assembly.tokenizer_registry import TokenizerRegistry
from router.base.tasks import Tasks
from router.base.types import BackendId, Namespace
from router.config.schema import TokenizerConfig
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from tests.support.servers.fake_llama import FakeLlama

A, B = BackendId("a"), BackendId("b")
ONE, OTHER = Namespace("one"), Namespace("other")


async def test_what_nobody_speaks_is_forgotten(fake: FakeLlama) -> None:
    """Otherwise a server that restarts with another model each day would fill the memory."""
    tasks = Tasks()
    vocabularies = TokenizerRegistry(TokenizerConfig(), tasks, bool)
    async with Connections() as connections:
        a, b = (LlamaClient(name, fake.url, connections, Timeouts()) for name in (A, B))
        props = await a.props()
        await vocabularies.prepare(a, props, ONE)
        first = vocabularies._tokenizers[ONE]
        await vocabularies.prepare(b, props, ONE)
        vocabularies.leave(A)
        assert vocabularies._tokenizers == {ONE: first}

        vocabularies.leave(B)
        await vocabularies.prepare(b, props, OTHER)
        assert list(vocabularies._tokenizers) == list(vocabularies._speakers) == [OTHER]
        assert list(vocabularies.readers) == [B]
    await tasks.aclose()


async def test_a_local_tokenizer_that_was_asked_for_is_missed_aloud(
    fake: FakeLlama, tmp_path: Path
) -> None:
    """Regression: a log line of level info named neither the key nor the file."""
    path = tmp_path / "none.gguf"
    wanted = TokenizerConfig.model_validate({"mode": "local", "path": str(path)})
    tasks = Tasks()
    with structlog.testing.capture_logs() as lines:
        async with Connections() as connections:
            a = LlamaClient(A, fake.url, connections, Timeouts())
            await TokenizerRegistry(wanted, tasks, bool).prepare(a, await a.props(), ONE)
    await tasks.aclose()

    (line,) = [line for line in lines if line["event"] == "local_tokenizer_not_used"]
    told = (line["log_level"], line["key"], line["path"])
    assert told == ("warning", "tokenizer.path", str(path))
    assert "No such file" in line["reason"]


async def test_one_in_doubt_is_asked_last(fake: FakeLlama) -> None:
    """Doubted backends may hang, and another one returns the same tokens."""
    tasks = Tasks()
    vocabularies = TokenizerRegistry(TokenizerConfig(), tasks, bool)
    async with Connections() as connections, FakeLlama() as other:
        a, b = (
            LlamaClient(name, server.url, connections, Timeouts())
            for name, server in ((A, fake), (B, other))
        )
        for client in (a, b):
            await vocabularies.prepare(client, await client.props(), ONE)
        asked = [len(server.seen) for server in (fake, other)]
        a.doubted = True
        await vocabularies._speakers[ONE].tokenize("x", add_special=False, parse_special=False)

        assert [len(server.seen) for server in (fake, other)] == [asked[0], asked[1] + 1]
    await tasks.aclose()
