"""What is made of other people's files: taken over, or said to be left."""

import re
from pathlib import Path

import pytest
import yaml

from router.assembly.part_settings import filters_of
from router.base.api_keys import hash_text
from router.config.schema import Config, parse
from router.servers.program import find_server
from router.tools.cli import main
from router.tools.serving.commands import UntranslatableError
from router.tools.serving.entries import Imported, ImportProblemError
from router.tools.serving.imports import imported
from router.tools.serving.variables import calculated, expanded, read_file


def made_of(tmp_path: Path, text: str, name: str = "config.yaml") -> Imported:
    path = tmp_path / name
    path.write_text(text)
    return imported(path)


def config_of(tmp_path: Path, text: str, name: str = "config.yaml") -> Config:
    return parse(made_of(tmp_path, text, name).text, "imported")


GROUPS = """
healthCheckTimeout: 300
globalTTL: 60
models:
  "qwen/7b":
    cmd: llama-server --port ${PORT} -m /models/qwen.gguf -c 32768 -np 4 -ngl 99 --api-key secret
    aliases: [gpt-4o]
    env: ["CUDA_VISIBLE_DEVICES=0,1", "A=b=c"]
    ttl: 0
    filters:
      stripParams: "temperature, top_p,"
      setParams: {seed: 3, model: x}
      setParamsByID: {"${MODEL_ID}:high": {reasoning_effort: high}}
  small: {cmd: 'llama-server --port ${PORT} --hf-repo user/small:Q4 -c 4096'}
  always: {cmd: 'llama-server --port ${PORT} -m /models/always.gguf -np 1 -c 0', ttl: 0}
groups:
  gpu: {swap: true, exclusive: false, members: ["qwen/7b", small]}
  kept: {persistent: true, swap: false, members: [always]}
hooks: {on_startup: {preload: [small, "qwen/7b"]}}
apiKeys: [x]
"""


def test_a_whole_file_of_llama_swap(tmp_path: Path) -> None:
    config = config_of(tmp_path, GROUPS)
    qwen, small, always = config.servers.models
    assert (qwen.name, qwen.names) == ("qwen-7b", ("qwen-7b", "qwen/7b", "gpt-4o"))
    assert (str(qwen.model), qwen.slots, qwen.ctx) == ("/models/qwen.gguf", 4, 8192)
    assert (qwen.ttl_s, qwen.start_timeout_s, qwen.group) == (None, 300.0, "gpu")
    assert qwen.env == {"CUDA_VISIBLE_DEVICES": "0,1", "A": "b=c"}
    assert (small.hf, small.kv_unified, small.ctx, small.ttl_s) == ("user/small:Q4", True, 4096, 60)
    assert (always.keep, always.ctx, always.slots) == (True, 0, 1)
    # Two models of a group that loads one: the second is loaded by a request.
    assert (qwen.preload, small.preload) == (True, False)
    assert {group.name: group.loaded for group in config.servers.groups} == {"gpu": 1, "kept": 1}
    plain, high = config.filters
    assert (plain.strip, plain.set) == (("temperature", "top_p"), {"seed": 3})
    assert (high.name, high.model, high.set["reasoning_effort"]) == (
        "qwen/7b:high",
        "qwen-7b",
        "high",
    )
    assert {"gpt-4o", "qwen/7b", "qwen/7b:high"} <= filters_of(config).keys()
    assert [key.tenant for key in config.auth.keys] == ["all", "all"]  # its own, and the command's


