"""The command line as a person meets it: exit codes, messages, and a router as a process."""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router import __version__
from router.config.schema import Config, load
from router.tools import cli
from router.tools.cli import main
from tests.conftest import StartServer
from tests.support.paths import ROOT

UNUSED_URL = "http://127.0.0.1:9"
# Seconds to wait for the end of a program that was told to end or was killed.
END_S = 60.0
Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    """Run the command line and return its exit code; argparse raises SystemExit."""
    try:
        return main(arguments)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else -1


def test_version(capsys: Capture) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"kvferry {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["sreve"], ["serve", "--nonsense"], ["check"]])
def test_wrong_usage(arguments: list[str], capsys: Capture) -> None:
    assert run(*arguments) == 2

    err = capsys.readouterr().err
    assert err.startswith("usage: kvferry")
    assert "Traceback" not in err


def test_an_unknown_flag_shows_the_flags_of_its_command(capsys: Capture) -> None:
    assert run("usage", "--hours", "3") == 2
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: kvferry usage [-h] [--days N]")
    assert error == "kvferry usage: error: unrecognized arguments: --hours 3"


# --- check ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [[], ["--config"]])
def test_check_good(option: list[str], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(f"backends: [{{url: '{UNUSED_URL}', kv_dir: /kv}}]\n")

    assert run("check", *option, str(file)) == 0

    printed = capsys.readouterr()
    assert printed.out.startswith("OK: ")
    assert printed.err == ""


def test_check_bad(tmp_path: Path, capsys: Capture) -> None:
    """Every problem is reported at once, with file, line and key."""
    file = tmp_path / "bad.yaml"
    file.write_text("backends:\n  - url: nonsense\npolicy: best\n")

    assert run("check", str(file)) == 2

    printed = capsys.readouterr()
    assert printed.out == ""
    assert "bad.yaml" in printed.err
    assert "url" in printed.err
    assert "policy" in printed.err


def test_check_missing_file(tmp_path: Path, capsys: Capture) -> None:
    assert run("check", str(tmp_path / "none.yaml")) == 2
    assert "none.yaml" in capsys.readouterr().err


def test_check_needs_what_serve_needs(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is an error with its line.

    A missing variable is a warning: perhaps only the router's environment has it.
    """
    monkeypatch.delenv("KVFERRY_TEST_A", raising=False)
    file = tmp_path / "file.yaml"
    file.write_text(f"backends:\n  - url: {UNUSED_URL}\n    api_key_env: KVFERRY_TEST_A\n")
    assert run("check", str(file)) == 0
    said = "Warning: backends[0].api_key_env names KVFERRY_TEST_A, which is not set"
    assert said in capsys.readouterr().out

    with file.open("a") as more:
        more.write("tokenizer: {mode: local, path: /nowhere/x.gguf}\n")
    assert run("check", str(file)) == 0
    said = "Warning: tokenizer.path /nowhere/x.gguf is not used: cannot be read: No such file"
    assert said in capsys.readouterr().out

    monkeypatch.setitem(sys.modules, "router.telemetry.tracing", None)
    with file.open("a") as more:
        more.write("tracing:\n  endpoint: http://127.0.0.1:4318\n")
    assert run("check", str(file)) == 2
    assert f"{file}:6: tracing.endpoint: needs `pip install" in capsys.readouterr().err


# --- serve and doctor: bad input ------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "doctor"])
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--backend"),
        (["--backend", "nonsense"], "--backend"),
        (["--backend", UNUSED_URL, "--listen", "nowhere"], "--listen"),
        (["--backend", UNUSED_URL, "--policy", "best"], "--policy"),
        (["--backend", UNUSED_URL, "--backend", UNUSED_URL], "--backend (number 2)"),
        (["--backend", "http://127.0.0.1:8080"], "where kvferry itself listens"),
    ],
)
def test_bad_flags(command: str, flags: list[str], named: str, capsys: Capture) -> None:
    assert run(command, *flags) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "listen"),
    [(":9000", "0.0.0.0:9000"), ("9000", "127.0.0.1:9000"), ("[::1]:9000", "[::1]:9000")],
)
def test_what_people_type_first(
    given: str, listen: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Config] = []

    async def serve(config: Config, *_: object) -> None:
        served.append(config)

    monkeypatch.setattr(cli, "serve", serve)
    monkeypatch.setattr(cli, "set_up_logging", lambda _: None)
    monkeypatch.chdir(tmp_path)
    flags = ("--model", "x.gguf", "--kv-dir", "kv", "--listen", given, "--server-args", "--jinja")
    assert run("serve", *flags) == 0
    assert str(served[0].listen) == listen
    assert str(served[0].servers.kv_dir) == str(tmp_path / "kv")
    assert served[0].servers.models[0].args == ("--jinja",)


def test_a_flag_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in each neighbour; a reload reads the file again, and the flags still win."""
    file = tmp_path / "good.yaml"
    file.write_text(
        f"listen: 127.0.0.1:1\npolicy: {{name: sticky, max_wait: 3s}}\n"
        f"backends: [{{url: '{UNUSED_URL}'}}]\nservers: {{models: [{{name: m, model: /m}}]}}\n"
    )
    served: list[tuple[Config, Mapping[str, object]]] = []

    async def serve(config: Config, path: Path, flags: Mapping[str, object]) -> None:
        served.append((config, flags))

    monkeypatch.setattr(cli, "serve", serve)
    monkeypatch.setattr(cli, "set_up_logging", lambda _: None)  # it is for the whole process
    flags = [
        "--listen",
        "127.0.0.1:2",
        "--policy",
        "round_robin",
        "--kv-dir",
        "/kv",
        "--loaded",
        "1",
    ]
    assert run("serve", "--config", str(file), *flags) == 0
    ((config, over),) = served
    assert (config.listen.port, config.policy.name) == (2, "round_robin")
    assert {str(config.backends[0].kv_dir), str(config.servers.kv_dir)} == {"/kv"}
    assert config.servers.loaded == 1
    assert load(file, over) == config


def test_a_wrong_flag_beside_a_file_is_named(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(f"backends: [{{url: '{UNUSED_URL}'}}]\n")
    assert run("serve", "--config", str(file), "--listen", "nowhere") == 2
    assert "--listen: must be" in capsys.readouterr().err


def test_doctor_without_a_backend_that_answers(capsys: Capture) -> None:
    assert run("doctor", "--backend", UNUSED_URL) == 1
    assert "no process listens on this host and port" in capsys.readouterr().out


# --- serve as a process ---------------------------------------------------------------------------


class Process:
    """`kvferry serve` with its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.log: list[str] = []

    async def event(self, name: str) -> dict[str, Any]:
        """Return the next log line with this event."""
        assert self._process.stderr is not None
        while line := (await self._process.stderr.readline()).decode():
            self.log.append(line)
            if line.startswith("{") and json.loads(line)["event"] == name:
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"no {name} in {''.join(self.log)}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def end(self, number: signal.Signals | None = None) -> int:
        """Send `number`, if any; return the exit code, or fail with the log on timeout."""
        if number is not None:
            self.send(number)
        try:
            async with asyncio.timeout(END_S):
                _, err = await self._process.communicate()
        except TimeoutError:
            self.kill()
            _, err = await self._process.communicate()
            raise AssertionError(f"it lived on: {''.join(self.log)}{err.decode()}") from None
        self.log.append(err.decode())
        assert self._process.returncode is not None
        return self._process.returncode

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def starting(*argv: str, **environment: str) -> AsyncIterator[Process]:
    """Start a program that logs as `kvferry serve` does; kill it at the end if it still runs."""
    made = Process(
        await asyncio.create_subprocess_exec(
            *argv,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | environment,
        )
    )
    try:
        yield made
    finally:
        made.kill()
        await made.end()


@asynccontextmanager
async def serving(*flags: str, **environment: str) -> AsyncIterator[Process]:
    command = "import sys; from router.tools.cli import main; sys.exit(main())"
    async with starting(sys.executable, "-c", command, "serve", *flags, **environment) as made:
        yield made


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_serve(llama_server: StartServer, tmp_path: Path, number: signal.Signals) -> None:
    """The router starts, serves, reports that it is healthy, and ends well."""
    server = await llama_server()
    kv_dir = str(tmp_path / "kv")
    flags = ("--backend", server.url, "--kv-dir", kv_dir, "--listen", "127.0.0.1:0")
    async with serving(*flags) as process, aiohttp.ClientSession() as session:
        url = (await process.event("listening"))["url"]
        await process.event("backend_up")
        async with session.get(f"{url}/kvferry/health") as response:
            assert response.status == 200
            assert (await response.json())["status"] == "ok"
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["x-kvferry-source"] == "cold"

        assert await process.end(number) == 0
        assert "Traceback" not in "".join(process.log)


async def test_serve_without_a_backend_that_answers(tmp_path: Path) -> None:
    """The router starts all the same: the backend may come later."""
    async with (
        serving("--backend", UNUSED_URL, "--listen", "127.0.0.1:0") as process,
        aiohttp.ClientSession() as session,
    ):
        url = (await process.event("listening"))["url"]
        async with session.get(f"{url}/kvferry/health") as response:
            assert response.status == 503

        assert await process.end(signal.SIGTERM) == 0


async def test_more_clients_than_a_shell_allows_open_files() -> None:
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
    try:
        serve = serving("--backend", UNUSED_URL, "--listen", "127.0.0.1:0")
        process = await serve.__aenter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    async with AsyncExitStack() as stack:
        stack.push_async_exit(serve)
        url = (await process.event("listening"))["url"]
        host, port = url.removeprefix("http://").split(":")
        for _ in range(100):
            _, writer = await asyncio.open_connection(host, port)
            stack.callback(writer.close)
        async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
            metrics = await response.text()
        (fds,) = re.findall(r"^process_open_fds (\S+)", metrics, re.M)
        assert float(fds) > 100


async def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serving("--backend", UNUSED_URL, "--listen", f"127.0.0.1:{port}") as process:
            assert await process.end() == 1
            assert str(port) in process.log[-1]
            assert "kvferry: listen (--listen): " in process.log[-1]
            assert "in use" in process.log[-1]
            assert "Traceback" not in process.log[-1]


async def test_kv_dir_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kv_dir = str(tmp_path / "file" / "kv")
    flags = ("--backend", UNUSED_URL, "--kv-dir", kv_dir, "--listen", "127.0.0.1:0")
    async with serving(*flags) as process:
        assert await process.end() == 1
        assert kv_dir in process.log[-1]
        assert "Traceback" not in process.log[-1]


async def test_key_that_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "key.yaml"
    file.write_text(f"backends: [{{url: '{UNUSED_URL}', api_key_env: KVFERRY_NO_SUCH_KEY}}]\n")
    async with serving("--config", str(file)) as process:
        assert await process.end() == 1
        assert "KVFERRY_NO_SUCH_KEY" in process.log[-1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ser"], {"serve", "servers"}),
        (["serve", "--pol"], {"--policy"}),
        (["snapshots", ""], {"list", "show", "purge"}),
        (["check", "kvferry.exam"], {"kvferry.example.yaml"}),
    ],
)
def test_bash_completes_commands_options_and_files(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: set[str]
) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    line = " ".join(f"'{word}'" for word in ["kvferry", *words])
    script += f"COMP_WORDS=({line}); COMP_CWORD={len(words)}\n"
    script += '_shtab_kvferry; printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(
        ["bash"], input=script, capture_output=True, text=True, cwd=ROOT / "config", check=True
    )

    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("-m x.gguf --port=8080", "instead of -m: --model FILE; instead of --port: --listen"),
        ("-hf a/b:Q4", "instead of -hf: --model hf:"),  # not the help, which `-h` asks for
        ("--model x.gguf --host 0.0.0.0", "instead of --host: --listen"),  # not `--host-name`
        ("--model x.gguf -ngl 99 --jinja", "--server-args '-ngl 99 --jinja'"),
        ("x.gguf", "instead of x.gguf: --model x.gguf"),
        ("--model x.gguf --pol sticky", "--pol sticky"),  # a part of a flag is none
    ],
)
def test_who_types_flags_of_llama_server_is_told(typed: str, told: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *typed.split()])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
