"""`router.store.store`: padding, cutting and restreaming of state files."""

import asyncio
import os
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.base import tokens as tok
from router.base.errors import KvError, KvFileError
from router.base.types import KvDir, MemoryKind, StateShape
from router.store import shapes
from router.store.store import KvStore
from tests.conftest import StartServer
from tests.support.files.state_files import appendix, attention, full, head, recurrent, stream
from tests.support.files.stores import (
    NAMESPACE,
    Stores,
    at,
    cancel_inside,
    enospc,
    names,
    path,
    put,
    touch,
    write,
)
from tests.support.servers.llama_server import LlamaServer

TOKENS = range(5, 15)
BASE = head(TOKENS) + attention(stream(range(10)))
CHECKPOINT = appendix((4, attention(stream(range(4)))))
WINDOWED = BASE + attention(stream(range(6, 10))) + CHECKPOINT
SHORT = BASE + attention(stream(range(10)))  # the window is longer than the state


@pytest.fixture
async def store(stores: Stores) -> KvStore:
    made = stores.make(*stores.kv_dirs)
    assert await made.load() == []
    return made


def ours(kv_dir: KvDir) -> set[str]:
    names = os.listdir(kv_dir)
    return {name for name in names if name.startswith("kvf-") and ".json" not in name}


# --- states of a known kind -----------------------------------------------------------------------

UNREADABLE = head(TOKENS) + b"of another layout"
SPARSE = BASE + attention(stream(range(10), has_v=False))  # an indexer: all positions


async def test_unreadable_state_is_kept_whole_if_its_kind_says_so(
    store: KvStore, stores: Stores
) -> None:
    (kv_dir, *_) = stores.kv_dirs
    with pytest.raises(KvFileError, match="cannot be read"):
        await store.verify(kv_dir, write(store, UNREADABLE), len(UNREADABLE))

    name = write(store, UNREADABLE)
    staged = await store.verify(kv_dir, name, len(UNREADABLE), MemoryKind.OPAQUE)
    kept = await store.commit(staged, NAMESPACE)
    await store.flush()

    assert (kept.tokens, kept.shape) == (tok.pack(TOKENS), StateShape(n_stream=0))
    assert not kept.shape.needs_restream(2)
    again = stores.make(kv_dir)
    await store.aclose()
    assert await again.load() == [kept]


async def test_an_opaque_state_of_another_size_is_refused(store: KvStore, stores: Stores) -> None:
    """llama-server aborts on a file that is too short."""
    name = write(store, UNREADABLE)

    with pytest.raises(KvFileError, match="the backend reported"):
        await store.verify(stores.kv_dirs[0], name, len(UNREADABLE) + 1, MemoryKind.OPAQUE)


async def test_further_blocks_with_all_positions_are_no_window(
    store: KvStore, stores: Stores
) -> None:
    name = write(store, SPARSE)

    staged = await store.verify(stores.kv_dirs[0], name, len(SPARSE), MemoryKind.FULL)

    assert staged.shape == StateShape(n_stream=1)
    assert staged.size_bytes == len(SPARSE)


async def test_a_window_where_none_should_be_is_refused(store: KvStore, stores: Stores) -> None:
    """A server with --swa-full that looked like one of full attention until the window filled."""
    name = write(store, WINDOWED)

    with pytest.raises(KvFileError, match="swa-full"):
        await store.verify(stores.kv_dirs[0], name, len(WINDOWED), MemoryKind.FULL)


# --- padding --------------------------------------------------------------------------------------


async def test_window_is_padded(stores: Stores, store: KvStore) -> None:
    """A file is padded once, when it comes from the backend; its shape survives a restart."""
    kv_dir = store._kv_dirs[0]
    name = write(store, WINDOWED)
    staged = await store.verify(kv_dir, name, len(WINDOWED))
    assert staged.size_bytes == at(kv_dir, name).stat().st_size > len(WINDOWED)
    assert staged.shape == StateShape(1, (4,), extendable=True)

    snapshot = await store.commit(staged, NAMESPACE)
    assert (snapshot.size_bytes, snapshot.shape) == (staged.size_bytes, staged.shape)
    assert shapes.inspect(path(snapshot), snapshot.size_bytes).layout.attention[1].pos_min == 5
    again, loaded = await stores.restart(store)
    assert [snapshot] == loaded
    assert await again.open(snapshot, kv_dir, 1) == path(snapshot).name
    assert stores.lost == []


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (full(TOKENS), StateShape()),
        (SHORT, StateShape(extendable=False)),
        (BASE + recurrent(9), StateShape()),
    ],
)
async def test_others_stay_as_they_are(
    stores: Stores, store: KvStore, raw: bytes, shape: StateShape
) -> None:
    snapshot = await put(store, raw)
    assert (path(snapshot).read_bytes(), snapshot.shape) == (raw, shape)
    _, loaded = await stores.restart(store)
    assert [snapshot] == loaded


