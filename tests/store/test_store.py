"""`router.store.store`: from a backend to a snapshot and back. Crashes: test_store_crash.py."""

import asyncio
import os
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from router.base import tokens as tok
from router.base.errors import KvError, KvFileError
from router.base.ports import SnapshotStore
from router.base.types import KvDir, SnapshotId
from router.store.sidecars import LOCK
from router.store.store import KvStore
from tests.conftest import StartServer
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
from tests.support.servers.llama_server import LlamaServer


def test_is_the_port(stores: Stores) -> None:
    port: SnapshotStore = stores.make()
    assert port is not None


async def test_snapshot_survives_a_restart(stores: Stores, store: KvStore) -> None:
    snapshot = await put(store)
    again, loaded = await stores.restart(store)

    assert [snapshot] == loaded
    assert tok.pack(TOKENS) == loaded[0].tokens
    assert f"kvf-{snapshot.id}.kv" == await again.open(snapshot, snapshot.kv_dir, 1)


async def test_usable_before_it_is_durable(store: KvStore) -> None:
    snapshot = await put(store)
    name = await store.open(snapshot, snapshot.kv_dir, 1)
    assert full(TOKENS) == at(snapshot.kv_dir, name).read_bytes()
    await store.close(snapshot, snapshot.kv_dir, name)
    assert path(snapshot).exists()


async def test_directory_is_made_private(stores: Stores, store: KvStore) -> None:
    snapshot = await put(store)
    assert stat.S_IMODE(os.stat(snapshot.kv_dir).st_mode) == 0o700
    assert stat.S_IMODE(path(snapshot).stat().st_mode) == 0o600


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


async def test_concurrent_opens_are_independent(pair: KvStore) -> None:
    there = pair._kv_dirs[1]
    snapshot = await put(pair)
    opened = await asyncio.gather(*(pair.open(snapshot, there, 1) for _ in range(20)))
    assert len(set(opened)) == 20
    for name in opened[:10]:
        await pair.close(snapshot, there, name)
    assert all(at(there, name).exists() for name in opened[10:])


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


async def test_delete_before_it_is_durable(stores: Stores, store: KvStore) -> None:
    """The background work must not write a record for a deleted file."""
    for n in range(2, 12):
        snapshot = await put(store, full(range(n)))
        await store.delete(snapshot)
        await store.delete(snapshot)
    await store.flush()
    assert set() == names(store)
    assert stores.lost == []
    _, loaded = await stores.restart(store)
    assert loaded == []


async def test_quarantine_keeps_the_newest_four(stores: Stores, store: KvStore) -> None:
    snapshots = [await put(store, full(range(n))) for n in range(2, 8)]
    await store.flush()
    for snapshot in snapshots:
        await store.quarantine(snapshot, "restore failed")
    assert {f"{path(s).name}.quarantined" for s in snapshots[2:]} == names(store)
    _, loaded = await stores.restart(store)
    assert loaded == []


async def test_media_tokens_survive_a_restart(stores: Stores, store: KvStore) -> None:
    """The file has -1 for media; only the record has the fingerprints of the media."""
    tokens = [1, -1, -1, -1, 2]
    raw = head(tokens, [(1, b"abc"), (3, b"d")]) + attention(stream(range(5), ext=True))
    staged = await store.verify(store._kv_dirs[0], write(store, raw), len(raw))
    assert tok.pack(tokens) == staged.tokens
    named = replace(staged, tokens=tok.pack([1, -70, -80, 2]))
    snapshot = await store.commit(named, NAMESPACE)
    _, loaded = await stores.restart(store)
    assert [snapshot] == loaded


async def test_without_fsync(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", enospc)
    store = stores.make(fsync=False)
    await store.load()
    snapshot = await put(store)
    await store.flush()
    assert stores.lost == []
    assert path(snapshot).exists()


async def test_cheap_open_is_cheap(store: KvStore) -> None:
    """An open takes under a millisecond; the best of 50 counts, as the machine may be busy."""
    snapshot = await put(store)
    await store.flush()
    best = 1.0
    for _ in range(50):
        began = time.perf_counter()
        await store.open(snapshot, snapshot.kv_dir, 1)
        best = min(best, time.perf_counter() - began)
    assert best < 0.001


async def test_unknown_place_and_snapshot(store: KvStore) -> None:
    snapshot = await put(store)
    with pytest.raises(KvError):
        await store.open(snapshot, KvDir("/elsewhere"), 1)
    with pytest.raises(KvFileError):
        await store.open(replace(snapshot, id=SnapshotId("0")), snapshot.kv_dir, 1)


async def test_real_backends_share_a_snapshot(
    llama_server: StartServer, stores: Stores, pair: KvStore
) -> None:
    """A snapshot saved by one server is restored by another with a directory of its own."""
    here, there = pair._kv_dirs
    first = await llama_server(kv_dir=Path(here))
    second = await llama_server(kv_dir=Path(there))
    prompt = list(range(100))
    async with aiohttp.ClientSession() as http:

        async def post(server: LlamaServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
            async with http.post(server.url + path, json=body) as response:
                answer: dict[str, Any] = await response.json()
                assert response.status == 200, answer
                return answer

        body = {"prompt": prompt, "n_predict": 4, "id_slot": 0, "temperature": 0}
        body["return_tokens"] = True
        fresh = await post(first, "/completion", body)
        name = pair.staging_name()
        saved = await post(first, "/slots/0?action=save", {"filename": name})
        staged = await pair.verify(here, name, saved["n_written"])
        snapshot = await pair.commit(staged, NAMESPACE)
        lent = await pair.open(snapshot, there, 2)
        restored = await post(second, "/slots/0?action=restore", {"filename": lent})
        await pair.close(snapshot, there, lent)
        again = await post(second, "/completion", body)

    assert len(snapshot) == restored["n_restored"]
    assert tok.pack(prompt + fresh["tokens"][:-1]) == snapshot.tokens
    assert again["timings"]["cache_n"] == len(prompt) - 1
    assert fresh["tokens"] == again["tokens"]
    await pair.flush()
    assert stores.lost == []


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


async def test_what_earlier_versions_noted_of_slots_is_removed(stores: Stores) -> None:
    """It holds prompts, and nothing reads it."""
    store = stores.make()
    await store.load()
    old = Path(stores.kv_dirs[0]) / "kvf-slot-a-0.journal"
    old.write_bytes(b"tokens")
    await stores.restart(store)
    assert not old.exists()
