"""Other people's files, played: imported, checked, served, a chat by each name, a swap."""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml as pyyaml

from router.tools.doctor.check import check_text
from router.tools.serving.imports import imported
from tests.support.conversations.prompts import Json, ids
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.running_router import running

pytestmark = [pytest.mark.real, pytest.mark.thorough]

# Programs that stand around a llama-server, in place of those that this machine may lack.
NUMACTL = 'while [ "${1#-}" != "$1" ]; do shift 2; done; exec "$@"'
# Listens where the port is published, and runs the words behind the image.
DOCKER = """
case "$1" in stop|rm) exit 0;; esac
shift; port=; inner=
while [ "${1#-}" != "$1" ]; do
  case "$1" in
    --rm|--init) shift;;
    -p) port=$(echo "$2" | cut -d: -f2); shift 2;;
    --network) port=host; shift 2;;
    --gpus|--name|-v|-e) shift 2;;
    *) echo "what is $1?" >&2; exit 1;;
  esac
done
shift; [ "$1" = llama-server ] && shift
if [ "$port" = host ]; then exec llama-server "$@"; fi
exec llama-server "$@" --port "$port"
"""

FILES = {
    "llama-swap.yaml": """
        healthCheckTimeout: 300
        models:
          "org/qwen:7b": {cmd: 'llama-server --port ${PORT} -m MODEL -c 8192 -np 2', ttl: 300}
          "org/qwen-7b": {cmd: 'llama-server --port ${PORT} -m OTHER -c 8192 -np 2', ttl: 300}
    """,
    "aliases.yaml": """
        models:
          a: {cmd: 'llama-server --port ${PORT} -m MODEL -c 4096', aliases: gpt-4o}
          b:
            cmd: llama-server --port ${PORT} -m OTHER -c 4096 -a from-the-flag,second
            aliases: [{id: object, name: An object, unlisted: true}, plain]
    """,
    "macros.yaml": """
        macros:
          ctx: 8192
          fa: on
          slots: 2
          common: llama-server --port ${PORT} -fa ${fa} -c ${ctx} -np ${slots}
          sampling: [--temp, '0.7', --top-k, '20']
        models:
          a:
            macros: {ctx: 12288}
            cmd: ${common} -m MODEL ${sampling}
            filters: {setParams: {seed: 3, n: 1}, stripParams: 'top_p, logit_bias'}
            env: [A=b=c]
          b:
            cmd: |
              # the other one
              ${common} \\
              --model OTHER
            filters: {setParamsByID: {'${MODEL_ID}:cold': {temperature: 0}}}
    """,
    "fixed-port.yaml": """
        models:
          a: {proxy: 'http://127.0.0.1:9001', cmd: 'llama-server --port 9001 -m MODEL -c 4096'}
          b: {proxy: 'http://127.0.0.1:9002', cmd: 'llama-server --port 9002 -m OTHER -c 4096'}
    """,
    "home.yaml": """
        models:
          a: {cmd: '${env.BIN}/llama-server --port ${PORT} -m ~/models/m.gguf -c 4096 -np 1'}
          gone: {cmd: '${env.NOT_SET}/llama-server --port ${PORT} -m MODEL'}
    """,
    "wrappers.yaml": """
        models:
          numa: {cmd: 'numactl -N 0 -m 0 llama-server --port ${PORT} -m MODEL -c 4096'}
          nice: {cmd: 'nice -n 5 env X=y llama-server --port ${PORT} -m OTHER -c 4096 -np 4 -kvu'}
    """,
    "shell.yaml": """
        models:
          a:
            cmd: bash -c "export A=b; exec llama-server --port ${PORT} -m MODEL -c 8192 -np 2 2>&1"
          b: {cmd: "sh -c 'cd / && llama-server --port ${PORT} -m OTHER -c 4096'"}
    """,
    "docker.yaml": """
        models:
          a:
            cmd: docker run --rm --name box-a --gpus all -p ${PORT}:8080 -v /m:/m
              ghcr.io/ggml-org/llama.cpp:server -m MODEL -c 8192 -np 2 --host 0.0.0.0
            cmdStop: docker stop box-a
          b:
            proxy: http://127.0.0.1:9003
            cmd: docker run --rm -it --network host ghcr.io/ggml-org/llama.cpp:server-cuda
              llama-server -m OTHER --port 9003 -c 4096
    """,
    "others.yaml": """
        models:
          chat: {cmd: 'llama-server --port ${PORT} -m MODEL -c 4096'}
          peer: {proxy: 'http://192.0.2.1:8080'}
          ears: {cmd: 'whisper-server --port ${PORT} -m x.bin', checkEndpoint: /}
          voice: {cmd: 'python -m tts --port ${PORT}', cmdStop: 'pkill -f tts'}
        peers: {far: {proxy: 'http://192.0.2.2', models: [x]}}
    """,
    "groups.yaml": """
        globalTTL: 60
        groups:
          big: {swap: true, members: [a, b]}
          small: {persistent: true, swap: false, exclusive: false, members: [c]}
        hooks: {on_startup: {preload: [a, b]}}
        models:
          a: {cmd: 'llama-server --port ${PORT} -m MODEL -c 0 -np 1'}
          b: {cmd: 'llama-server --port ${PORT} -m OTHER -c 4096 -np 1 --cache-reuse 256'}
          c: {cmd: 'llama-server --port ${PORT} -m MODEL -c 4096 -np 1', ttl: 0}
    """,
    "keys.yaml": """
        logLevel: debug
        startPort: 10001
        includeAliasesInList: true
        models:
          a:
            cmd: llama-server --host 0.0.0.0 --port=${PORT} --model=MODEL --ctx_size 4096
              --api-key k
    """,
    "presets.ini": """
        version = 1
        [*]
        flash-attn = true
        fit = true
        threads = 1
        [small]
        model = MODEL   ; the file
        alias = small-one, default
        c = 8192
        np = 2
        no-perf = true
        load-on-startup = true
        [large]
        LLAMA_ARG_MODEL = OTHER
        LLAMA_ARG_CTX_SIZE = 4096
        LLAMA_ARG_ALIAS = big
        cache-ram = 0
        stop-timeout = 5
    """,
    "plain.ini": """
        [a]
        m = MODEL
        [b:q4]
        model = OTHER
        ctx-size = 4096
        parallel = 1
        warmup = false
    """,
    "docker-compose.yml": """
        services:
          llama:
            image: ghcr.io/ggml-org/llama.cpp:server
            command: -m /models/m.gguf -c 4096 --host 0.0.0.0 --port 8080 -a composed
            volumes: ['./models:/models:ro']
            ports: ['8080:8080']
          web: {image: 'ghcr.io/open-webui/open-webui:main', depends_on: [llama]}
    """,
    "compose-env.yaml": """
        services:
          one:
            image: ghcr.io/ggml-org/llama.cpp:server
            environment:
              - LLAMA_ARG_MODEL=/models/m.gguf
              - LLAMA_ARG_CTX_SIZE=${CTX:-8192}
              - LLAMA_ARG_N_PARALLEL=2
            volumes: ['./models:/models']
          two:
            image: local/llama-server:1
            entrypoint: [/app/llama-server]
            command: [--model, /models/m.gguf, -c, '4096', --alias, second]
            volumes: ['./models:/models']
    """,
    "llama.service": """
        [Unit]
        Description=llama.cpp
        [Service]
        Environment="FILE=MODEL" LLAMA_ARG_THREADS=1
        WorkingDirectory=/tmp
        ExecStart=/usr/bin/env numactl -N 0 llama-server -m ${FILE} \\
            --host 0.0.0.0 --port 9090 -c 8192 --parallel 2 --alias unit,gpt-4
        Restart=always
        [Install]
        WantedBy=multi-user.target
    """,
    "router.service": """
        [Service]
        ExecStart=llama-server --models-preset presets/all.ini --models-max 1 -c 4096 -np 1
    """,
    "start.sh": """
        #!/bin/bash
        # two servers
        DIR=$HOME/models
        ARGS=(-c 8192 -np 2
          --jinja)
        CTX=4096
        nohup llama-server -m "$DIR/m.gguf" "${ARGS[@]}" --port ${PORT:-8085} > /dev/null 2>&1 &
        exec llama-server --model OTHER -c $CTX --alias 'the-other' --samplers "top_k;temp"
    """,
    "one-line.sh": "LLAMA_ARG_CTX_SIZE=4096 llama-server -m MODEL --alias one -n 64 | tee log\n",
    "models": "",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_argv: Sequence[str]) -> None:
    """Put a llama-server and its usual wrappers on PATH, and models into a home."""
    programs = tmp_path / "bin"
    programs.mkdir()
    start = " ".join(server_argv)
    shims = {"llama-server": f'exec {start} "$@"', "numactl": NUMACTL, "docker": DOCKER}
    for name, text in shims.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BIN", str(programs))
    monkeypatch.delenv("LLAMA_SERVER_BIN", raising=False)
    models, presets = tmp_path / "models", tmp_path / "presets"
    models.mkdir()
    presets.mkdir()
    (models / "m.gguf").symlink_to(tiny_model("llama").path)
    nested = f"[a]\nm = {tiny_model('llama').path}\n[b]\nm = {tiny_model('lfm2').path}\n"
    (presets / "all.ini").write_text(nested)


