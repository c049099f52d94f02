#!/usr/bin/env bash
# An aiohttp server never answers the second of two pipelined requests if the first one has
# `Upgrade: h2c`, as curl --http2 sends it: the handler that declines the upgrade by a plain answer
# ends that request, and the bytes that came behind it in the same packet are dropped. The
# connection stays open, so the client waits. Without the header both are answered.
#
# Seen with aiohttp 3.14.5:
#   without Upgrade: 2 answers
#   with Upgrade: h2c: 1 answer, and the connection stays open
# Needs: python3 (3.11 to 3.14) with venv and pip. Takes some seconds.
set -euo pipefail
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
cd "$home"
python3 -m venv env
env/bin/pip install -qq --disable-pip-version-check 'aiohttp==3.14.5'
cat >ask.py <<'PY'
import asyncio

from aiohttp import web


async def answer(_: web.Request) -> web.Response:
    return web.Response(text="here")


async def main() -> None:
    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    plain = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    upgrade = plain[:-2] + (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n\r\n"
    )
    for name, first in (("without Upgrade", plain), ("with Upgrade: h2c", upgrade)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first + plain)
        came, ended = b"", False
        try:
            while not ended and came.count(b"here") < 2:
                async with asyncio.timeout(3):
                    chunk = await reader.read(65536)
                came, ended = came + chunk, not chunk
        except TimeoutError:
            pass
        n = came.count(b"here")
        state = "" if n == 2 else ", and the connection " + ("ends" if ended else "stays open")
        print(f"{name}: {n} answer{'s' * (n != 1)}{state}")
        writer.close()
    await runner.cleanup()


asyncio.run(main())
PY
env/bin/python ask.py >found
cat found
diff found - <<'SEEN'
without Upgrade: 2 answers
with Upgrade: h2c: 1 answer, and the connection stays open
SEEN