def test_what_is_changed_is_said(tmp_path: Path) -> None:
    made = made_of(tmp_path, GROUPS)
    for told in (
        "qwen/7b: --api-key is left out: it lets clients into kvferry (`auth: keys`)",
        "qwen/7b: setParams: model is left out: no filter changes it",
        "qwen/7b: 4 slots, 8192 tokens each",
        "small: 4 slots, 4096 tokens that all slots share, as before",
        "small: it is not loaded at the start: at most 1 are loaded at a time",
    ):
        assert any(told in note for note in made.notes), (told, made.notes)
        assert f"# - {told}" in made.text


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ("-c 8192 -np 4 -kvu", {"slots": 4, "ctx": 8192, "kv_unified": True}),
        ("-c 8192 -np 4", {"slots": 4, "ctx": 2048}),
        ("-c 8192", {"slots": 4, "ctx": 8192, "kv_unified": True}),
        ("-np 2", {"slots": 2, "ctx": 0, "kv_unified": True}),
        ("-c 0 -np 1", {"slots": 1, "ctx": 0}),
    ],
)
def test_one_prompt_has_as_much_room_as_before(
    tmp_path: Path, flags: str, keys: dict[str, object]
) -> None:
    made = made_of(tmp_path, f"models: {{a: {{cmd: 'llama-server -m /a.gguf {flags}'}}}}")
    (model,) = yaml.safe_load(made.text)["servers"]["models"]
    assert {k: v for k, v in model.items() if k in ("slots", "ctx", "kv_unified")} == keys


def test_names_that_differ_in_marks_are_told_apart(tmp_path: Path) -> None:
    command = "{cmd: 'llama-server -m /a.gguf -c 9 -np 1'}"
    text = f"models: {{'a:b': {command}, 'a/b': {command}, 'a-b': {command}}}"
    models = config_of(tmp_path, text).servers.models
    assert [one.names for one in models] == [("a-b-2", "a:b"), ("a-b-3", "a/b"), ("a-b",)]


def test_a_flag_that_took_no_value_once_swallows_none(tmp_path: Path) -> None:
    (model,) = config_of(
        tmp_path, "llama-server -m /a.gguf -c 9 -np 1 -fa -ngl 9", "a.sh"
    ).servers.models
    assert model.args == ("-fa", "on", "-ngl", "9")


PRESETS = """version = 1
[*]
flash-attn = true
reasoning = false
n-gpu-layers = 9
[user/big:Q4]
ctx-size = 8192
parallel = 2
no-kv-offload = true
made-up = 1
[named]
LLAMA_ARG_MODEL = /m.gguf
np = 1
c = 100
alias = one, two
load-on-startup = on
"""


def test_presets_of_router_mode(tmp_path: Path) -> None:
    made = made_of(tmp_path, PRESETS, "models.ini")
    config = parse(made.text, "imported")
    big, named = config.servers.models
    assert (config.servers.loaded, big.hf, big.ctx) == (4, "user/big:Q4", 4096)
    assert {"--no-kv-offload", "--flash-attn", "on", "--reasoning", "off"} <= set(big.args)
    assert (named.names, str(named.model)) == (("named", "one", "two"), "/m.gguf")
    assert named.preload
    assert "user/big:Q4: made-up is left out: it is no flag of llama-server" in made.notes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("models: {a: {cmd: '${x}/llama-server -m /a'}}", "${x} is no macro"),
        ("models: {a: {cmd: 'vllm serve x'}}", "vllm is no llama-server"),
        ("models: {a: {cmd: llama-server -m /a -c many}}", "-c has no number: 'many'"),
        ("models: {a: {cmd: llama-server -c 9}}", "it names no model"),
        ("models: {a: {}}", "it has no cmd"),
        ("models: {a: {cmd: llama-server -m}}", "-m has no value"),
        ("healthCheckTimeout: abc\nmodels: {a: {cmd: llama-server -m /a}}", "invalid literal"),
        ("models: [1]", "starts no llama-server"),
        ("", "starts no llama-server"),
        ("services: {web: {image: nginx}}", "starts no llama-server"),
    ],
)
def test_what_has_no_model_is_refused_with_the_reason(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ImportProblemError) as problem:
        made_of(tmp_path, text)
    assert told in str(problem.value)


