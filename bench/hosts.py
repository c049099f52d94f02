"""`python -m bench.hosts`: what a decision costs with few and with many hosts.

A front without servers forwards to scripted peers that answer at once, with a real Redis: once with
three hosts, once with a hundred and a million entries. The time of a request is that of its
decision: reading at a peer, the look-up, three quotes, and the way. Requests alternate. With
`--stopped`, each size has a second front, of which Redis is stopped as SIGSTOP does.
"""

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter

from bench import rig
from bench.client import Client
from bench.report import Report, arguments_of, median, percentile, run_bench
from router.base.clock import MonotonicClock
from router.base.tasks import Tasks
from router.hosts.directory import Directory
from router.hosts.messages import Hello
from router.servers.program import free_port
from tests.support.servers.redis_server import RedisServer

COLUMNS = ("hosts", "entries", "redis", "n", "p50 ms", "p99 ms", "x first p50", "x first p99")
_IN_A_ROW = 10
_WARM_UP = 100
_PATIENCE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.hosts", description=__doc__)
    parser.add_argument("--hosts", default="3,100", help="comma-separated")
    parser.add_argument("--entries", default="1000,1000000", help="for each number of hosts")
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument(
        "--stopped", action="store_true", help="each size a second time, with Redis stopped"
    )
    parser.add_argument(
        "--refill", type=int, metavar="N", help="instead: empty Redis, and wait for N hashes again"
    )
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure all sizes alternately."""
    if options.refill:
        return await _refill(options)
    report = Report("hosts", "Decisions, by hosts", list(COLUMNS), arguments_of(options))
    sizes = list(zip(options.hosts.split(","), options.entries.split(","), strict=True))
    rows = [(*size, stops) for size in sizes for stops in ([False, True][: 1 + options.stopped])]
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        clients = []
        for number, (hosts, entries, stops) in enumerate(rows):
            folder = home / str(number)
            url, redis = await stack.enter_async_context(_front(folder, hosts, entries))
            clients.append(Client(url))
            stack.callback(clients[-1].close)
            if stops:
                redis.pause()
        times = await asyncio.to_thread(_rounds, clients, options.rounds)
    least = times[0]
    for (hosts, entries, stops), found in zip(rows, times, strict=True):
        report.add(
            *(int(hosts), int(entries), "stopped" if stops else "answers", len(found)),
            *(median(found), percentile(found, 99)),
            *(median(found) / median(least), percentile(found, 99) / percentile(least, 99)),
        )
    return report


class _Held:
    """Prefix hashes of a host that changes no more."""

    def __init__(self, n: int) -> None:
        self._hashes = [number.to_bytes(8, "big") for number in range(n)]

    def all(self) -> list[bytes]:
        return self._hashes

    def take_news(self) -> tuple[list[bytes], list[bytes]]:
        return [], []


async def _refill(options: argparse.Namespace) -> Report:
    """Measure the time from an emptied Redis until all hashes of a host are there again."""
    report = Report("refill", "Redis emptied", ["hashes", "s"], arguments_of(options))
    tasks = Tasks()
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        redis = await stack.enter_async_context(_redis(home))
        hello = Hello("bench", "bench", "", "")
        directory = Directory(
            redis.url, "bench", lambda: hello, _Held(options.refill), MonotonicClock(), b"secret"
        )
        stack.push_async_callback(directory.aclose)
        stack.push_async_callback(tasks.aclose)
        tasks.spawn(directory.run(), name="directory")
        client = await stack.enter_async_context(redis.client())
        for number in range(4):
            began = perf_counter()
            while await client.dbsize() < options.refill:  # noqa: ASYNC110 - Redis has no event
                await asyncio.sleep(0.01)
            if number:
                report.add(options.refill, perf_counter() - began)
            await client.flushall()
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
async def _front(home: Path, hosts: str, entries: str) -> AsyncIterator[tuple[str, RedisServer]]:
    """Run a Redis, scripted peers and a front; yield the front's URL when it knows all peers."""
    await asyncio.to_thread(home.mkdir)
    async with _redis(home) as redis:
        peers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.scripted_peers", redis.url, hosts, entries),
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert peers.stdout is not None
            if await peers.stdout.readline() != b"ready\n":
                raise rig.RigError("the scripted peers did not start")
            own = f"{{name: front, listen: '127.0.0.1:{free_port()}', redis: '{redis.url}'}}"
            async with rig.kvferry("front", [], home, more=f"fleet: {own}") as front:
                await _wait_for_peers(front.url, int(hosts))
                yield front.url, redis
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
