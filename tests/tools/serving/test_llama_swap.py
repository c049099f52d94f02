"""llama-swap's configuration as kvferry's: taken over, or said to be left."""

import pytest
import yaml

from router.assembly.part_settings import filters_of
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
      -m /models/qwen.gguf -c 32768 -np 4 -ngl 99 --cache-ram 0 --api-key secret
    aliases: [gpt-4o, "gpt-4o-mini"]
    env: ["CUDA_VISIBLE_DEVICES=0,1", "A=b=c"]
    ttl: 300
    filters:
      stripParams: "temperature, top_p,"
      setParams: {seed: 3, model: x}
      setParamsByID: {"${MODEL_ID}:high": {reasoning_effort: high}, "qwen/7b": {a: 1}}
      unknown: 1
  small:
    cmd: ${latest} --host 0.0.0.0 --port=${PORT} --hf-repo user/small:Q4 --metrics
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
    assert str(config.servers.llama_server) == "/opt/llama/llama-server"
    for left in (
        *("qwen/7b: filters: unknown", "qwen/7b: filters: model, which no filter changes"),
        *(
            "filters: setParamsByID: qwen/7b: it is the model's own name",
            "whisper: cmdStop",
            "whisper: proxy",
            "small: no -c",
        ),
        *("small: no -np", "qwen/7b: --api-key", "apiKeys (top level)"),
    ):
        assert left in text
    assert "whisper: the program is not llama-server" in text
    plain, high = config.filters
    assert (plain.name, plain.strip, plain.set) == (
        "qwen/7b",
        ("temperature", "top_p"),
        {"seed": 3},
    )
    assert (high.name, high.model) == ("qwen/7b:high", "qwen/7b")
    assert high.set == {"seed": 3, "reasoning_effort": "high"}
    assert {"gpt-4o", "qwen/7b", "qwen/7b:high"} <= filters_of(config).keys()


def test_without_groups_one_model_is_loaded_at_a_time() -> None:
    config: Config = parse(imported("models: {a: {cmd: 'llama-server -m /a.gguf -c 9'}}"), "x")
    assert config.servers.loaded == 1


LIKE_LLAMA_SWAP = """
models:
  kept: {cmd: llama-server -m /a.gguf -c 10 -np 20, ttl: -1}
  swapped: {cmd: 'llama-server --model-url x --chat-template "${MODEL_ID}-${env.X}"'}
  alone: {cmd: /else/llama-server -m rel.gguf -c 9, ttl: 60}
  also: {cmd: llama-server -m /d.gguf, aliases: }
groups:
  a: {persistent: true, swap: true, members: [kept, swapped]}
  others: {persistent: true, swap: false, members: [alone]}
  gone: {members: }
hooks:
"""


def test_models_without_a_group_and_what_cannot_be_filled_in() -> None:
    text = imported(LIKE_LLAMA_SWAP)
    document = yaml.safe_load(text)["servers"]
    kept, swapped, alone, also = document["models"]
    assert "keep" not in kept  # it is unloaded for `swapped`
    assert "keep" not in alone  # its ttl unloads it
    assert (kept["ctx"], "ttl" in kept) == (1, False)
    assert swapped["args"] == ["--model-url", "x", "--chat-template", "swapped-${env.X}"]
    assert also["group"] == "others-1"
    assert document["groups"][-1] == {"name": "others-1", "loaded": 1}
    assert "llama_server" not in document
    for left in (
        *("swapped: ${env.X} is not filled in", "swapped: no -m and no -hf"),
        *("alone: its program, /else/llama-server", "alone: the file of -m is not absolute"),
        "groups: gone: none of its members",
    ):
        assert left in text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[", "not YAML"),
        ("a: 1", "no `models`"),
        ("models: [1]", "no `models`"),
        ("", "no `models`"),
        ("models: {a: }", "models.a"),
        ("models: {a: {}}", "models.a.cmd"),
        ("models: {a: {cmd: ''}}", "models.a.cmd"),
        ('models: {a: {cmd: "llama-server \'x"}}', "models.a.cmd: No closing"),
        ("models: {a: {cmd: llama-server -m /a -c many}}", "-c has no number: 'many'"),
        ("models: {a: {cmd: x}}\ngroups: [a]", "groups"),
        ("models: {a: {cmd: x}}\ngroups: {g: {members: 3}}", "groups.g.members"),
    ],
)
def test_no_llama_swap_file(text: str, told: str) -> None:
    with pytest.raises(ImportProblemError) as problem:
        imported(text)
    assert told in str(problem.value)


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
    path.write_bytes(b"\xff")
    assert main(["import", "llama-swap", str(path)]) == 2
    assert f"{path}: it is not UTF-8" in capsys.readouterr().err
    assert main(["import", "llama-swap", str(path.parent / "none.yaml")]) == 2
    assert "none.yaml: No such file" in capsys.readouterr().err