def test_one_model_that_fails_keeps_no_other_out(tmp_path: Path) -> None:
    text = "models: {a: {cmd: '${env.NOPE_}/x'}, b: {cmd: 'llama-server -m /b.gguf -c 9 -np 1'}}"
    made = made_of(tmp_path, text)
    assert made.names == ["b"]
    assert made.notes[0] == "a: is left out: the variable NOPE_ is not set"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("models: {a: {cmd: llama-server -m /a.gguf -c 9 -np 1}}")
    assert main(["import", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# Made from x.yaml")
    assert err.startswith("1 name answers: a\n")
    for broken in (b"\xff", b"models: {"):
        path.write_bytes(broken)
        assert main(["import", str(path)]) == 2
    assert main(["import", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err


STRANGE = {
    "presets.ini": """[*]
c = 8192
jinja = 1
[a]
m = /a.gguf
ctx-size = 32768
np = 1
no-jinja = 1
""",
    "start.sh": """# don't touch
cat <<EOF
it's a llama-server
EOF
cd "$(dirname "$0")"
while true; do llama-server -m /a.gguf -c 32768 -np 1; done
""",
    "reset.service": """[Service]
Environment="ARGS=-c 32768 -np 1"
ExecStart=
ExecStart=/opt/llama-server -m "/a.gguf" $ARGS --host ::
""",
    "tmux.sh": "tmux new -d -s x 'llama-server -m /a.gguf -c 32768 -np 1'\necho $(date)\n",
    "env.yaml": "models: {a: {cmd: 'env LLAMA_ARG_CTX_SIZE=32768 llama-server -m /a.gguf -np 1'}}",
    "bad-beside.yaml": """models:
  a: {cmd: llama-server -m /a.gguf -c 32768 -np 1}
  b: {cmd: 'llama-server -hf a/b/c:Q4'}
  c: {cmd: './llama-server.sh -m /c.gguf -c many'}
""",
}


@pytest.mark.parametrize("name", STRANGE)
def test_files_of_odd_shapes(tmp_path: Path, name: str) -> None:
    (model,) = config_of(tmp_path, STRANGE[name], name).servers.models
    assert (str(model.model), model.ctx, model.slots) == ("/a.gguf", 32768, 1)
    assert "--jinja" not in model.args


def test_nothing_beside_a_file_is_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("llama-server", "llama-server.sh"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {ran}\n")
        (tmp_path / name).chmod(0o755)
    made_of(tmp_path, "./llama-server -m /a.gguf\n./llama-server.sh -m /b.gguf\n", "x.sh")
    assert not ran.exists()


def test_secrets_are_not_written(tmp_path: Path) -> None:
    text = "export HF_TOKEN=hunter2\nllama-server -m /a.gguf --api-key hunter3 --odd hunter4\n"
    made = made_of(tmp_path, text, "x.sh")
    assert "hunter2" not in made.text + "".join(made.notes)
    assert "hunter3" not in made.text + "".join(made.notes)


COMPOSE = """
services:
  llm:
    image: ghcr.io/ggml-org/llama.cpp:full
    command: --server -m /models/m.gguf -c 4096 -np 2
    env_file: [llm.env]
    environment: {LLAMA_ARG_THREADS: "2"}
    volumes: ["${MODELS:-./models}:/models:ro", /cache]
    ports: ["127.0.0.1:9000:8080"]
"""


def test_a_service_with_ports_and_a_file_of_variables(tmp_path: Path) -> None:
    (tmp_path / "llm.env").write_text(
        "export LLAMA_ARG_THREADS=8\nCUDA_VISIBLE_DEVICES = 1 # one\nURL=p:`x`$(y)\n"
    )
    (tmp_path / "compose.yml").write_text(COMPOSE)
    made = yaml.safe_load(imported(tmp_path / "compose.yml").text)
    (model,) = made["servers"]["models"]
    assert made["listen"] == "127.0.0.1:9000"
    assert model["model"] == str(tmp_path / "models" / "m.gguf")
    assert (model["slots"], model["ctx"]) == (2, 2048)
    assert model["env"] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert model["args"] == ["--threads", "2"]


def test_limits_and_hidden_models_of_llama_swap(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "models:\n  a:\n    cmd: llama-server -m /m.gguf --port ${PORT}\n"
        "    concurrencyLimit: 3\n    unlisted: true\n"
    )
    made = imported(file)
    (model,) = yaml.safe_load(made.text)["servers"]["models"]
    assert model["max_running"] == 3
    assert any("unlisted" in note for note in made.notes)


def test_a_container_with_all_programs(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("docker run -p 8080:8080 ghcr.io/ggml-org/llama.cpp:full --server -m /m.gguf\n")
    (model,) = yaml.safe_load(imported(file).text)["servers"]["models"]
    at = model["command"].index("ghcr.io/ggml-org/llama.cpp:full")
    assert model["command"][at + 1 : at + 4] == ["--server", "--model", "/m.gguf"]


@pytest.mark.parametrize(
    ("ports", "listen"),
    [
        ('["8080:8080"]', "0.0.0.0:8080"),
        ('["9090:9090", "127.0.0.1:${P:-81}:8080"]', "127.0.0.1:81"),
        ('["[::1]:81:8080"]', "[::1]:81"),
        ('[{target: 8080, published: 81, host_ip: "::1"}]', "[::1]:81"),
        ('["0:8080", "53:53/udp", "8080"]', None),
        ("[{target: 8080, published: 9000, protocol: udp}]", None),
    ],
)
def test_the_port_of_the_server_is_the_one_published(
    tmp_path: Path, ports: str, listen: str | None
) -> None:
    text = re.sub(r"ports: .*", f"ports: {ports}", COMPOSE).replace(
        "env_file: [llm.env]", "tty: no"
    )
    (tmp_path / "compose.yml").write_text(text)
    assert yaml.safe_load(imported(tmp_path / "compose.yml").text).get("listen") == listen


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("A=", "A", ""),
        ('A="a b" # c', "A", "a b"),
        ("A= # c", "A", ""),
        ("A='say \"$B\"'", "A", 'say "$B"'),
        ("A=$B/x # c", "A", "/b/x"),
        ("A=x#y", "A", "x#y"),
        ("export A = `b`", "A", "`b`"),
    ],
)
def test_a_line_of_a_file_of_variables(tmp_path: Path, line: str, name: str, value: str) -> None:
    (tmp_path / ".env").write_text(f"B=/b\n{line}\nNEXT=1\n")
    found = read_file(tmp_path / ".env", {})
    assert found == {"B": "/b", name: value, "NEXT": "1"}


@pytest.mark.parametrize("publish", ["-p 127.0.0.1:81:8080", "-p127.0.0.1:81:8080"])
def test_a_container_is_served_where_it_was_published(tmp_path: Path, publish: str) -> None:
    image = "ghcr.io/ggml-org/llama.cpp:server"
    (tmp_path / "run.sh").write_text(f"docker run {publish} --no-healthcheck {image} -m /m.gguf\n")
    assert yaml.safe_load(imported(tmp_path / "run.sh").text)["listen"] == "127.0.0.1:81"


def test_a_container_of_podman(tmp_path: Path) -> None:
    file = tmp_path / "chat.container"
    file.write_text(
        "[Container]\nImage=ghcr.io/ggml-org/llama.cpp:server\nVolume=/srv/models:/models:ro,Z\n"
        "Environment=LLAMA_ARG_CTX_SIZE=8192\nPublishPort=81:8080\n"
        "Exec=-m /models/m.gguf -np 2\n[Install]\nWantedBy=default.target\n"
    )
    made = yaml.safe_load(imported(file).text)
    (model,) = made["servers"]["models"]
    assert (model["name"], model["model"]) == ("chat", "/srv/models/m.gguf")
    assert (made["listen"], model["slots"], model["ctx"]) == ("0.0.0.0:81", 2, 4096)


def test_a_service_on_the_network_of_its_host_keeps_its_address(tmp_path: Path) -> None:
    (tmp_path / "compose.yml").write_text(
        "services:\n  a:\n    image: ghcr.io/ggml-org/llama.cpp:server\n    network_mode: host\n"
        "    command: -m /m.gguf --host 10.0.0.1 --port 82\n"
    )
    assert yaml.safe_load(imported(tmp_path / "compose.yml").text)["listen"] == "10.0.0.1:82"


def test_a_list_that_grows_in_a_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        'MODEL=${1:-/m/q.gguf}\ndeclare -a ARGS=(-m "$MODEL")\nARGS+=(-c 8192 -np 2)\n'
        'NAME=a\nNAME+=b\nllama-server "${ARGS[@]}" --alias "$NAME"\n'
    )
    (model,) = yaml.safe_load(imported(tmp_path / "run.sh").text)["servers"]["models"]
    assert (model["name"], model["model"]) == ("ab", "/m/q.gguf")
    assert (model["slots"], model["ctx"]) == (2, 4096)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${M##*/}", "q.Q4.gguf"),
        ("${M#*/}", "m/q.Q4.gguf"),
        ("${M%.*}", "/m/q.Q4"),
        ("${M%%.*}", "/m/q"),
        ("${M:+set}${E:+set}${E+is}", "setis"),
        ("${E:-a}${E-b}${X-${M##*.}}${M?}", "agguf/m/q.Q4.gguf"),
    ],
)
def test_a_variable_of_a_shell(text: str, value: str) -> None:
    assert expanded(text, {"M": "/m/q.Q4.gguf", "E": ""}) == value


@pytest.mark.parametrize("text", ["${X?}", "${M//a/b}", "$(date)"])
def test_too_much_of_a_shell_is_left_out(text: str) -> None:
    with pytest.raises(UntranslatableError):
        expanded(text, {"M": "a"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.sh", "llama-server -m /m/a.gguf --host 0.0.0.0 --api-key one,two"),
        ("run.sh", "llama-server -m /m/a.gguf --host 0.0.0.0 --api-key-file keys"),
        ("run.sh", "export LLAMA_API_KEY=one,two\nllama-server -m /m/a.gguf --host 0.0.0.0"),
        ("run.sh", "LLAMA_API_KEY=one,two llama-server -m /m/a.gguf --host 0.0.0.0"),
        ("run.sh", "docker run -e LLAMA_API_KEY=one,two -p 8080:8080 ggml/llama.cpp:server -m /a"),
        (
            "a.service",
            "[Service]\nEnvironment=LLAMA_API_KEY=one,two\n"
            "ExecStart=llama-server -m /m/a.gguf --host 0.0.0.0",
        ),
        (
            "compose.yaml",
            "services: {a: {image: ggml-org/llama.cpp:server, ports: ['8080:8080'],"
            " command: -m /m/a.gguf, environment: ['LLAMA_API_KEY=one,two']}}",
        ),
    ],
)
def test_keys_of_clients_are_kept_wherever_they_stand(tmp_path: Path, name: str, text: str) -> None:
    """A port of a network must not become open to all."""
    (tmp_path / "keys").write_text("one\n\ntwo\n")
    made = made_of(tmp_path, text, name)
    config = parse(made.text, "imported")
    assert [f"sha256:{key.hash.hex()}" for key in config.auth.keys] == [
        hash_text("one"),
        hash_text("two"),
    ]
    assert str(config.listen) == "0.0.0.0:8080"
    assert "one" not in made.text


def test_without_its_keys_a_server_listens_here_alone(tmp_path: Path) -> None:
    text = "llama-server -m /m/a.gguf --host 0.0.0.0 --port 9000 --api-key-file /none/keys"
    made = made_of(tmp_path, text, "run.sh")
    assert str(parse(made.text, "imported").listen) == "127.0.0.1:9000"
    assert any("until `auth` has keys" in note for note in made.notes)


def test_a_server_that_encrypts_goes_on_encrypting(tmp_path: Path) -> None:
    text = "llama-server -m /m/a.gguf --ssl-key-file k.pem --ssl-cert-file /e/c.pem"
    tls = config_of(tmp_path, text, "run.sh").tls
    assert (str(tls.certificate), str(tls.key)) == ("/e/c.pem", str(tmp_path / "k.pem"))


def test_presets_may_say_how_many_are_loaded(tmp_path: Path) -> None:
    text = "[*]\nmodels-max = 2\nsleep-idle-seconds = 300\n[a]\nmodel = /m/a.gguf\n"
    servers = config_of(tmp_path, text, "models.ini").servers
    assert (servers.loaded, servers.models[0].ttl_s, servers.models[0].args) == (2, 300.0, ())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$((4*4096))", "16384"),
        ("$(( 4 * N + 2 ))", "402"),
        ("$((N/3))", "33"),
        ("$(((1+2)*$N))", "300"),
        ("-$((N % 7))", "-2"),
    ],
)
def test_sums_of_a_shell(text: str, value: str) -> None:
    assert calculated(text, {"N": "100"}) == value