async def test_disk_is_full_while_padding(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half-written file is removed."""
    name = write(store, WINDOWED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", enospc)
        with pytest.raises(KvFileError, match="No space"):
            await store.verify(store._kv_dirs[0], name, len(WINDOWED))
    assert names(store) == set()


# --- cutting --------------------------------------------------------------------------------------


async def test_cut(stores: Stores, store: KvStore) -> None:
    whole = await put(store, full(TOKENS))
    staged = await store.cut(whole, 4)
    assert (staged.tokens, staged.shape) == (tok.pack(TOKENS[:4]), StateShape())
    part = await store.commit(staged, NAMESPACE)
    assert path(part).read_bytes() == full(TOKENS[:4])
    assert path(whole).read_bytes() == full(TOKENS)
    await store.flush()
    _, loaded = await stores.restart(store)
    assert {whole, part} == set(loaded)


@pytest.mark.parametrize(
    ("raw", "n", "why"),
    [
        (full(TOKENS), 10, "10 tokens cannot be cut to 10"),
        (WINDOWED, 4, "sliding_window"),
        (BASE + recurrent(9), 4, "hybrid"),
    ],
)
async def test_what_cannot_be_cut(store: KvStore, raw: bytes, n: int, why: str) -> None:
    snapshot = await put(store, raw)
    with pytest.raises(KvFileError, match=why):
        await store.cut(snapshot, n)
    assert names(store) == {path(snapshot).name}


async def test_cut_of_a_changed_file(store: KvStore) -> None:
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    raw = bytearray(full(TOKENS))
    raw[-1] ^= 1
    path(snapshot).write_bytes(raw)
    touch(path(snapshot))
    with pytest.raises(KvFileError, match="changed after it was committed"):
        await store.cut(snapshot, 4)
    await store.delete(snapshot)
    with pytest.raises(KvFileError, match="does not exist"):
        await store.cut(snapshot, 4)


async def test_cut_on_a_full_disk(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot is as good as before: the error does not blame its file."""
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    monkeypatch.setattr(os, "pwrite", enospc)
    with pytest.raises(KvError, match="No space") as raised:
        await store.cut(snapshot, 4)
    assert not isinstance(raised.value, KvFileError)
    assert names(store) == {path(snapshot).name}


async def test_cancelled_cut_leaves_no_file(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    await cancel_inside(monkeypatch, "pwrite", store.cut(snapshot, 4))
    await store.flush()
    assert names(store) == {path(snapshot).name}


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_other_number_of_streams(store: KvStore, elsewhere: bool) -> None:
    """The file is restreamed for one restore, in the directory of the backend that asked."""
    snapshot = await put(store, full(TOKENS))
    kv_dir = store._kv_dirs[elsewhere]
    before = ours(kv_dir)
    name = await store.open(snapshot, kv_dir, 2)
    assert ours(kv_dir) == before | {name}
    expected = head(TOKENS) + attention(stream(range(10)), stream([]))
    assert at(kv_dir, name).read_bytes() == expected
    assert path(snapshot).read_bytes() == full(TOKENS)
    await store.close(snapshot, kv_dir, name)
    assert ours(kv_dir) == before
    assert path(snapshot).exists()


@pytest.mark.parametrize(
    ("raw", "n_stream"), [(full(TOKENS), 1), (full(TOKENS), 0), (head(TOKENS) + recurrent(9), 2)]
)
async def test_streams_that_fit(store: KvStore, raw: bytes, n_stream: int) -> None:
    """Equal numbers of streams fit; without attention any number fits."""
    snapshot = await put(store, raw)
    assert await store.open(snapshot, snapshot.kv_dir, n_stream) == path(snapshot).name


async def test_rewritten_file_does_not_outlive_the_store(store: KvStore) -> None:
    snapshot = await put(store, full(TOKENS))
    name = await store.open(snapshot, snapshot.kv_dir, 2)
    await store.aclose()
    assert not at(snapshot.kv_dir, name).exists()


async def test_streams_on_a_full_disk(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is no reason to quarantine the snapshot."""
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    for function in ("copy_file_range", "pwrite"):
        monkeypatch.setattr(os, function, enospc)
    with pytest.raises(KvError, match="No space") as raised:
        await store.open(snapshot, snapshot.kv_dir, 2)
    assert not isinstance(raised.value, KvFileError)
    assert names(store) == {path(snapshot).name}


async def test_cancelled_rewriting_leaves_no_file(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    await cancel_inside(monkeypatch, "pwrite", store.open(snapshot, snapshot.kv_dir, 2))
    await store.flush()
    assert names(store) == {path(snapshot).name}
    assert store._opened == set()


async def test_rewritings_at_once(store: KvStore) -> None:
    snapshot = await put(store, full(TOKENS))
    opened = await asyncio.gather(*(store.open(snapshot, snapshot.kv_dir, n) for n in range(5)))
    assert len(set(opened)) == 4  # 0 and 1 need no rewriting


# --- real servers ---------------------------------------------------------------------------------


async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def complete(server: LlamaServer, prompt: list[int]) -> tuple[list[int], int]:
    """Generate ten greedy tokens; return them and the number of cached prompt tokens."""
    body = {"prompt": prompt, "n_predict": 10, "id_slot": 0, "temperature": 0}
    answer = await post(server.url + "/completion", body | {"return_tokens": True})
    return answer["tokens"], answer["timings"]["cache_n"]


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "mamba"])
@pytest.mark.parametrize("unified_first", [False, True])
async def test_real_servers_with_other_streams(
    llama_server: StartServer, store: KvStore, kind: str, unified_first: bool
) -> None:
    """A state moves between servers with one stream per slot and with one stream for all.

    The answer continues as if the state had been there all the time.
    """
    here, there = store._kv_dirs
    flags: list[list[str]] = [[], ["--kv-unified"]]
    if unified_first:
        flags.reverse()
    first = await llama_server(kind, kv_dir=Path(here), extra_args=flags[0])
    second = await llama_server(kind, kv_dir=Path(there), extra_args=flags[1])
    prompt = list(range(10, 210))
    start, _ = await complete(first, prompt)
    name = store.staging_name()
    saved = await post(first.url + "/slots/0?action=save", {"filename": name})
    staged = await store.verify(here, name, saved["n_written"])
    snapshot = await store.commit(staged, NAMESPACE)
    longer = [*tok.unpack(snapshot.tokens), 300, 301, 302]
    expected, _ = await complete(first, longer)

    n_stream = 1 if not unified_first else 2
    lent = await store.open(snapshot, there, n_stream)
    await post(second.url + "/slots/0?action=restore", {"filename": lent})
    await store.close(snapshot, there, lent)
    answer, cached = await complete(second, longer)

    assert cached == len(snapshot) == len(prompt) + len(start) - 1
    assert answer == expected
    assert snapshot.shape.extendable


async def test_real_server_takes_a_cut(llama_server: StartServer, store: KvStore) -> None:
    kv_dir = store._kv_dirs[0]
    server = await llama_server(kv_dir=Path(kv_dir))
    prompt = list(range(10, 210))
    await complete(server, prompt)
    name = store.staging_name()
    saved = await post(server.url + "/slots/0?action=save", {"filename": name})
    whole = await store.commit(await store.verify(kv_dir, name, saved["n_written"]), NAMESPACE)
    branch = [*prompt[:77], 300, 301]
    expected, cached = await complete(server, branch)
    assert cached == 77

    part = await store.commit(await store.cut(whole, 77), NAMESPACE)
    await post(server.url + "/slots/0?action=erase", {})
    lent = await store.open(part, kv_dir, 2)
    await post(server.url + "/slots/0?action=restore", {"filename": lent})
    assert await complete(server, branch) == (expected, 77)
