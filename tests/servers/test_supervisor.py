"""The processes of servers on demand, with a program in place of llama-server."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from router.base.types import BackendId
from router.servers import supervisor
from router.servers.launch import Launch
from router.servers.program import is_heard_by
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


async def test_an_answer_of_another_process_on_the_port_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may listen there first; it would get prompts and the API key."""
    impostor = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = impostor.sockets[0].getsockname()[1]
    monkeypatch.setattr(supervisor, "free_port", lambda: port)
    ended = asyncio.Event()
    told: list[str] = []

    async def is_ready(_url: str) -> bool:
        return True  # what the impostor says

    async def nothing(*_: object) -> None:
        pass

    def on_ended(_server: BackendId, problem: str) -> None:
        told.append(problem)
        ended.set()

    argv = (sys.executable, "-c", "import time; time.sleep(1)")
    launch = Launch(A, argv, dict(os.environ), tmp_path, start_timeout_s=60, stop_timeout_s=1)
    servers = Supervisor(
        [launch],
        tmp_path,
        10_000,
        is_ready=is_ready,
        on_ready=lambda *_: told.append("ready"),
        on_ended=on_ended,
        before_stop=nothing,
        before_start=nothing,
    )
    async with asyncio.timeout(60):
        servers.start(A)
        await ended.wait()
    assert told == ["it ended with code 0"]
    await servers.aclose()
    impostor.close()


async def test_a_listener_is_found_in_the_family_of_a_process() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0));"
    code += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    wrapper = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", wrapper),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    assert is_heard_by(port, process.pid)
    assert is_heard_by(port, os.getpid())  # an ancestor
    other = await asyncio.create_subprocess_exec("sleep", "60")
    assert not is_heard_by(port, other.pid)
    other.kill()
    assert process.stdin is not None
    process.stdin.close()
    for one in (process, other):
        await one.wait()
    assert is_heard_by(1, os.getpid())  # no process listens: not known