@pytest.mark.parametrize("text", ["$((1/0))", "$((2**9))", "$((A))", "$(())"])
def test_other_sums_are_too_much(text: str) -> None:
    with pytest.raises(UntranslatableError, match="write what it is"):
        expanded(calculated(text, {"A": "a.b"}), {})


def test_a_size_that_a_script_works_out(tmp_path: Path) -> None:
    text = "N=4\nCTX=$((N * 4096))\nllama-server -m ~/a.gguf -c $CTX -np $N"
    (model,) = config_of(tmp_path, text, "run.sh").servers.models
    assert (model.slots, model.ctx, str(model.model)) == (4, 4096, str(Path.home() / "a.gguf"))


def test_what_runs_elsewhere_or_for_an_instance_is_told(tmp_path: Path) -> None:
    with pytest.raises(ImportProblemError, match="runs on another machine"):
        made_of(tmp_path, "ssh box llama-server -m /m/a.gguf", "run.sh")
    unit = "[Service]\nExecStart=llama-server -m /m/%i.gguf"
    with pytest.raises(ImportProblemError, match="stands for the instance"):
        made_of(tmp_path, unit, "llama@.service")
    (model,) = config_of(tmp_path, unit, "llama@qwen.service").servers.models
    assert str(model.model) == "/m/qwen.gguf"


