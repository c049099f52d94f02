"""Fixtures for all tests: real llama-servers with tiny models, stopped at the end of each test."""

import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from hypothesis import settings

from router.base import tasks
from tests.support.servers.fake_llama import FakeLlama

if TYPE_CHECKING:
    from tests.support.servers.llama_server import LlamaServer

# No deadline: the time of an example depends on what else the machine does.
settings.register_profile("kvferry", deadline=None)
settings.load_profile("kvferry")

# Tests with one of these fixtures use a real llama-server.
REAL_FIXTURES = frozenset({"llama_server", "server_argv"})
# Starting takes 0.3 s on an idle machine; a server that needs a minute never starts.
START_TIMEOUT_S = 60.0

_homes = count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with a real server as `real`, so that `-m "not real"` is the fast half."""
    for item in items:
        if isinstance(item, pytest.Function) and REAL_FIXTURES & set(item.fixturenames):
            item.add_marker(pytest.mark.real)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the names of failed tests to the file of KVFERRY_FAILED_TESTS, for `tests/run`."""
    if path := os.environ.get("KVFERRY_FAILED_TESTS"):
        failed = [*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")]
        names = sorted({report.nodeid for report in failed})
        Path(path).write_text("".join(f"{name}\n" for name in names))


@pytest.fixture(autouse=True)
def _no_task_ends_by_a_bug(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test in which a background task, a loop or a request met an unexpected exception.

    A test that causes one on purpose takes the fixture `bugs`.
    """
    tasks.failures.clear()
    yield
    if "bugs" not in request.fixturenames:
        assert not tasks.failures


@pytest.fixture(autouse=True)
def _state_of_its_own(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let no router of a test see the purges of another one's, nor those of a person."""
    home = tmp_path_factory.getbasetemp() / f"state-{next(_homes)}"
    monkeypatch.setenv("XDG_STATE_HOME", str(home))


@pytest.fixture
def bugs() -> Counter[str]:
    """Return the unexpected exceptions of the test, by kind of task; allows them."""
    return tasks.failures


@pytest.fixture
async def fake(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[FakeLlama]:
    """Yield a fake server that is asked nothing wrong; a module's FAKE has options of it."""
    async with FakeLlama(**{"kv_dir": tmp_path} | getattr(request.module, "FAKE", {})) as server:
        yield server
        assert server.violations == []


@pytest.fixture(scope="session")
def server_argv() -> list[str]:
    """Return the command that starts a llama-server here.

    KVFERRY_TEST_FLAVOUR=prebuilt|binary forces the wheel or a true binary. Without the variable,
    the order of `find_server` decides.
    """
    from router.servers.program import find_server

    flavour = os.environ.get("KVFERRY_TEST_FLAVOUR", "")
    prebuilt = [sys.executable, "-m", "router.servers.prebuilt"]
    if flavour == "prebuilt":
        return prebuilt
    argv = find_server()
    if flavour == "binary" and argv == prebuilt:
        pytest.fail("KVFERRY_TEST_FLAVOUR=binary, but there is none; set LLAMA_SERVER_BIN")
    if flavour not in ("", "binary"):
        pytest.fail(f"KVFERRY_TEST_FLAVOUR={flavour}: neither prebuilt nor binary")
    return argv


class StartServer(Protocol):
    """The type of the `llama_server` fixture."""

    async def __call__(
        self,
        kind: str = "llama",
        *,
        seed: int = 0,
        slots: int | None = 2,
        ctx: int = 8192,
        kv_dir: Path | None = None,
        extra_args: Sequence[str] = (),
        plain_defaults: bool = False,
        threads: int = 1,
        port: int | None = None,
    ) -> "LlamaServer": ...


@pytest.fixture
async def llama_server(server_argv: list[str], tmp_path: Path) -> AsyncIterator[StartServer]:
    """Start real llama-servers: `server = await llama_server("gemma3", slots=2, ctx=8192)`.

    `ctx` is the total of all slots. All servers of a test save to the same directory,
    `tmp_path / "kv"`, unless `kv_dir` says otherwise.
    """
    # Half a second, which a pure test does not pay.
    from tests.support.models.tiny_models import tiny_model
    from tests.support.servers.llama_server import LlamaServer

    started: list[LlamaServer] = []

    async def start(
        kind: str = "llama",
        *,
        seed: int = 0,
        slots: int | None = 2,
        ctx: int = 8192,
        kv_dir: Path | None = None,
        extra_args: Sequence[str] = (),
        plain_defaults: bool = False,
        threads: int = 1,
        port: int | None = None,
    ) -> LlamaServer:
        server = LlamaServer(
            tiny_model(kind, seed).path,
            slots=slots,
            ctx=ctx,
            kv_dir=kv_dir if kv_dir is not None else tmp_path / "kv",
            extra_args=extra_args,
            argv=server_argv,
            log_path=tmp_path / f"server-{len(started)}.log",
            port=port,
            threads=threads,
            plain_defaults=plain_defaults,
            start_timeout_s=START_TIMEOUT_S,
        )
        started.append(server)
        await server.start()
        return server

    yield start
    for server in started:
        await server.stop()
