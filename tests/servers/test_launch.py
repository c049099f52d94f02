"""Command lines of servers on demand."""

import socket as socketlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from router.base.errors import RouterError
from router.config.servers import ServersConfig
from router.servers.launch import Launch, ignored_settings, launches_of, state_dir
from router.servers.program import PREBUILT, ServerNotFoundError


def launches(*models: dict[str, Any], **more: Any) -> list[Launch]:
    config = ServersConfig.model_validate({"models": list(models)} | more)
    return launches_of(config, Path("/kv"))


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "llama-server"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("LLAMA_SERVER_BIN", str(path))
    return str(path)


def test_flags_that_kvferry_needs(program: str) -> None:
    (one,) = launches({"name": "a", "model": "/m.gguf", "slots": 3, "ctx": 1000, "args": ["-fa"]})
    line = " ".join(one.command(4321))
    assert line.startswith(f"{program} -m /m.gguf -a a --host 127.0.0.1 --port 4321 -np 3 -c 3000")
    assert "--cache-ram 0 --ctx-checkpoints 4 --slot-save-path /kv -fa" in line  # ADR 44


def test_a_reference_replicas_and_an_environment(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "1")
    found = launches({"name": "a", "hf": "u/r:Q4", "replicas": 2, "env": {"CUDA": "0"}})
    assert [one.name for one in found] == ["a-1", "a-2"]
    assert found[0].command(1)[1:3] == ["-hf", "u/r:Q4"]
    assert (found[0].env["CUDA"], found[0].env["KEPT"]) == ("0", "1")


