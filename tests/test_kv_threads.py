"""`router.adapters.kv_threads`, and what a store does with files in a directory that hangs."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from router.adapters import kv_files, kv_threads
from router.adapters.kv_store import KvStore
from router.adapters.kv_threads import Threads
from router.errors import KvError, KvFileError
from router.tasks import Tasks
from router.types import Place, Snapshot
from tests.kvstores import Stores, names, put, write

NO_TIME = 0.01


async def turns() -> None:
    """Let what is due happen."""
    for _ in range(5):
        await asyncio.sleep(0)


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if so():
                return
            await asyncio.sleep(0.001)


def threads(on_change: Callable[[], None] = lambda: None) -> Threads:
    return Threads("/kv", on_change, Tasks().spawn)


async def test_who_waits_for_a_thread_that_hangs_is_told_so_and_the_next_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_threads, "QUICK_S", NO_TIME)
    changes: list[bool] = []
    made = threads(lambda: changes.append(made.hangs))
    go = threading.Event()
    told = await asyncio.gather(*(made.quick(go.wait) for _ in range(2)), return_exceptions=True)
    assert [str(error) for error in told] == ["/kv does not answer"] * 2
    for do in (made.quick, made.bulk):
        with pytest.raises(KvError, match="/kv does not answer"):
            await do(int)
    assert (made.hangs, made.works, changes) == (True, True, [True])

    go.set()
    await until(lambda: not made.works)
    await turns()
    assert (made.hangs, changes) == (False, [True, False])
    assert await made.unhurried(int) == 0
    made.close()


@pytest.mark.parametrize(("blamed", "expected"), [(False, KvError), (True, KvFileError)])
async def test_what_a_thread_raises_is_raised(blamed: bool, expected: type[KvError]) -> None:
    made = threads()

    def fails() -> None:
        raise OSError(5, "not what it was")

    with pytest.raises(expected, match="not what it was") as told:
        await made.bulk(fails, blame_file=blamed)
    assert type(told.value) is expected
    assert not made.hangs
    made.close()


class Hanging:
    """A function of the store's that waits, once for each thread that comes by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.go = threading.Event()
        real = getattr(owner, name)

        def held(*args: object) -> object:
            self.go.wait(10)
            return real(*args)

        monkeypatch.setattr(owner, name, held)
        monkeypatch.setattr(kv_threads, "QUICK_S", NO_TIME)


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[Stores]:
    made = Stores((Place(str(tmp_path / "a")), Place(str(tmp_path / "b"))))
    yield made
    await made.aclose()


async def test_what_hangs_is_withdrawn_and_offered_again(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[Snapshot]] = []

    async def on_found(snapshots: list[Snapshot]) -> None:
        found.append(snapshots)

    store = KvStore(
        stores.places,
        on_lost=lambda snapshot, reason: stores.lost.append((snapshot, reason)),
        on_found=on_found,
        wall_now=lambda: 1.5,
    )
    await store.load()
    snapshot = await put(store)
    await store.flush()
    hanging = Hanging(monkeypatch, kv_files, "identity")
    with pytest.raises(KvError, match="does not answer"):
        await store.open(snapshot, snapshot.place, 1)
    await turns()
    assert stores.lost == [(snapshot, "its directory does not answer")]
    assert store.hangs
    # The other directory has threads of its own.
    await store.discard(stores.places[1], store.staging_name())

    hanging.go.set()
    await until(lambda: bool(found))
    assert found == [[snapshot]]
    assert await store.open(snapshot, snapshot.place, 1)
    await store.aclose()


async def test_a_file_that_comes_too_late_is_removed(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that nobody waits for any more."""
    store = stores.make(*stores.places)
    await store.load()
    snapshot = await put(store)
    await store.flush()
    hanging = Hanging(monkeypatch, kv_files, "link")
    with pytest.raises(KvError, match="does not answer"):
        await store.open(snapshot, stores.places[1], 1)
    hanging.go.set()
    await until(lambda: not store.works)
    await store.flush()
    assert names(store) == {f"kvf-{snapshot.id}.kv"}
    assert not [name for name in os.listdir(stores.places[1]) if name.startswith("kvf-")]


async def test_what_could_not_be_removed_is_later(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.make()
    await store.load()
    snapshot = await put(store)
    await store.flush()
    name = write(store)
    hanging = Hanging(monkeypatch, kv_files, "identity")
    with pytest.raises(KvError):
        await store.open(snapshot, snapshot.place, 1)
    with pytest.raises(KvError):
        await store.discard(snapshot.place, name)
    assert name in names(store)
    hanging.go.set()
    await until(lambda: name not in names(store))