TWO = "llama-server -m /models/qwen/model.gguf -np 1 -c 4096 &\n"
FOUND: dict[str, tuple[str, str, list[str]]] = {
    "two files of one name": (
        "run.sh",
        f"{TWO}llama-server -m /models/gemma/model.gguf --port 8081 -np 1 -c 4096 &",
        ["model=/models/qwen/model.gguf", "model-2=/models/gemma/model.gguf"],
    ),
    "a name that needs no change keeps it": (
        "config.yaml",
        "models:\n  'qwen3:8b': {cmd: llama-server -m /0.gguf}\n"
        "  qwen3-8b: {cmd: llama-server -m /1.gguf}",
        ["qwen3-8b-2=/0.gguf", "qwen3-8b=/1.gguf"],
    ),
    "a folder with a space": (
        "run.sh",
        'MODEL="/Volumes/AI Models/qwen.gguf"\nllama-server -m "$MODEL" -c 8192 -np 2',
        ["qwen=/Volumes/AI Models/qwen.gguf"],
    ),
    "a folder with a space in a unit": (
        "a.service",
        '[Service]\nEnvironment="MODEL=/m/my model.gguf"\nExecStart=/llama-server -m ${MODEL} -c 9',
        ["my-model=/m/my model.gguf"],
    ),
    "a comment within a command": (
        "a.service",
        "[Service]\nExecStart=llama-server \\\n -m /m/a.gguf \\\n # four slots\n -c 32768 -np 4",
        ["a=/m/a.gguf"],
    ),
    "a list on lines of its own": (
        "config.yaml",
        "models:\n  a:\n    cmd: llama-server -m /a.gguf --port ${PORT}\n    aliases:\n"
        "      [\n        x,\n      ]\n      \n",
        ["a=/a.gguf"],
    ),
    "where the script is": (
        "run.sh",
        'D="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nllama-server -m "$D/a.gguf"',
        ["a=HERE/a.gguf"],
    ),
    "a container in this folder": (
        "run.sh",
        "docker run -v $(pwd)/models:/models ghcr.io/ggml-org/llama.cpp:server -m /models/a.gguf",
        ["a=None"],
    ),
    "variables of a file": (
        "run.sh",
        'source vars.env\nexec llama-server -m "$MODEL_PATH" "$@"',
        ["env=/env.gguf"],
    ),
    "the shell of a container": (
        "compose.yaml",
        'services: {a: {image: x, entrypoint: ["/bin/sh", "-c"],'
        ' command: ["exec /app/llama-server --model /models/a.gguf"], volumes: ["/srv:/models"]}}',
        ["a=/srv/a.gguf"],
    ),
    "a script of a service": (
        "init.sh",
        "case $1 in\n start) llama-server -m /a.gguf;;\n stop) pkill llama-server;;\nesac",
        ["a=/a.gguf"],
    ),
    "a mount of podman": (
        "a.container",
        "[Container]\nImage=ggml/llama.cpp:server\nExec=-m /models/a.gguf\n"
        "Mount=type=bind,source=/srv,destination=/models",
        ["a=/srv/a.gguf"],
    ),
    "a program in a folder with a space": (
        "config.yaml",
        "models: {a: {cmd: '\"/opt/my llama/llama-server\" -m /a.gguf'}}",
        ["a=/a.gguf"],
    ),
}


