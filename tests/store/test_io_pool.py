"""`router.store.io_pool`, and a store's work with files in a directory that hangs."""

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest

from router.base.errors import KvError, KvFileError
from router.base.tasks import Tasks
from router.base.types import Snapshot, SnapshotId
from router.store import files, io_pool
from router.store import store as store_module
from router.store.io_pool import Threads
from router.store.records import StoredSnapshot
from router.store.store import KvStore
from tests.support.files.state_files import full
from tests.support.files.stores import Noting, Stores, names, put

NO_TIME = 0.01


async def turns() -> None:
    """Let due callbacks run."""
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


async def test_hanging_thread_fails_its_waiter_and_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(io_pool, "QUICK_S", NO_TIME)
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


async def test_what_comes_after_the_end_is_an_error_of_the_store() -> None:
    """A file may be committed while the store ends; its durability is asked for too late."""
    made = threads()
    made.close()
    with pytest.raises(KvError, match="/kv is closed"):
        await made.unhurried(int)


async def test_a_cancelled_call_is_cancelled_after_the_end_too() -> None:
    """Its thread has returned, and nothing can be undone any more."""
    made = threads()
    work = made.unhurried(lambda: None, lambda _: None)
    call = asyncio.get_running_loop().create_task(work)
    await asyncio.sleep(0)
    made._unhurried.shutdown()  # waits, and the loop with it
    made.close()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_what_waits_for_a_thread_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits behind background work, or behind calls that return, does not hang."""
    made = threads()
    go = threading.Event()
    backlog = [asyncio.get_running_loop().create_task(made.unhurried(go.wait)) for _ in range(4)]
    await turns()
    async with asyncio.timeout(10):
        assert await made.bulk(int) == 0
    go.set()
    await asyncio.gather(*backlog)

    gates = [threading.Event() for _ in range(3)]
    loop, clocks = asyncio.get_running_loop(), list[float]()
    real = loop.call_later

    def call_later(delay_s: float, *rest: Any) -> asyncio.TimerHandle:
        clocks.append(delay_s)
        return real(delay_s, *rest)

    monkeypatch.setattr(loop, "call_later", call_later)
    calls = [asyncio.get_running_loop().create_task(made.bulk(gate.wait)) for gate in gates]
    await until(lambda: clocks.count(io_pool.BULK_S) == 2)
    await turns()
    assert clocks.count(io_pool.BULK_S) == 2
    gates[0].set()
    await calls[0]
    await until(lambda: clocks.count(io_pool.BULK_S) == 3)
    for gate in gates:
        gate.set()
    assert await asyncio.gather(*calls) == [True] * 3
    assert not made.hangs
    made.close()


async def test_who_waits_behind_what_hangs_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call queued behind a cancelled call that hangs also fails, and never begins."""
    monkeypatch.setattr(io_pool, "BULK_S", 0.05)
    made = threads()
    go, begun = threading.Event(), list[int]()
    first = [asyncio.get_running_loop().create_task(made.bulk(go.wait)) for _ in range(2)]
    third = asyncio.get_running_loop().create_task(made.bulk(lambda: begun.append(3)))
    await turns()
    for call in first:
        call.cancel()
    with pytest.raises(KvError, match="does not answer"):
        async with asyncio.timeout(10):
            await third
    go.set()
    await until(lambda: not made.works)
    assert begun == []
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
    """A patched function of the store, in which every thread waits for `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.go = threading.Event()
        real = getattr(owner, name)

        def held(*args: object, **more: object) -> object:
            self.go.wait(10)
            return real(*args, **more)

        monkeypatch.setattr(owner, name, held)
        monkeypatch.setattr(io_pool, "QUICK_S", NO_TIME)


async def kept(store: KvStore) -> Snapshot:
    """Load the store and return a committed snapshot of it."""
    await store.load()
    snapshot = await put(store)
    await store.flush()
    return snapshot


async def test_a_file_that_comes_too_late_is_removed(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late file here is a link; its caller has given up."""
    store = stores.make(*stores.kv_dirs)
    snapshot = await kept(store)
    hanging = Hanging(monkeypatch, files, "link")
    with pytest.raises(KvError, match="does not answer"):
        await store.open(snapshot, stores.kv_dirs[1], 1)
    hanging.go.set()
    await until(lambda: not store.works)
    await store.flush()
    assert names(store) == {f"kvf-{snapshot.id}.kv"}
    assert not [name for name in os.listdir(stores.kv_dirs[1]) if name.startswith("kvf-")]