def written(tmp_path: Path, name: str) -> Path:
    words = {"MODEL": tiny_model("llama").path, "OTHER": tiny_model("lfm2").path}
    text = re.sub(r"(?<!_)(MODEL|OTHER)\b", lambda found: str(words[found[1]]), FILES[name])
    lines = text.splitlines()
    cut = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    path = tmp_path / name
    if not path.exists():
        path.write_text("\n".join(line[cut:] for line in lines).lstrip("\n") + "\n")
    return path


@pytest.mark.parametrize("name", FILES)
async def test_each_name_answers_before_and_after_a_swap(tmp_path: Path, name: str) -> None:
    made = imported(written(tmp_path, name))
    config = tmp_path / "kvferry.yaml"
    config.write_text(made.text)
    code, told = check_text(config)
    assert code == 0, told
    document: dict[str, Any] = pyyaml.safe_load(made.text)
    document.pop("listen", None)
    document.pop("auth", None)
    yaml = pyyaml.safe_dump(document)
    own = [model["name"] for model in document["servers"]["models"]]
    prompts = {one: ids(1, 1500) for one in own}
    async with running([], None, yaml=yaml, wait_for=()) as kvferry:
        for one in made.names:
            answer = await kvferry.chat([{"role": "user", "content": "hi"}], model=one)
            assert answer.status == 200, (one, answer.body)
        for turn in range(2):
            for one in own:
                fields = {"n_predict": 4, "return_tokens": True, "temperature": 0}
                answer = await kvferry.complete(prompts[one], model=one, **fields)
                assert answer.status == 200, (one, answer.body)
                prompts[one] += answer.json["tokens"] + ids(100 + turn, 8)
                # What a swap saves is decided by prices; whether it can be saved, by the flags.
                await kvferry.until(partial(keeps_snapshots, one))


def keeps_snapshots(name: str, state: Json) -> bool:
    return any(one["name"] == name and one.get("snapshots") for one in state["backends"])
