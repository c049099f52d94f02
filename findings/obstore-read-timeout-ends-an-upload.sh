#!/usr/bin/env bash
# obstore (Rust's object_store for Python) takes `read_timeout` in its client options. It is meant
# for a store that says nothing, and it also runs while a request is sent: an S3 answers a PUT when
# the last byte has arrived, so an upload that takes longer than `read_timeout` is ended, although
# its bytes flow all the time. A limit of 10 s refuses every object of more than 12 MB on a line of
# 10 Mbit/s, while small objects, listings and downloads work. Of an upload in parts each part has
# that time. With `timeout` alone, as the total of one request, the same upload arrives.
#
# Seen with obstore 0.12.1, a store that takes 200 kB/s and 600 kB (3 s), limits of 1 s and 30 s:
#   read_timeout 1 s: GenericError
#   timeout 30 s: arrived
# Needs: python3 (3.10 or newer) with venv and pip. Takes a quarter of a minute.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
python3 -m venv env
env/bin/pip install -qq --disable-pip-version-check 'obstore==0.12.1'
cat > upload.py <<'PY'
import socket
import threading
import time
from datetime import timedelta

import obstore
from obstore.store import S3Store

BODY = b"x" * 600_000


def take(connection: socket.socket) -> None:
    """Answer a PUT after its body, which is read at 200 kB/s."""
    with connection:
        got = b""
        while b"\r\n\r\n" not in got:
            more = connection.recv(4096)
            if not more:
                return
            got += more
        left = len(BODY) - len(got.partition(b"\r\n\r\n")[2])
        while left > 0:
            more = connection.recv(min(20_000, left))
            if not more:
                return
            left -= len(more)
            time.sleep(len(more) / 200_000)
        connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 0\r\n\r\n')


def serve(server: socket.socket) -> None:
    while True:
        threading.Thread(target=take, args=(server.accept()[0],), daemon=True).start()


server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
server.bind(("127.0.0.1", 0))
server.listen()
threading.Thread(target=serve, args=(server,), daemon=True).start()
for name, seconds in (("read_timeout", 1), ("timeout", 30)):
    store = S3Store(
        "bucket",
        endpoint=f"http://127.0.0.1:{server.getsockname()[1]}",
        region="us-east-1",
        access_key_id="a",
        secret_access_key="b",
        client_options={"allow_http": True, name: timedelta(seconds=seconds)},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=1)},
    )
    try:
        obstore.put(store, "object", BODY, use_multipart=False)
        told = "arrived"
    except Exception as error:
        told = type(error).__name__
    print(f"{name} {seconds} s: {told}", flush=True)
PY
env/bin/python upload.py | tee told
[ "$(cat told)" = "read_timeout 1 s: GenericError
timeout 30 s: arrived" ]
