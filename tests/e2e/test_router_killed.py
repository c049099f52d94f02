"""The router is killed in the middle of its work on files.

A restarted router offers exactly the committed snapshots, and every answer is right.
"""

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from router.assembly.router import Router
from tests.conftest import StartServer
from tests.support.conversations.conversing import saved
from tests.support.conversations.prompts import ids
from tests.support.conversations.turns import named
from tests.support.faults.consistency import assert_consistent, assert_undisturbed
from tests.support.faults.killed_router import HANGS, POINTS
from tests.support.servers.router_process import Elsewhere
from tests.support.servers.running_router import RunningRouter, configuration_text, running
from tests.tools.test_cli import Process, starting

pytestmark = pytest.mark.thorough

LONG = 1500
KEPT, OTHER, THIRD = ids(1, LONG), ids(2, LONG), ids(3, LONG)
QUICK = "store: {idle_save_after: 50ms, fsync: true}"
LATE = "store: {idle_save_after: 1h}"
OFTEN = {"copy: half written"}


@dataclass
class Scene:
    """Servers, their KV directories, and settings of the router that is killed."""

    backends: list[tuple[str, str]]
    kv_dirs: dict[str, Path]
    armed: Path
    yaml: str = QUICK
    kept: list[int] | None = None


@asynccontextmanager
async def doomed(
    scene: Scene, point: str, tmp_path: Path
) -> AsyncIterator[tuple[Process, RunningRouter]]:
    """Yield a router that kills itself at `point` once the file `scene.armed` exists."""
    path = tmp_path / "kvferry.yaml"
    path.write_text(configuration_text(scene.backends, scene.kv_dirs, yaml=scene.yaml))
    program = (sys.executable, "-m", "tests.support.faults.killed_router", point, str(scene.armed))
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        starting(*program, "serve", "--config", str(path)) as process,
        aiohttp.ClientSession(connector=connector) as session,
    ):
        url = (await process.event("listening"))["url"]
        kvferry = Elsewhere(url, cast(Router, None), session)
        await kvferry.until_up()
        yield process, kvferry


async def ask(kvferry: RunningRouter, prompt: list[int], model: str = "a") -> None:
    """Send a request; ignore a connection that the router's end breaks."""
    with suppress(aiohttp.ClientError):
        await kvferry.complete(prompt, model=model)


async def saves(kvferry: RunningRouter, scene: Scene, _: Process) -> None:
    scene.armed.touch()
    await ask(kvferry, OTHER)


async def gives_up(kvferry: RunningRouter, scene: Scene, _: Process) -> None:
    for number, prompt in enumerate((OTHER, THIRD), 2):
        await kvferry.complete(prompt, model="a")
        await kvferry.until(saved(LONG - 1, number))
    await assert_consistent(kvferry, scene.kv_dirs.values())  # without a record there is no drop
    rows = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
    scene.armed.touch()
    with suppress(aiohttp.ClientError):
        await kvferry.post("/kvferry/snapshots/purge", {"id": [row["id"] for row in rows[:2]]})


async def restores(kvferry: RunningRouter, scene: Scene, _: Process) -> None:
    await kvferry.complete(OTHER, model="a")
    await kvferry.until(saved(LONG - 1, 2))
    scene.armed.touch()
    await ask(kvferry, KEPT)


async def restores_elsewhere(kvferry: RunningRouter, scene: Scene, _: Process) -> None:
    scene.armed.touch()
    await ask(kvferry, KEPT, "b")


async def cuts(kvferry: RunningRouter, scene: Scene, _: Process) -> None:
    assert scene.kept is not None
    scene.armed.touch()
    await ask(kvferry, scene.kept[:LONG] + ids(9, 50), "b")


async def stops(kvferry: RunningRouter, scene: Scene, process: Process) -> None:
    await kvferry.complete(OTHER, model="a")  # KEPT is displaced, and saved before
    await kvferry.until(saved(LONG - 1))
    scene.armed.touch()
    process.send(signal.SIGTERM)


