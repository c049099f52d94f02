"""The flags of `kvferry serve` for servers on demand."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from router.assembly.backends import StartError
from router.config import schema
from router.config.loader import ConfigError
from router.config.schema import Config
from router.tools.cli import main
from router.tools.serving.flags import add_server_options, servers_from


def parsed(*words: str, backends: tuple[str, ...] = ()) -> Config:
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return schema.from_flags([*backends], servers=servers_from(parser.parse_args([*words])))


@pytest.mark.parametrize(
    ("given", "name", "key", "value"),
    [
        ("/m/chat-8b.gguf", "chat-8b", "model", Path("/m/chat-8b.gguf")),
        ("chat=/m/x.gguf", "chat", "model", Path("/m/x.gguf")),
        ("x.gguf", "x", "model", Path.cwd() / "x.gguf"),
        ("~/x.gguf", "x", "model", Path.home() / "x.gguf"),
        ("chat=~/x.gguf", "chat", "model", Path.home() / "x.gguf"),
        ("/m/a=b.gguf", "a-b", "model", Path("/m/a=b.gguf")),
        ("a b=/m/x.gguf", "a-b", "model", Path("/m/x.gguf")),
        ("hf:user/Repo-GGUF:Q4_K_M", "Repo-GGUF-Q4_K_M", "hf", "user/Repo-GGUF:Q4_K_M"),
        ("code=hf:user/repo", "code", "hf", "user/repo"),
    ],
)
def test_a_model(given: str, name: str, key: str, value: Any) -> None:
    (found,) = parsed("--model", given).servers.models
    assert (found.name, getattr(found, key)) == (name, value)


def test_a_name_that_no_backend_can_have_is_another_name_of_it() -> None:
    (found,) = parsed("--model", "org/name:q4=/m/x.gguf").servers.models
    assert found.names == ("org-name-q4", "org/name:q4")


def test_all_flags() -> None:
    config = parsed(
        *("--model", "a=/a.gguf", "--model", "b=/b.gguf", "--loaded", "1", "--slots", "2"),
        *("--ctx", "100", "--server-args", "-ngl 99 --chat-template 'a b'"),
        *("--llama-server", "/bin/llama-server"),
        backends=("http://127.0.0.1:9",),
    )
    servers = config.servers
    assert [model.name for model in servers.models] == ["a", "b"]
    assert (servers.loaded, str(servers.llama_server)) == (1, "/bin/llama-server")
    assert servers.models[1].args == ("-ngl", "99", "--chat-template", "a b")
    assert (servers.models[0].slots, servers.models[0].ctx) == (2, 100)
    assert len(config.backends) == 1


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--model", "a=/a.gguf", "--loaded", "0"], "--loaded"),
        (["--model", "a=/a.gguf", "--slots", "0"], "--slots"),
        (["--model", "a=/a.gguf", "--ctx", "-1"], "--ctx"),
        (["--model", "a=/a.gguf", "--model", "a=/b.gguf"], "--model"),
        (["--model", "hf:nonsense"], "--model"),
    ],
)
def test_a_mistake_names_its_flag(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(*words)
    assert {problem.path for problem in caught.value.problems} == {flag}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--loaded", "1", "--slots", "2"], "--loaded, --slots: say which model is meant"),
        (["--model", "a.gguf", "--server-args", "'"], "--server-args: No closing quotation"),
        (["--model", "=a.gguf"], "must be FILE, NAME=FILE or hf:"),
        (["--model", "a="], "must be FILE, NAME=FILE or hf:"),
        (["--model", "hf.co/u/r-GGUF:Q4"], "is written hf:u/r-GGUF:Q4$"),
        (["--model", "qwen3:8b"], "is written hf:USER/REPOSITORY:QUANT"),
        (["--model", "/"], "is a directory: `kvferry import /`"),
    ],
)
def test_flags_that_mean_nothing(words: list[str], told: str) -> None:
    with pytest.raises(StartError, match=told):
        parsed(*words)


def test_a_program_on_the_path(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path_factory.mktemp("bin") / "my-server"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    found = parsed("--model", "a.gguf", "--llama-server", "my-server").servers.llama_server
    assert found == program


def test_flags_beside_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", "x.yaml", "--model", "a.gguf", "--loaded", "1"]) == 1
    assert "--model: not together with --config" in capsys.readouterr().err


def test_one_server_on_each_gpu() -> None:
    (model,) = parsed("--model", "a.gguf", "--gpus", "2").servers.models
    assert (model.replicas, model.servers) == (2, ("a-1", "a-2"))
    assert model.env["CUDA_VISIBLE_DEVICES"] == "${replica}"
