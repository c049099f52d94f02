"""The llama-servers of the demo: started, killed, started again on the same port."""

import sys
from pathlib import Path

import pytest

from router.servers.process import ServerLog
from router.servers.program import ServerStartError
from router.tools.demo import servers
from router.tools.demo.servers import DemoServer


def server(tmp_path: Path, *command: str) -> DemoServer:
    return DemoServer(command, ServerLog(tmp_path / "a.log", 1 << 20))


async def test_a_silent_server_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "_START_TIMEOUT_S", 0.2)
    one = server(tmp_path, sys.executable, "-c", "import signal; signal.pause()")

    with pytest.raises(ServerStartError, match="could not be started"):
        await one.start()
    assert one._process is not None
    assert one._process.has_ended