@pytest.mark.parametrize("case", FOUND)
def test_models_of_files_as_people_write_them(tmp_path: Path, case: str) -> None:
    name, text, models = FOUND[case]
    (tmp_path / "vars.env").write_text("MODEL_PATH=/env.gguf\n")
    made = config_of(tmp_path, text, name).servers.models
    here = str(tmp_path.resolve())
    assert [f"{one.name}={one.model}".replace(here, "HERE") for one in made] == models
    assert all("$@" not in one.args for one in made)


@pytest.mark.parametrize(
    ("name", "text", "names"),
    [
        (
            "config.yaml",
            "models:\n  a: {cmd: llama-server -m /x.gguf, env: ['CUDA_VISIBLE_DEVICES=0']}\n"
            "  b: {cmd: llama-server -m /x.gguf, env: ['CUDA_VISIBLE_DEVICES=1'],"
            " filters: {stripParams: top_p}}",
            ["a", "b"],
        ),
        (
            "x.sh",
            "CUDA_VISIBLE_DEVICES=0 llama-server -m /x.gguf -a q0\n"
            "CUDA_VISIBLE_DEVICES=1 llama-server -m /x.gguf -a q1",
            ["q0", "q1"],
        ),
    ],
)
def test_equal_servers_with_names_of_their_own_keep_them(
    tmp_path: Path, name: str, text: str, names: list[str]
) -> None:
    assert [one.name for one in config_of(tmp_path, text, name).servers.models] == names


