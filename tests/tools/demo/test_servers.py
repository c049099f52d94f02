"""The llama-servers of the demo: started, killed, started again on the same port."""

import sys
from pathlib import Path

import aiohttp
import pytest

from router.servers.process import ServerLog
from router.servers.program import ServerStartError
from router.tools.demo import servers
from router.tools.demo.servers import DemoServer, command_of
from tests.support.models.tiny_models import tiny_model


def server(tmp_path: Path, *command: str) -> DemoServer:
    return DemoServer(command, ServerLog(tmp_path / "a.log", 1 << 20))


async def test_a_killed_server_starts_again_on_its_port(
    server_argv: list[str], tmp_path: Path
) -> None:
    kv_dir = tmp_path / "kv"
    kv_dir.mkdir()
    command = command_of(server_argv, tiny_model("llama").path, 2, 512, kv_dir)
    one = server(tmp_path, *command)
    await one.start()
    await one.end(0.0)
    await one.start()
    try:
        async with aiohttp.ClientSession() as session, session.get(one.url + "/slots") as response:
            assert len(await response.json()) == 2
    finally:
        await one.end()


async def test_a_failed_start_tells_the_end_of_the_log(tmp_path: Path) -> None:
    one = server(tmp_path, sys.executable, "-c", "print('no such model'); raise SystemExit(1)")

    with pytest.raises(ServerStartError, match="no such model"):
        await one.start()


async def test_a_silent_server_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "_START_TIMEOUT_S", 0.2)
    one = server(tmp_path, sys.executable, "-c", "import signal; signal.pause()")

    with pytest.raises(ServerStartError, match="could not be started"):
        await one.start()
    assert one._process is not None
    assert one._process.has_ended
