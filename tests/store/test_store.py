"""`router.store.store`: from a backend to a snapshot and back. Crashes: test_store_crash.py."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from router.base.errors import KvError, KvFileError
from router.store.files import LOCK
from router.store.store import KvStore
from tests.support.files.state_files import attention, full, head, stream
from tests.support.files.stores import (
    NAMESPACE,
    TOKENS,
    Stores,
    at,
    cancel_inside,
    enospc,
    names,
    path,
    put,
    write,
)


async def test_usable_before_it_is_durable(store: KvStore) -> None:
    snapshot = await put(store)
    name = await store.open(snapshot, snapshot.kv_dir, 1)
    assert full(TOKENS) == at(snapshot.kv_dir, name).read_bytes()
    await store.close(snapshot, snapshot.kv_dir, name)
    assert path(snapshot).exists()


@pytest.mark.parametrize("delta", [-1, 1])
async def test_size_lie(store: KvStore, delta: int) -> None:
    """On a full disk llama-server reports more bytes than the file has (section 0.4)."""
    raw = full(TOKENS)
    name = write(store, raw)
    with pytest.raises(KvFileError, match="reported"):
        await store.verify(store._kv_dirs[0], name, len(raw) + delta)
    assert set() == names(store)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        full(TOKENS)[:-1],
        full(TOKENS) + b"x",
        head(TOKENS) + attention(stream(range(3))),
    ],
)
async def test_damaged_file_is_removed(store: KvStore, raw: bytes) -> None:
    with pytest.raises(KvFileError):
        await store.verify(store._kv_dirs[0], write(store, raw), len(raw))
    assert set() == names(store)


async def test_missing_file(store: KvStore) -> None:
    with pytest.raises(KvFileError):
        await store.verify(store._kv_dirs[0], store.staging_name(), 1)


@pytest.mark.parametrize("kind", ["symlink", "pipe", "directory"])
async def test_only_regular_files(store: KvStore, tmp_path: Path, kind: str) -> None:
    """A pipe must not hang; a symbolic link is not followed, nor is its target removed."""
    target = tmp_path / "target"
    target.write_bytes(full(TOKENS))
    name = store.staging_name()
    staged = Path(store._kv_dirs[0], name)
    make: dict[str, Callable[[], object]] = {
        "symlink": lambda: staged.symlink_to(target),
        "pipe": lambda: os.mkfifo(staged),
        "directory": staged.mkdir,
    }
    make[kind]()
    with pytest.raises(KvFileError, match="not a regular file"):
        await store.verify(store._kv_dirs[0], name, len(full(TOKENS)))
    assert full(TOKENS) == target.read_bytes()


@pytest.mark.parametrize("name", ["../x", "kvf-1.kv", "", "x.part", LOCK])
async def test_foreign_names_are_refused(store: KvStore, name: str) -> None:
    with pytest.raises(KvError):
        await store.verify(store._kv_dirs[0], name, 1)
    with pytest.raises(KvError):
        await store.discard(store._kv_dirs[0], name)


async def test_discard(store: KvStore) -> None:
    name = write(store)
    await store.discard(store._kv_dirs[0], name)
    await store.discard(store._kv_dirs[0], name)
    assert set() == names(store)


@pytest.fixture
async def pair(stores: Stores) -> KvStore:
    store = stores.make(*stores.kv_dirs)
    await store.load()
    return store


@pytest.mark.parametrize("how", ["link", "copy", "plain copy"])
async def test_open_in_another_directory(
    pair: KvStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how != "link":
        monkeypatch.setattr(os, "link", enospc)
    if how == "plain copy":
        monkeypatch.setattr(os, "copy_file_range", enospc)
    there = pair._kv_dirs[1]
    snapshot = await put(pair)
    name = await pair.open(snapshot, there, 1)
    assert full(TOKENS) == at(there, name).read_bytes()
    assert at(there, name).samefile(path(snapshot)) == (how == "link")
    await pair.close(snapshot, there, name)
    assert not at(there, name).exists()
    assert path(snapshot).exists()


async def test_copy_that_fails_leaves_nothing(
    pair: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = await put(pair)
    await pair.flush()
    for function in ("link", "copy_file_range", "pwrite"):
        monkeypatch.setattr(os, function, enospc)
    before = set(os.listdir(pair._kv_dirs[1]))
    with pytest.raises(KvError, match="No space"):
        await pair.open(snapshot, pair._kv_dirs[1], 1)
    assert before == set(os.listdir(pair._kv_dirs[1]))


async def test_delete_while_linked_elsewhere(pair: KvStore) -> None:
    """A backend that is about to read its own link is not affected."""
    there = pair._kv_dirs[1]
    snapshot = await put(pair)
    name = await pair.open(snapshot, there, 1)
    await pair.delete(snapshot)
    assert full(TOKENS) == at(there, name).read_bytes()
    await pair.close(snapshot, there, name)
    assert not at(there, name).exists()


async def test_end_removes_what_was_not_closed(pair: KvStore) -> None:
    there = pair._kv_dirs[1]
    name = await pair.open(await put(pair), there, 1)
    await pair.aclose()
    assert not at(there, name).exists()


async def test_cancelled_open_leaves_no_link(
    pair: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be cancelled, but its link must be removed all the same."""
    await cancel_inside(monkeypatch, "link", pair.open(await put(pair), pair._kv_dirs[1], 1))
    await pair.flush()
    assert {n for n in os.listdir(pair._kv_dirs[1]) if n.startswith("kvf-")} == set()


async def test_cancelled_commit_leaves_no_file(
    store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = full(TOKENS)
    staged = await store.verify(store._kv_dirs[0], write(store), len(raw))
    await cancel_inside(monkeypatch, "rename", store.commit(staged, NAMESPACE))
    await store.flush()
    assert set() == names(store)


async def test_many_records_are_checked_many_at_a_time(
    stores: Stores, store: KvStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand calls, one for each record, would block the event loop."""
    made = [await put(store, full([number, 6, 7])) for number in range(210)]
    await store.aclose()
    calls = list[object]()
    hand_over = ThreadPoolExecutor.submit

    def noted(pool: Any, function: Any, *args: Any) -> Any:
        calls.append(function)
        return hand_over(pool, function, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)
    again = stores.make()
    assert {snapshot.id for snapshot in await again.load()} == {one.id for one in made}
    assert len(calls) == 3 + 2  # plus opening and sweeping the directory
