"""The life of a llama-server that a test starts."""

import os
import signal
import stat
from pathlib import Path

import aiohttp
import pytest

from router.servers.program import ServerStartError
from tests.conftest import StartServer
from tests.support.servers.llama_server import LlamaServer

pytestmark = pytest.mark.thorough


async def status(url: str) -> int:
    """Return the HTTP status of /health, or 0 if nothing listens."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status
    except aiohttp.ClientConnectionError:
        return 0


def test_good_flags() -> None:
    server = LlamaServer(Path("m.gguf"), slots=3, ctx=99, kv_dir=Path("kv"), argv=["x"], port=1)
    line = " ".join(server.command())

    assert line.startswith("x -m m.gguf --host 127.0.0.1 --port 1 -c 99 -t 1 --slot-save-path kv")
    assert "--cache-ram 0" in line
    assert "-np 3 --no-kv-unified" in line
    assert {"--slots", "--metrics"} <= set(line.split())


def test_plain_defaults() -> None:
    """`plain_defaults` starts llama-server as most people start it."""
    server = LlamaServer(Path("m.gguf"), ctx=99, argv=["x"], port=1, plain_defaults=True)
    expected = "x -m m.gguf --host 127.0.0.1 --port 1 -c 99 -t 1"
    assert expected == " ".join(server.command())


async def test_start_stop_restart(llama_server: StartServer, tmp_path: Path) -> None:
    """A restart keeps the port and changes the process; the exit code at the end is clean."""
    server = await llama_server()
    port, pid = server.port, server.pid
    assert await status(server.url) == 200
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700

    await server.restart()
    again = server.pid
    assert server.port == port
    assert again not in (None, pid)
    assert await status(server.url) == 200

    assert await server.stop() == 0
    assert server.pid is None
    assert await status(server.url) == 0
    assert "model loaded" in server.log_tail()
    assert await server.stop() == 0  # twice is fine


async def test_kill_is_a_crash(llama_server: StartServer) -> None:
    server = await llama_server()
    pid = server.pid
    assert pid is not None
    server.kill()

    assert server.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await server.start()
    assert await status(server.url) == 200


async def test_a_crash_by_itself_is_seen(llama_server: StartServer) -> None:
    """`pid` shows the process as it is, not the last call."""
    server = await llama_server()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)

    assert await server.stop() == -signal.SIGKILL
    assert server.pid is None


async def test_start_fails_fast(server_argv: list[str]) -> None:
    """The reason comes from the log, and comes before the timeout."""
    server = LlamaServer(Path("/no/such.gguf"), argv=server_argv)
    with pytest.raises(ServerStartError, match="failed to load model"):
        await server.start()
    assert server.pid is None
