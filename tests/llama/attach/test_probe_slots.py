"""`router.llama.attach.probe_slots`: a probed slot ends up as it was before."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.base.tokens import pack
from router.base.types import BackendId, KvDir
from router.llama.attach.probe_slots import (
    SlotFolder,
    erase,
    has_ram_cache,
    keeps_idle_slots,
    places_by_prefix,
    put_aside,
    put_back,
)
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.store.store import KvStore
from tests.conftest import StartServer
from tests.support.servers.fake_llama import FakeLlama

MINE, OTHERS = list(b"mine"), list(b"of others")
TEXT = pack(list(b"what a probe sends"))


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeLlama]:
    async with FakeLlama(kv_dir=tmp_path) as server:
        for slot in server.slots:
            slot.tokens, slot.id_task = list(MINE), 1
        yield server
        assert server.violations == []


@pytest.fixture
async def client(fake: FakeLlama) -> AsyncIterator[LlamaClient]:
    async with Connections() as connections:
        yield LlamaClient(BackendId("a"), fake.url, connections, Timeouts())


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[KvStore]:
    made = KvStore([KvDir(str(tmp_path))], wall_now=lambda: 1.0)
    await made.load()
    yield made
    await made.aclose()


def files(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.name.startswith("kvf-")]


async def test_what_cannot_be_kept_is_left_empty(
    fake: FakeLlama, client: LlamaClient, store: KvStore, tmp_path: Path
) -> None:
    """The slot is left empty if a save fails, the file is short or there is no KV directory."""
    folder, slot = SlotFolder(store, KvDir(str(tmp_path))), (await client.slots())[0]
    for fault in ("save_fails", "save_lies"):
        setattr(fake.faults, fault, True)
        assert await put_aside(client, folder, slot) is None
        setattr(fake.faults, fault, False)
    assert await put_aside(client, None, slot) is None
    await put_back(client, folder, slot, None)

    assert fake.slots[0].tokens == []
    assert files(tmp_path) == []


@pytest.mark.parametrize("empty", [False, True])
async def test_idle_slots_that_keep_theirs(
    fake: FakeLlama, client: LlamaClient, empty: bool
) -> None:
    if empty:
        fake.slots[1].tokens = []
    slots = await client.slots()

    assert await keeps_idle_slots(client, slots, slots[0], TEXT)
    assert fake.slots[1].tokens == ([] if empty else MINE)


async def test_without_slot_actions(fake: FakeLlama, client: LlamaClient) -> None:
    """One token of no prompt replaces the slot's content."""
    fake.kv_dir = None
    await erase(client, 0)
    assert fake.slots[0].tokens == [0]


@pytest.mark.parametrize("sps", ["0", "0.1"])
async def test_a_server_that_places_by_age_is_seen(llama_server: StartServer, sps: str) -> None:
    server = await llama_server("llama", slots=3, extra_args=("-sps", sps))
    async with Connections() as connections:
        real = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
        slots = await real.slots()
        text = pack(range(260, 360))
        assert await places_by_prefix(real, slots, slots[1], text) is (sps != "0")
        assert not (await real.slots())[0].n_tokens
        # With tokens in another slot nothing is sent: the server might replace them.
        await real.prefill(2, text)
        assert await places_by_prefix(real, await real.slots(), slots[1], text) is None


@pytest.mark.parametrize("ram", ["0", "100"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
async def test_a_ram_cache_is_seen(llama_server: StartServer, kind: str, ram: str) -> None:
    server = await llama_server(kind, slots=1, extra_args=("--cache-ram", ram))
    async with Connections() as connections:
        real = LlamaClient(BackendId("a"), server.url, connections, Timeouts())
        assert await has_ram_cache(real, 0, pack(range(260, 360))) == (ram != "0")
