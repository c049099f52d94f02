"""The processes of servers on demand, with a program in place of llama-server."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


ENDS = "import sys; print({told!r}, flush=True); sys.exit(1)"
GOES_ON = "import time\nfor n in range(9): print(n, flush=True); time.sleep(0.2)"


@dataclass
class Running:
    """A supervisor of one server, and what it was told of its ends."""

    servers: Supervisor
    ready: asyncio.Event
    ended: asyncio.Queue[tuple[str, bool]]
    waited: list[BackendId]  # for the last answers of these


def running(
    tmp_path: Path, *code: str, is_well: Callable[[], bool] = lambda: False, **more: Any
) -> Running:
    argv = (sys.executable, "-c", *code)
    settings = {"start_timeout_s": 60, "stop_timeout_s": 5} | more
    launch = Launch(A, argv, dict(os.environ), tmp_path, **settings)
    ready, ended = asyncio.Event(), asyncio.Queue[tuple[str, bool]]()
    waited: list[BackendId] = []

    async def is_ready(_url: str) -> bool:
        return is_well()

    async def before_stop(server: BackendId) -> None:
        waited.append(server)

    async def before_start() -> None:
        pass

    def on_ended(_server: BackendId, problem: str, hopeless: bool) -> None:
        ended.put_nowait((problem, hopeless))

    servers = Supervisor(
        [launch],
        tmp_path,
        10_000,
        is_ready=is_ready,
        on_ready=lambda *_: ready.set(),
        on_ended=on_ended,
        before_stop=before_stop,
        before_start=before_start,
    )
    return Running(servers, ready, ended, waited)


async def test_a_server_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its last answers nor for all of `stop_timeout`: it gets SIGKILL soon."""
    monkeypatch.setattr(supervisor, "_HANGING_GRACE_S", 0.1)
    started = tmp_path / "started"
    made = running(tmp_path, DEAF, str(started), is_well=started.exists, stop_timeout_s=3600)
    async with asyncio.timeout(60):
        made.servers.start(A)
        await made.ready.wait()
        made.servers.stop(A, hangs=True)
        await made.ended.get()
    assert made.waited == []
    await made.servers.aclose()


async def test_an_answer_of_another_process_on_the_port_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may listen there first; it would get prompts and the API key."""
    impostor = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = impostor.sockets[0].getsockname()[1]
    monkeypatch.setattr(supervisor, "free_port", lambda: port)
    sleeps = "import time; time.sleep(1)"
    made = running(tmp_path, sleeps, is_well=lambda: True, stop_timeout_s=1)  # says the impostor
    async with asyncio.timeout(60):
        made.servers.start(A)
        assert await made.ended.get() == ("it ended with code 0", False)
    assert not made.ready.is_set()
    await made.servers.aclose()
    impostor.close()


@pytest.mark.parametrize(
    ("told", "key"),
    [
        ("error: invalid argument: --no-such", "args"),
        ("gguf_init_from_file: failed to open GGUF file", "model"),
        ("ggml_backend_cuda: cudaMalloc failed: out of memory", "ctx, slots or args (-ngl)"),
    ],
)
async def test_a_start_that_fails_names_the_key(tmp_path: Path, told: str, key: str) -> None:
    made = running(tmp_path, ENDS.format(told=told))
    made.servers.start(A)
    problem, hopeless = await made.ended.get()
    assert problem == f"it ended with code 1: {told}; look at `{key}` of this model"
    assert not hopeless


async def test_a_start_that_says_something_is_not_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start that fetches its model prints how far it is."""
    monkeypatch.setattr(supervisor, "_SIGN_INTERVAL_S", 0.05)
    made = running(tmp_path, GOES_ON, start_timeout_s=1.0)
    made.servers.start(A)
    assert await made.ended.get() == ("it ended with code 0: 4 | 5 | 6 | 7 | 8", False)
    silent = running(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.2)
    silent.servers.start(A)
    problem, _ = await silent.ended.get()
    assert problem.endswith("for 0.2 s; look at `start_timeout` of this model")


async def test_what_a_process_leaves_running_is_ended(tmp_path: Path) -> None:
    """The end of `docker run` is not that of its container."""
    code = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    left = tmp_path / "left"
    stop = (sys.executable, "-c", code, str(left), "${port}")
    made = running(tmp_path, "import time; time.sleep(60)", is_well=lambda: True, stop_argv=stop)
    made.servers.start(A)
    await made.ready.wait()
    await made.servers.aclose()
    assert int(left.read_text()) > 0


async def test_what_is_left_of_a_late_start_is_ended(tmp_path: Path) -> None:
    left = tmp_path / "left"
    stop = (
        sys.executable,
        "-c",
        "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()",
        str(left),
    )
    made = running(tmp_path, "import time; time.sleep(60)", start_timeout_s=0.1, stop_argv=stop)
    made.servers.start(A)
    await made.ended.get()
    assert left.exists()


async def test_what_is_no_llama_server_is_ended_for_good(tmp_path: Path) -> None:
    made = running(tmp_path, "import time; time.sleep(60)", is_well=lambda: True)
    made.servers.start(A)
    await made.ready.wait()
    made.servers.fail(A, "the server is not a llama-server")
    assert await made.ended.get() == ("the server is not a llama-server", True)