def test_a_card_for_each_of_two_servers(tmp_path: Path) -> None:
    text = "CUDA_VISIBLE_DEVICES=0 llama-server -m /q.gguf &\nCUDA_VISIBLE_DEVICES=1 "
    (model,) = config_of(
        tmp_path, f"{text}llama-server -m /q.gguf --port 9 &", "x.sh"
    ).servers.models
    assert (model.replicas, model.env) == (2, {"CUDA_VISIBLE_DEVICES": ("0", "1")})


def test_router_mode_keeps_keys_and_variables(tmp_path: Path) -> None:
    """A port of a network must not become open to all."""
    (tmp_path / "r.ini").write_text("[user/repo:q4_k_m]\nctx-size = 4096\n")
    text = "export CUDA_VISIBLE_DEVICES=1\nllama-server --models-preset r.ini --host 0.0.0.0"
    made = made_of(tmp_path, f"{text} --api-key sk-secret", "run.sh")
    config = parse(made.text, "imported")
    assert [f"sha256:{key.hash.hex()}" for key in config.auth.keys] == [hash_text("sk-secret")]
    assert config.servers.models[0].env == {"CUDA_VISIBLE_DEVICES": "1"}
    assert "user/repo:Q4_K_M" in config.servers.models[0].names


def test_secrets_of_containers_and_flags_are_not_written(tmp_path: Path) -> None:
    run = "docker run -e HF_TOKEN=hunter2 -p 8080:8080 llama.cpp:server -m /a\n"
    made = made_of(tmp_path, f"{run}llama-server -m /b.gguf -hft hunter3", "run.sh")
    assert "hunter" not in made.text + "".join(made.notes)
    assert "- HF_TOKEN\n" in made.text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("M=$(ls /m)\nllama-server -m $M", "the output of a command"),
        (
            "M=$(ls /m)\nA=0 llama-server -m $M",
            "a llama-server is left out: .* output of a command",
        ),
        ("L=$(which llama-server)\n$L -m /a.gguf", "a llama-server is left out"),
        (
            "case $1 in a) F=/a.gguf;; *) F=/b.gguf;; esac\nllama-server -m $F",
            "depends on a `case`",
        ),
    ],
)
def test_a_value_that_is_not_known_is_told(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ImportProblemError, match=told):
        made_of(tmp_path, text, "run.sh")


