"""`python -m bench.hosts`: what a decision costs with few and with many hosts.

A front without servers forwards to scripted peers that answer at once, with a real Redis: once with
three hosts, once with a hundred. The time of a request is that of its decision: reading at a peer,
up to eight quotes, and the way. Requests alternate.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench import rig
from bench.client import Client
from bench.report import Report, arguments_of, median, percentile, run_bench
from router.servers.program import free_port
from tests.support.servers.redis_server import RedisServer

COLUMNS = ("hosts", "n", "p50 ms", "p99 ms", "x first p50", "x first p99")
_IN_A_ROW = 10
_WARM_UP = 100
_PATIENCE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.hosts", description=__doc__)
    parser.add_argument("--hosts", default="3,100", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3000)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure all sizes alternately."""
    report = Report("hosts", "Decisions, by hosts", list(COLUMNS), arguments_of(options))
    sizes = options.hosts.split(",")
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        clients = []
        for number, hosts in enumerate(sizes):
            folder = home / str(number)
            url = await stack.enter_async_context(_front(folder, hosts))
            clients.append(Client(url))
            stack.callback(clients[-1].close)
        times = await asyncio.to_thread(_rounds, clients, options.rounds)
    least = times[0]
    for hosts, found in zip(sizes, times, strict=True):
        report.add(
            *(int(hosts), len(found)),
            *(median(found), percentile(found, 99)),
            *(median(found) / median(least), percentile(found, 99) / percentile(least, 99)),
        )
    return report


def _rounds(clients: list[Client], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each client's requests; the first hundred do not count."""
    times: list[list[float]] = [[] for _ in clients]
    for start in range(-_WARM_UP, rounds, _IN_A_ROW):
        for client, found in zip(clients, times, strict=True):
            for _ in range(_IN_A_ROW):
                reply = client.post("/completion", {"prompt": "x", "model": "any"})
                if start >= 0:
                    found.append(reply.total_s * 1000)
    return times


@asynccontextmanager
async def _redis(home: Path) -> AsyncIterator[RedisServer]:
    """Run a Redis. Raises RigError where there is none."""
    if shutil.which("redis-server") is None:
        raise rig.RigError("no redis-server: apt-get install -y redis-server")
    async with RedisServer.started(home) as server:
        yield server


@asynccontextmanager
async def _front(home: Path, hosts: str) -> AsyncIterator[str]:
    """Run a Redis, scripted peers and a front; yield the front's URL when it knows all peers."""
    await asyncio.to_thread(home.mkdir)
    async with _redis(home) as redis:
        peers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.scripted_peers", redis.url, hosts),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert peers.stdout is not None
            if await peers.stdout.readline() != b"ready\n":
                raise rig.RigError("the scripted peers did not start")
            own = f"{{name: front, listen: '127.0.0.1:{free_port()}', redis: '{redis.url}'}}"
            async with rig.kvferry("front", [], home, more=f"fleet: {own}") as front:
                await _wait_for_peers(front.url, int(hosts))
                yield front.url
        finally:
            peers.kill()
            await peers.wait()


async def _wait_for_peers(url: str, n: int) -> None:
    """Return when a front can use all its peers. Raises TimeoutError after a minute."""
    client = Client(url)
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            reply = await asyncio.to_thread(client.send, "GET", "/kvferry/state", None)
            if sum(peer["up"] for peer in reply.json()["hosts"]["peers"]) == n:
                break
            await asyncio.sleep(0.05)
    client.close()


if __name__ == "__main__":
    sys.exit(main())
