"""The processes of servers on demand, with a program in place of llama-server."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from router.base.types import BackendId
from router.servers import supervisor
from router.servers.launch import Launch
from router.servers.supervisor import Supervisor

A = BackendId("a")
# Ready when its file is there; SIGTERM does not end it.
DEAF = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


async def test_a_server_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its last answers nor for all of `stop_timeout`: it gets SIGKILL soon."""
    monkeypatch.setattr(supervisor, "_HANGING_GRACE_S", 0.1)
    ready, ended = asyncio.Event(), asyncio.Event()
    waited: list[BackendId] = []
    started = tmp_path / "started"

    async def is_ready(_url: str) -> bool:
        return started.exists()

    async def before_stop(server: BackendId) -> None:
        waited.append(server)

    async def before_start() -> None:
        pass

    argv = (sys.executable, "-c", DEAF, str(started))
    launch = Launch(A, argv, dict(os.environ), tmp_path, start_timeout_s=60, stop_timeout_s=3600)
    servers = Supervisor(
        [launch],
        tmp_path,
        10_000,
        is_ready=is_ready,
        on_ready=lambda *_: ready.set(),
        on_ended=lambda *_: ended.set(),
        before_stop=before_stop,
        before_start=before_start,
    )
    async with asyncio.timeout(60):
        servers.start(A)
        await ready.wait()
        servers.stop(A, hangs=True)
        await ended.wait()
    assert waited == []
    await servers.aclose()