def test_groups_of_llama_swap_have_names_of_their_own(tmp_path: Path) -> None:
    cmd = "{cmd: llama-server -m /a.gguf}"
    text = f"models: {{70: {cmd}, b: {cmd}, c: {cmd}}}\ngroups:\n  others: {{members: [70]}}\n"
    servers = config_of(tmp_path, f"{text}  gpu 0: {{members: [b]}}\n").servers
    assert [group.name for group in servers.groups] == ["others", "gpu-0", "others-2"]
    assert [model.group for model in servers.models] == ["others", "gpu-0", "others-2"]


def test_a_key_from_the_environment_that_is_not_set(tmp_path: Path) -> None:
    text = "models: {a: {cmd: llama-server -m /a.gguf}}\napiKeys: ['${env.NO_SUCH_KEY}']"
    made = made_of(tmp_path, text)
    assert str(parse(made.text, "imported").listen).startswith("127.0.0.1:")
    assert any("NO_SUCH_KEY" in note for note in made.notes)


def test_drafts_stand_beside_their_model(tmp_path: Path) -> None:
    for name in ("qwen/dflash-qwen.gguf", "qwen/qwen-Q4.gguf", "mtp-flat.gguf", "lm/u/r/f.gguf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    models = parse(imported(tmp_path).text, "imported").servers.models
    assert [(one.name, one.model.name if one.model else "") for one in models] == [
        ("r", "f.gguf"),
        ("qwen", "qwen-Q4.gguf"),
    ]
    assert models[1].args[0] == "--spec-draft-model"


def test_words_before_a_program_need_one_that_is_here(tmp_path: Path) -> None:
    text = "numactl --interleave=all /no/such/llama-server -m /a.gguf"
    (model,) = config_of(tmp_path, text, "run.sh").servers.models
    assert isinstance(model.llama_server, tuple)
    assert model.llama_server[:2] == ("numactl", "--interleave=all")
    assert model.llama_server[2:] == tuple(find_server())
