"""llama-swap's configuration as kvferry's: taken over, or said to be left."""

import pytest

from router.config.schema import Config, parse
from router.tools.cli import main
from router.tools.serving.llama_swap import ImportProblemError, imported

EXAMPLE = """
healthCheckTimeout: 300
logLevel: info
macros:
  latest: /opt/llama/llama-server --port ${PORT}
  fast: "${latest} -fa on"
models:
  "qwen/7b":
    cmd: |
      # the large one
      ${fast} \\
      -m /models/qwen.gguf -c 32768 -np 4 -ngl 99 --cache-ram 0
    aliases: [gpt-4o, "gpt-4o-mini"]
    env: ["CUDA_VISIBLE_DEVICES=0,1", "A=b=c"]
    ttl: 300
    filters: {strip_params: temperature}
  small:
    cmd: llama-server --host 0.0.0.0 --port=${PORT} --hf-repo user/small:Q4 --metrics
  whisper:
    proxy: http://127.0.0.1:${PORT}
    cmd: docker run --rm -p ${PORT}:8080 whisper
    cmdStop: docker stop whisper
groups:
  gpu:
    swap: true
    exclusive: false
    members: ["qwen/7b", small]
  always:
    persistent: true
    swap: false
    members: [whisper]
hooks: {on_startup: {preload: [small]}}
apiKeys: [x]
"""


def test_a_whole_file() -> None:
    text = imported(EXAMPLE)
    config = parse(text, "imported")
    qwen, small, whisper = config.servers.models
    assert (qwen.name, qwen.names) == ("qwen-7b", ("qwen-7b", "qwen/7b", "gpt-4o", "gpt-4o-mini"))
    assert (str(qwen.model), qwen.slots, qwen.ctx) == ("/models/qwen.gguf", 4, 8192)
    assert qwen.args == ("-fa", "on", "-ngl", "99")
    assert qwen.env == {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b=c"}
    assert (qwen.ttl_s, qwen.start_timeout_s, qwen.group) == (300.0, 300.0, "gpu")
    assert (small.hf, small.preload, small.args) == ("user/small:Q4", True, ())
    assert whisper.command == ("docker", "run", "--rm", "-p", "${port}:8080", "whisper")
    assert whisper.keep
    assert {group.name: group.loaded for group in config.servers.groups} == {"gpu": 1, "always": 1}
    for left in ("qwen/7b: filters", "whisper: cmdStop", "small: no -c", "apiKeys (top level)"):
        assert f"{left}" in text
    assert "whisper: the program is not llama-server" in text


def test_without_groups_one_model_is_loaded_at_a_time() -> None:
    config: Config = parse(imported("models: {a: {cmd: 'llama-server -m /a.gguf -c 9'}}"), "x")
    assert config.servers.loaded == 1


@pytest.mark.parametrize("text", ["[", "a: 1", "models: [1]", ""])
def test_no_llama_swap_file(text: str) -> None:
    with pytest.raises(ImportProblemError):
        imported(text)


def test_the_command(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path_factory.mktemp("swap") / "config.yaml"
    path.write_text(EXAMPLE)
    assert main(["import", "llama-swap", str(path)]) == 0
    assert capsys.readouterr().out == imported(EXAMPLE)
    path.write_text("a: 1")
    assert main(["import", "llama-swap", str(path)]) == 2
    assert "it has no `models`" in capsys.readouterr().err