Doing = Callable[[RunningRouter, Scene, Process], Awaitable[None]]
DOINGS: dict[str, Doing] = {
    "save": saves,
    "pad": saves,
    "commit": saves,
    "evict": gives_up,
    "restore": restores,
    "link": restores_elsewhere,
    "copy": restores_elsewhere,
    "restream": restores_elsewhere,
    "cut": cuts,
    "shutdown": stops,
}


def _points() -> list[object]:
    return [
        pytest.param(
            point,
            id=point.replace(": ", "-").replace(" ", "_"),
            marks=[
                pytest.mark.fault("the router is killed (SIGKILL)", point),
                *([] if point in OFTEN else [pytest.mark.slow]),
            ],
        )
        for point in POINTS
    ]


@pytest.mark.slow
@pytest.mark.fault("the KV directory hangs for good", "while the router stops", client="nothing")
async def test_it_ends_although_a_thread_does_not(
    llama_server: StartServer, tmp_path: Path
) -> None:
    server = await llama_server(slots=1, extra_args=["-a", "a"])
    scene = Scene([("a", server.url)], {"a": tmp_path / "kv"}, tmp_path / "armed")
    async with doomed(scene, HANGS, tmp_path) as (process, kvferry):
        await kvferry.complete(KEPT, model="a")
        await kvferry.until(saved(LONG - 1))
        await assert_consistent(kvferry, scene.kv_dirs.values())
        scene.armed.touch()
        await kvferry.complete(OTHER, model="a")
        await kvferry.until(saved(LONG - 1, 2))
        assert await process.end(signal.SIGTERM) == 0
        assert "stopped_with_a_hanging_directory" in "".join(process.log)
    async with running(scene.backends, scene.kv_dirs, yaml=QUICK) as kvferry:
        assert (await kvferry.complete(KEPT)).cached == LONG - 1
        await assert_consistent(kvferry, scene.kv_dirs.values())


@pytest.mark.parametrize("point", _points())
async def test_what_was_committed_is_there(
    llama_server: StartServer,
    tmp_path: Path,
    point: str,
    record_property: Callable[[str, object], None],
) -> None:
    step = point.partition(":")[0]
    kind = "gemma3" if step == "pad" else "llama"
    homes = {"a": tmp_path / "kv"}
    a = await named(llama_server, kind, "a")
    backends = [("a", a.url)]
    if step in ("link", "copy", "restream", "cut"):
        homes["b"] = tmp_path / ("kv-b" if step in ("link", "copy") else "kv")
        b = await llama_server(
            kind,
            slots=2 if step == "restream" else 1,
            ctx=4096 if step == "cut" else 8192,
            kv_dir=homes["b"],
            extra_args=["-a", "b"],
        )
        backends.append(("b", b.url))
    undisturbed = await llama_server(kind, slots=1, kv_dir=tmp_path / "nobody's")
    kept = ids(1, 5000) if step == "cut" else KEPT
    yaml = LATE if step == "shutdown" else QUICK
    scene = Scene(backends, homes, tmp_path / "armed", yaml, kept)

    async with doomed(scene, point, tmp_path) as (process, kvferry):
        await kvferry.complete(kept, model="a")
        if step != "shutdown":
            await kvferry.until(saved(len(kept) - 1))
            await assert_consistent(kvferry, set(homes.values()))
        await DOINGS[step](kvferry, scene, process)
        assert await process.end() == -signal.SIGKILL

    async with running(backends, homes, yaml=QUICK) as kvferry:
        answers = await assert_undisturbed(kvferry, undisturbed, [kept, OTHER, KEPT])
        assert answers[0].cached >= len(kept) - 2
        await assert_consistent(kvferry, set(homes.values()))
    record_property("client", "connection broken off; after a retry, the right answer")