async def test_of_two_directories_neither_is_blamed_for_the_other(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One directory is read and the other written: only the way between them is closed."""
    here, there = stores.kv_dirs
    store = stores.make(here, there)
    snapshot = await kept(store)
    hanging = Hanging(monkeypatch, files, "link")
    for _ in range(2):
        with pytest.raises(KvError, match=f"{here} or {there} does not answer"):
            await store.open(snapshot, there, 1)
    monkeypatch.undo()
    await store.discard(there, store.staging_name())
    assert await store.open(snapshot, here, 1)
    assert stores.lost == []

    hanging.go.set()
    await until(lambda: not store.works)
    assert await store.open(snapshot, there, 1)


async def test_one_that_hangs_does_not_keep_another_from_being_opened(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = stores.kv_dirs
    store = stores.make(here)
    await store.load()
    real = os.stat

    def stat(file: Any, *args: Any, **more: Any) -> os.stat_result:
        assert str(file) != here
        return real(file, *args, **more)

    monkeypatch.setattr(os, "stat", stat)
    assert await store.add([there]) == []


async def test_one_that_hangs_while_it_is_opened_is_let_go_of(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = stores.kv_dirs
    store = stores.make(here)
    await store.load()
    hanging = Hanging(monkeypatch, files, "prepare_directory")
    monkeypatch.setattr(io_pool, "BULK_S", NO_TIME)
    for _ in range(2):
        with pytest.raises(KvError, match="does not answer"):
            await store.add([there])
    monkeypatch.undo()
    hanging.go.set()
    await until(lambda: not store.works)
    assert not store.hangs
    other = stores.make(there)
    assert await other.load() == []
    await other.aclose()
    assert await store.add([there]) == []
    assert len(store._threads) == 2


async def test_what_was_lost_is_told_before_what_is_found(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory answers again once the first loss has been reported."""
    monkeypatch.setattr(store_module, "_TOLD_AT_ONCE", 1)
    offered: set[SnapshotId] = set()

    class Listener(Noting):
        def lost(self, snapshot: Snapshot, reason: str) -> None:
            if not hanging.go.is_set():
                hanging.go.set()
                (stuck,) = store._directories[snapshot.kv_dir].threads._stuck
                wait([stuck.job], timeout=10)
            offered.discard(snapshot.id)

        async def found(self, snapshots: list[Snapshot]) -> None:
            offered.update(snapshot.id for snapshot in snapshots)

    store = KvStore(stores.kv_dirs, wall_now=lambda: 1.5)
    store.listener = Listener()
    await store.load()
    made = [await put(store, full([number, 6, 7])) for number in range(20)]
    await store.flush()
    offered.update(snapshot.id for snapshot in made)
    hanging = Hanging(monkeypatch, files, "identity")
    with pytest.raises(KvError):
        await store.open(made[0], made[0].kv_dir, 1)
    await until(lambda: not store.hangs)
    await store.flush()
    assert offered == {snapshot.id for snapshot in made}
    await store.aclose()


async def test_what_is_deleted_in_a_directory_that_hangs_is_gone_later(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.make()
    snapshot = await kept(store)
    hanging = Hanging(monkeypatch, files, "identity")
    with pytest.raises(KvError):
        await store.open(snapshot, snapshot.kv_dir, 1)
    unlink = Hanging(monkeypatch, StoredSnapshot, "unlink")
    deleted = asyncio.get_running_loop().create_task(store.delete(snapshot))
    await turns()
    assert names(store)
    unlink.go.set()
    hanging.go.set()
    await deleted
    assert not names(store)
    assert not store._held
