"""Tokenizers by namespace: shared while somebody speaks it, forgotten with the last who does."""

from collections.abc import AsyncIterator

import pytest

from router.adapters.llama_client import Connections, LlamaClient, Timeouts
from router.config import Tokenizer
from router.tasks import Tasks
from router.types import BackendId, Namespace
from router.vocabularies import Vocabularies
from tests.fake_llama import FakeLlama

A, B = BackendId("a"), BackendId("b")
ONE, OTHER = Namespace("one"), Namespace("other")


@pytest.fixture
async def fake() -> AsyncIterator[FakeLlama]:
    async with FakeLlama() as server:
        yield server


async def test_what_nobody_speaks_is_forgotten(fake: FakeLlama) -> None:
    """Else a server that is restarted with another model each day fills the memory."""
    tasks = Tasks()
    vocabularies = Vocabularies(Tokenizer(), tasks)
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


async def test_one_in_doubt_is_asked_last(fake: FakeLlama) -> None:
    """It may hang, and the next says the same."""
    tasks = Tasks()
    vocabularies = Vocabularies(Tokenizer(), tasks)
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
