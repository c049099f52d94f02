"""What is found out about real servers of each memory kind by trying it once."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.adapters.kv_store import KvStore
from router.adapters.llama_client import Connections, LlamaClient, Timeouts
from router.adapters.monitor import Attached, attach
from router.demo.launcher import LlamaServer
from router.types import BackendId, MemoryKind, Namespace, Place
from tests.conftest import StartServer


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    async with Connections() as made:
        yield made


async def look(server: LlamaServer, connections: Connections, *known: Namespace) -> Attached:
    assert server.kv_dir is not None
    place = Place(str(server.kv_dir))
    store = KvStore([place], on_lost=lambda *_: None, wall_now=lambda: 1.0)
    await store.load()
    client = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
    try:
        return await attach(
            client, await client.props(), place=place, store=store, known=set(known)
        )
    finally:
        await store.aclose()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", MemoryKind.FULL),
        ("gemma3", MemoryKind.SLIDING_WINDOW),
        ("lfm2", MemoryKind.HYBRID),
        ("mamba", MemoryKind.RECURRENT),
    ],
)
async def test_memory_kind(
    llama_server: StartServer, connections: Connections, kind: str, expected: MemoryKind
) -> None:
    server = await llama_server(kind)
    attached = await look(server, connections)

    assert attached.info.memory_kind is expected
    assert attached.info.keeps_idle_slots
    found = attached.probe
    assert found.can_save
    assert found.size_bytes
    assert found.behaviour
    # llama-server.md section 4.3. An extension is reused by all; by a sliding window only on
    # some builds, or from a padded file.
    assert found.restored_extension == found.n_tokens or kind == "gemma3"
    assert bool(found.restored_divergence) == (kind == "llama")


async def test_server_that_empties_idle_slots(
    llama_server: StartServer, connections: Connections
) -> None:
    """Plain defaults: unified KV and a RAM cache (llama-server.md section 0.6)."""
    server = await llama_server(slots=None, plain_defaults=True)
    attached = await look(server, connections)

    assert not attached.info.keeps_idle_slots
    assert attached.info.n_slots == 4


async def test_same_model_same_namespace(
    llama_server: StartServer, connections: Connections, tmp_path: Path
) -> None:
    """Batch sizes make no difference. Another RoPE base does, which the server neither tells nor
    checks; so does a file of another number of streams, which it would refuse."""
    namespaces: list[Namespace] = []
    started: list[tuple[int, list[str]]] = [
        (2, []),
        (2, ["-ub", "64", "-b", "64"]),
        (2, ["--rope-freq-base", "500000"]),
        (1, []),
    ]
    for i, (slots, extra) in enumerate(started):
        server = await llama_server(slots=slots, extra_args=extra, kv_dir=tmp_path / str(i))
        namespaces.append((await look(server, connections, *namespaces)).info.namespace)
    same, also, rope, one_stream = namespaces

    assert same == also
    assert len({same, rope, one_stream}) == 3
