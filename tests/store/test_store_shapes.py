"""`router.store.store`: padding, cutting and restreaming of state files."""

import os

import pytest

from router.base import tokens as tok
from router.base.errors import KvError, KvFileError
from router.base.types import MemoryKind, StateShape
from router.store.store import KvStore
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

TOKENS = range(5, 15)
BASE = head(TOKENS) + attention(stream(range(10)))
CHECKPOINT = appendix((4, attention(stream(range(4)))))
WINDOWED = BASE + attention(stream(range(6, 10))) + CHECKPOINT


@pytest.fixture
async def store(stores: Stores) -> KvStore:
    made = stores.make(*stores.kv_dirs)
    assert await made.load() == []
    return made


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


async def test_disk_is_full_while_padding(store: KvStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The half-written file is removed."""
    name = write(store, WINDOWED)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", enospc)
        with pytest.raises(KvFileError, match="No space"):
            await store.verify(store._kv_dirs[0], name, len(WINDOWED))
    assert names(store) == set()


# --- cutting --------------------------------------------------------------------------------------


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


async def test_cancelled_cut_leaves_no_file(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await put(store, full(TOKENS))
    await store.flush()
    await cancel_inside(monkeypatch, "pwrite", store.cut(snapshot, 4))
    await store.flush()
    assert names(store) == {path(snapshot).name}


# --- streams --------------------------------------------------------------------------------------


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
    assert not store._opened


# --- real servers ---------------------------------------------------------------------------------
