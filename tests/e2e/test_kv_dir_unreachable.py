"""The KV directory of one of two servers hangs, is removed or is unmounted.

Requests continue, and so do the snapshots of the other directory.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from router.llama.attach import probe
from router.store import io_pool
from tests.conftest import StartServer
from tests.e2e.test_disks import disk_of, mounted, unmount
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.faults.consistency import assert_consistent, assert_undisturbed
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import PATIENCE_S, RunningRouter, running

pytestmark = pytest.mark.thorough

__all__ = ["mounted"]  # a fixture

LONG = 700
YAML = "store: {idle_save_after: 20ms}"
HERE, THERE, LEFT = ids(1, LONG), ids(2, LONG), ids(4, LONG)
_CALLS = ("stat", "lstat", "open", "unlink", "rename", "link", "scandir", "listdir", "statvfs")


@contextmanager
def hanging(place: Path) -> Iterator[None]:
    """Make this process's file operations in `place` wait for the end of the block.

    Servers are other processes, so their operations continue. `place` itself does not hang: a
    server's start checks that the directory exists. Assert that the event loop made no such
    operation.
    """
    over, main, on_loop = threading.Event(), threading.main_thread(), list[str]()
    real = {name: getattr(os, name) for name in _CALLS}

    def held(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if str(args[0] if args else "").startswith(f"{place}/") and not over.is_set():
                if threading.current_thread() is main:
                    on_loop.append(name)
                over.wait(120)
            return real[name](*args, **more)

        return call

    for name in _CALLS:
        setattr(os, name, held(name))
    try:
        yield
    finally:
        over.set()
        for name, function in real.items():
            setattr(os, name, function)
    assert on_loop == []


class Two:
    """Server `a` and server `b`, each with its own directory and one conversation saved there."""

    def __init__(self, a: LlamaServer, b: LlamaServer, undisturbed: LlamaServer) -> None:
        self.a, self.b, self.undisturbed = a, b, undisturbed
        assert a.kv_dir is not None
        assert b.kv_dir is not None
        self.homes = {"a": a.kv_dir, "b": b.kv_dir}

    @property
    def backends(self) -> list[tuple[str, str]]:
        return [("a", self.a.url), ("b", self.b.url)]

    async def fill(self, kvferry: RunningRouter) -> None:
        for number, (name, prompt) in enumerate((("a", HERE), ("b", THERE)), 1):
            await kvferry.complete(prompt, model=name)
            await kvferry.until(saved(LONG - 1, number))
        await assert_consistent(kvferry, self.homes.values())

    async def b_goes_on(self, kvferry: RunningRouter, seed: int) -> None:
        """Assert that `b` restores its snapshot and saves new ones."""
        await kvferry.complete(ids(seed, LONG), model="b")
        await kvferry.until_quiet()
        n_before = (await kvferry.state())["snapshots"]["count"]
        await kvferry.complete(ids(seed + 1, LONG), model="b")
        await kvferry.until(lambda state: state["snapshots"]["count"] > n_before)
        again = await kvferry.complete(THERE, model="b")
        assert (again.source, again.cached) == ("snapshot", LONG - 1)

    async def all_is_answered(self, kvferry: RunningRouter) -> None:
        """Assert that both servers answer.

        Conversations saved in the affected directory are included.
        """
        for _ in range(2):
            await assert_undisturbed(kvferry, self.undisturbed, [HERE, THERE, ids(3, LONG)])
        for name in "abab":
            answer = await kvferry.complete(HERE, model=name)
            assert answer.status == 200


async def until_offered(kvferry: RunningRouter, place: Path, offered: bool) -> None:
    """Wait until `/kvferry/snapshots` lists a snapshot of `place`, or none if not `offered`."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            rows = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
            if any(row["kv_dir"] == str(place) for row in rows) is offered:
                return
            await asyncio.sleep(0.02)


@pytest.fixture
async def two(llama_server: StartServer, tmp_path: Path) -> Two:
    a = await llama_server(slots=1, kv_dir=tmp_path / "a", extra_args=["-a", "a"])
    b = await llama_server(slots=1, kv_dir=tmp_path / "b", extra_args=["-a", "b"])
    return Two(a, b, await llama_server(slots=1, kv_dir=tmp_path / "nobody's"))


