"""`kvferry top`: one picture for scripts, and a live one on a terminal."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console, RenderableType

from router.tools.cli import main
from router.tools.console import top
from router.tools.console.client import CallError, RouterClient, connected
from tests.conftest import StartServer
from tests.support.conversations.prompts import ids
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import running

pytestmark = pytest.mark.thorough

Capture = pytest.CaptureFixture[str]
UNUSED_URL = "http://127.0.0.1:9"


async def run(*arguments: str) -> int:
    """Run the command in its own event loop, while the router goes on in this one."""
    return await asyncio.to_thread(main, arguments)


@pytest.mark.parametrize("columns", ["80", "140"])
async def test_once(
    llama_server: StartServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture, columns: str
) -> None:
    """The second of two requests on a real server reuses the first; another backend is down."""
    server = await llama_server()
    monkeypatch.setenv("COLUMNS", columns)
    backends = [("gpu0", server.url), ("gpu1", UNUSED_URL)]
    async with running(backends, server.kv_dir, wait_for=["gpu0"]) as kvferry:
        prompt = ids(1, 600)
        await kvferry.complete(prompt, id_slot=0)
        await kvferry.complete([*prompt, *ids(2, 50)], id_slot=0)
        await kvferry.until(lambda state: state["snapshots"]["count"] > 0)
        await kvferry.until_quiet()
        state = await kvferry.state()
        capsys.readouterr()  # the router's log
        assert await run("top", "--once", "--url", kvferry.url) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    text = " ".join(" ".join(lines).split())
    assert f"kvferry {kvferry.url} " in text
    assert "reuse 48% of the last 2 prompts" in text
    held = state["slots"][0]["resident_tokens"]
    assert held > 650
    assert f"gpu0/0 idle {held:,} █" in text
    assert f"snapshots {state['snapshots']['count']}; " in text
    assert "gpu1 down no process listens on this host and port; start" in text


async def test_a_terminal_is_left_as_it_was(tmp_path: Path) -> None:
    """Ctrl-C ends the command without traceback or error; the earlier screen comes back."""
    async with FakeLlama(kv_dir=tmp_path) as fake, running([("a", fake.url)], tmp_path) as kvferry:
        ours, theirs = pty.openpty()
        # As in a shell: tests that run in the background ignore Ctrl-C, for all children too.
        command = (
            "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "from router.tools.cli import main; sys.exit(main())"
        )
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", command, "top", "--url", kvferry.url),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(theirs)
        screen = Screen(ours)
        await screen.shows(b"a/1")
        process.send_signal(signal.SIGINT)
        await screen.shows(b"\x1b[?1049l")
        assert await process.wait() == 0
        screen.close()

    assert b"Traceback" not in screen.seen
    assert screen.seen.count(b"\x1b[?1049h") == 1


class Screen:
    """The output of a program on its terminal."""

    def __init__(self, fd: int) -> None:
        self.seen = b""
        self._fd, self._news = fd, asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            self.seen += os.read(self._fd, 65536)
        except OSError:  # the last process at the other end is gone
            asyncio.get_running_loop().remove_reader(self._fd)
        self._news.set()

    async def shows(self, what: bytes) -> None:
        async with asyncio.timeout(30):
            while what not in self.seen:
                self._news.clear()
                await self._news.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


async def test_a_router_that_goes_away_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last picture stays, with the problem above it."""
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        running([("a", fake.url)], tmp_path) as kvferry,
        connected(kvferry.url) as client,
    ):
        drawn = await top.picture(client)

    def looks() -> Iterator[RenderableType | Exception]:
        yield CallError("no router answers")
        yield drawn
        yield KeyboardInterrupt()  # type: ignore[misc]

    script, screens = looks(), list[str]()
    shown = StringIO()
    console = Console(file=shown, force_terminal=True, width=80, height=24, color_system=None)

    async def look(*_: object) -> RenderableType:
        screens.append(shown.getvalue())
        shown.truncate(0)
        found = next(script)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(top, "picture", look)
    monkeypatch.setattr(top, "INTERVAL_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        await top._live(console, cast(RouterClient, None), drawn)

    assert ["trying again" in screen for screen in screens] == [False, True, False]
    assert all("a/1" in screen for screen in screens)
