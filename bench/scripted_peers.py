"""Scripted peers: hosts without a server that quote, and answer at once. A process of its own.

`python -m bench.scripted_peers REDIS_URL N`: N hosts that register in Redis; every prompt is
read as the same tokens, and host 0 quotes the least.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import msgspec
import redis.asyncio
from aiohttp import web

from router.base.prefix_hash import PrefixHasher
from router.base.tokens import pack
from router.hosts.credentials import load_credentials
from router.hosts.directory import HOST_KEY, HOSTS_KEY, signed
from router.hosts.messages import (
    HELLO,
    HOST,
    QUOTE,
    READ,
    Hello,
    PromptRead,
    QuoteReply,
    Served,
)

Handler = Callable[[web.Request], Awaitable[web.Response]]

_FACTS = "facts"
_N_TOKENS = 8_000
_ANSWER = b'{"content":"x","tokens_predicted":1,"stop":true}'


async def main(url: str, n: int) -> None:
    """Serve for ever."""
    proof = load_credentials(None).proof
    hashes = PrefixHasher(b"no secret", _FACTS, "").hashes(pack(range(_N_TOKENS)))
    read = PromptRead(f"{_FACTS}:", _N_TOKENS, b"".join(hashes), 1)
    hosts: list[Hello] = []
    for at in range(n):
        name = f"scripted-{at}"
        app = web.Application()
        app.router.add_get(HELLO, _answering(hosts, at))
        app.router.add_post(QUOTE, _quoting(at))
        app.router.add_post(READ, _saying(msgspec.json.encode(read)))
        app.router.add_post("/{any:.*}", _saying(_ANSWER, {HOST: name}))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        served = (Served(("any",), f"{_FACTS}:"),)
        where = f"http://127.0.0.1:{runner.addresses[0][1]}"
        hosts.append(Hello(name, name, "bench", proof, where, models=served, slots=4, busy=at % 4))
    async with redis.asyncio.Redis.from_url(url) as client:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            for hello in hosts:
                told = signed(msgspec.json.encode(hello), b"no secret")
                await client.set(f"{HOST_KEY}{hello.incarnation}", told, px=60_000)
                await client.sadd(HOSTS_KEY, hello.incarnation)
            await asyncio.sleep(2.0)


def _answering(hosts: list[Hello], at: int) -> Handler:
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(hosts[at]))

    return handle


def _quoting(at: int) -> Handler:
    reply = msgspec.msgpack.encode(QuoteReply(0.01 if at == 0 else 0.5 + at, 0.0, 100, "resident"))

    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=reply)

    return handle


def _saying(body: bytes, headers: dict[str, str] | None = None) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, headers=headers, content_type="application/json")

    return handle


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