@pytest.mark.fault("the KV directory of one server hangs", "while it is saved and restored")
async def test_hangs(
    two: Two, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """One request waits for the directory; then its snapshots are withdrawn until it responds."""
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        await two.fill(kvferry)
        await kvferry.complete(LEFT, model="a")
        await kvferry.until(saved(LONG - 1, 3))
        monkeypatch.setattr(io_pool, "QUICK_S", 0.5)  # only now: a busy machine is no hang
        with hanging(two.homes["a"]):
            moved = await kvferry.complete(HERE, model="b")
            assert (moved.status, moved.source) == (200, "cold")
            await until_offered(kvferry, two.homes["a"], False)
            async with asyncio.timeout(60):
                await two.all_is_answered(kvferry)
                await two.b_goes_on(kvferry, 10)
            await kvferry.until_quiet()
        await until_offered(kvferry, two.homes["a"], True)
        again = await kvferry.complete(LEFT, model="b")
        assert (again.source, again.cached) == ("snapshot", LONG - 1)
        await assert_undisturbed(kvferry, two.undisturbed, [HERE, THERE])
        await assert_consistent(kvferry, two.homes.values())
    record_property("client", "the right answers, one of them late")


@pytest.mark.slow
@pytest.mark.fault("the KV directory of one server hangs", "while that server starts")
async def test_hangs_at_the_start_of_a_server(
    two: Two, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The server is used without snapshots, and its directory is probed again after a drain."""
    for module in (io_pool, probe):
        monkeypatch.setattr(module, "QUICK_S", 0.5)
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        await two.fill(kvferry)
        two.a.kill()
        await kvferry.until_is("a", "down")
        with hanging(two.homes["a"]):
            await two.a.restart()
            await kvferry.until_up("a")
            (a, _) = (await kvferry.state())["backends"]
            assert (a["snapshots"], a["problem"]) == (False, "kv_dir does not answer")
            await two.all_is_answered(kvferry)
            await two.b_goes_on(kvferry, 10)
        await kvferry.until(lambda _: not kvferry.router.store.hangs)
        await kvferry.operate("a", "drain")
        await kvferry.until_is("a", "drained")
        await kvferry.operate("a", "undrain")
        await kvferry.until_is("a", "up")
        assert all(one["snapshots"] for one in (await kvferry.state())["backends"])
        await assert_consistent(kvferry, two.homes.values())
    record_property("client", "the right answers")


@pytest.mark.slow
@pytest.mark.fault("the KV directory of one server hangs", "while the router stops")
async def test_hangs_at_the_end(
    two: Two, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """The router stops all the same; recorded snapshots are there after the next start."""
    monkeypatch.setattr(io_pool, "QUICK_S", 0.5)
    monkeypatch.setattr(io_pool, "BULK_S", 0.5)
    with ExitStack() as until_stopped:
        async with running(two.backends, two.homes, yaml=YAML) as kvferry:
            await two.fill(kvferry)
            until_stopped.enter_context(hanging(two.homes["a"]))
            await kvferry.complete(ids(5, LONG), model="a")
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        answers = await assert_undisturbed(kvferry, two.undisturbed, [HERE, THERE])
        assert [answer.cached for answer in answers] == [LONG - 1] * 2
        await assert_consistent(kvferry, two.homes.values())
    record_property("client", "nothing")


@pytest.mark.fault("the KV directory of one server is removed", "while it is in use")
async def test_removed(two: Two, record_property: Callable[[str, object], None]) -> None:
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        await two.fill(kvferry)
        shutil.rmtree(two.homes["a"])
        await two.all_is_answered(kvferry)
        await two.b_goes_on(kvferry, 10)
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        await two.all_is_answered(kvferry)
        await assert_consistent(kvferry, two.homes.values())
    record_property("client", "the right answers")


@pytest.mark.slow
@pytest.mark.fault("the KV directory of one server is unmounted", "while it is in use")
async def test_unmounted(
    two: Two, mounted: Callable[..., None], record_property: Callable[[str, object], None]
) -> None:
    """The server writes to the directory under the mount point: none of these files is kept."""
    home = two.homes["a"]
    home.rename(home.with_name("a-before"))
    disk_of(mounted, home, 64 << 20)
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        await two.fill(kvferry)
        unmount(home)
        await two.all_is_answered(kvferry)
        await two.b_goes_on(kvferry, 10)
        await kvferry.until_quiet()
    assert os.listdir(home) == []
    home.chmod(0o700)
    async with running(two.backends, two.homes, yaml=YAML) as kvferry:
        await two.all_is_answered(kvferry)
        await assert_consistent(kvferry, two.homes.values())
    record_property("client", "the right answers")