def test_a_command_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a llama-server on this machine, as the container has its own."""
    monkeypatch.setenv("LLAMA_SERVER_BIN", "/no/such")
    command = ["podman", "-p", "${port}:80", "-v", "${kv_dir}:/kv"]
    (one,) = launches({"name": "a", "command": command})
    assert one.command(7) == ["podman", "-p", "7:80", "-v", "/kv:/kv"]
    with pytest.raises(ServerNotFoundError):
        launches({"name": "a", "command": command}, {"name": "b", "model": "/m.gguf"})


def test_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert state_dir() == Path("/state/kvferry")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert state_dir() == Path("/home/x/.local/state/kvferry")


def test_the_wheel_fetches_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = ["python", "-m", PREBUILT]
    monkeypatch.setattr("router.servers.launch.find_server", lambda explicit: prebuilt)
    assert launches({"name": "a", "model": "/m.gguf"})[0].argv[:3] == tuple(prebuilt)
    with pytest.raises(ServerNotFoundError, match="a: hf: the prebuilt llama-server"):
        launches({"name": "a", "hf": "user/repository"})


def test_the_secrets_of_kvferry_are_its_own(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADMIN", "secret")
    config = ServersConfig.model_validate({"models": [{"name": "a", "model": "/m.gguf"}]})
    (one,) = launches_of(config, Path("/kv"), {"ADMIN"})
    assert "ADMIN" not in one.env
    assert one.env["LLAMA_API_KEY"] == one.api_key


@pytest.mark.parametrize(
    ("more", "given"),
    [
        ({"model": "/m.gguf"}, {"PATH_X", "MONKEY", "TOKENIZERS_PARALLELISM"}),
        ({"hf": "a/b"}, {"PATH_X", "MONKEY", "TOKENIZERS_PARALLELISM", "HF_TOKEN"}),
        ({"model": "/m.gguf", "env": {"AWS_KEY": "x"}}, {"PATH_X", "MONKEY", "AWS_KEY"}),
        (
            {"command": ["docker", "run", "${port}"]},
            {"PATH_X", "HF_TOKEN", "PGPASSWORD", "AWS_KEY"},
        ),
    ],
)
def test_the_secrets_of_others_are_theirs(
    program: str, monkeypatch: pytest.MonkeyPatch, more: dict[str, object], given: set[str]
) -> None:
    secrets = ("HF_TOKEN", "PGPASSWORD", "AWS_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "aws_secret_x")
    harmless = ("PATH_X", "MONKEY", "TOKENIZERS_PARALLELISM")
    for name in (*secrets, *harmless):
        monkeypatch.setenv(name, "x")
    (one,) = launches({"name": "a"} | more)
    assert given <= set(one.env)
    if "command" not in more:
        assert set(secrets) & set(one.env) <= given


def test_a_key_of_ones_own(program: str) -> None:
    (one,) = launches({"name": "a", "model": "/m.gguf", "env": {"LLAMA_API_KEY": "mine"}})
    assert one.env["LLAMA_API_KEY"] == one.api_key == "mine"


def test_equal_servers_of_two_runs_have_one_identity(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key and the socket are new in each run; other variables belong to the terminal."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    model = {"name": "a", "model": str(tmp_path / "m.gguf"), "args": ["-fa", "on"]}
    (tmp_path / "m.gguf").write_bytes(b"one")
    (before,) = launches(model, sockets=True)
    first = before.identity()
    monkeypatch.setenv("TERM_SESSION_ID", "2")
    socket = tmp_path / "kvferry" / "run" / "a.sock"
    socket.parent.mkdir(parents=True)
    with closing(socketlib.socket(socketlib.AF_UNIX)) as bound:
        bound.bind(str(socket))
        (again,) = launches(model, sockets=True)

        assert before.api_key != again.api_key
        assert again.identity() == first
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    (variable,) = launches(model, sockets=True)
    (tmp_path / "m.gguf").write_bytes(b"two")
    assert len({first, variable.identity(), again.identity()}) == 3


@pytest.mark.parametrize(
    "args",
    [["--lora", "{0}"], ["--lora", "x.gguf,{0}"], ["--lora-scaled", "{0}:0.5"], ["-mm", "{0}"]],
)
def test_a_file_that_is_replaced_makes_another_server(
    program: str, tmp_path: Path, args: list[str]
) -> None:
    beside = tmp_path / "beside.gguf"
    beside.write_bytes(b"one")
    args = [word.format(beside) for word in args]
    (launch,) = launches({"name": "a", "model": "/m.gguf", "args": args})
    first = launch.identity()
    beside.write_bytes(b"another")
    assert launch.identity().digest != first.digest


def test_a_file_that_a_variable_names_counts(program: str, tmp_path: Path) -> None:
    beside = tmp_path / "beside.gguf"
    beside.write_bytes(b"one")
    env = {"LLAMA_ARG_MMPROJ": str(beside)}
    (launch,) = launches({"name": "a", "model": "/m.gguf", "env": env})
    first = launch.identity()
    beside.write_bytes(b"another")
    assert launch.identity().digest != first.digest
    assert launch.identity().settings.projector != first.settings.projector


def test_replicas_differ_by_number_and_by_variable(program: str) -> None:
    env = {"CUDA_VISIBLE_DEVICES": "${replica}", "NODE": ["left", "right"]}
    args = ["--device", "CUDA${replica}"]
    found = launches({"name": "a", "model": "/m.gguf", "replicas": 2, "env": env, "args": args})
    told = [(one.env["CUDA_VISIBLE_DEVICES"], one.env["NODE"], one.argv[-1]) for one in found]
    assert told == [("0", "left", "CUDA0"), ("1", "right", "CUDA1")]


def test_a_program_of_its_own_has_words_before_it(program: str) -> None:
    (one,) = launches({"name": "a", "model": "/m.gguf", "llama_server": ["nice", "-n5", program]})
    assert one.argv[:4] == ("nice", "-n5", program, "-m")
    with pytest.raises(ServerNotFoundError, match="llama_server is not a program: /no/such"):
        launches({"name": "a", "model": "/m.gguf", "llama_server": "/no/such"})


def test_slots_of_one_pool_share_the_context(program: str) -> None:
    (one,) = launches({"name": "a", "model": "/m.gguf", "kv_unified": True, "ctx": 0})
    line = " ".join(one.argv)
    assert "-np 4 -c 0 --kv-unified " in line


def test_settings_of_another_server_are_not_inherited(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "")  # an empty one ends a llama-server
    monkeypatch.setenv("LLAMA_CACHE", "/models")
    for what in ({"model": "/m.gguf"}, {"command": ["docker", "${port}"]}):
        (one,) = launches({"name": "a", "env": {"LLAMA_ARG_N_CPU_MOE": "1"}} | what)
        assert "LLAMA_ARG_CTX_SIZE" not in one.env
        assert (one.env["LLAMA_CACHE"], one.env["LLAMA_ARG_N_CPU_MOE"]) == ("/models", "1")
    assert ignored_settings() == ["LLAMA_ARG_CTX_SIZE"]


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(RouterError, match="set XDG_STATE_HOME"):
        state_dir()
