"""`python -m bench.hosts`: what a decision costs with few and with many hosts.

A front without servers forwards to scripted peers that answer at once, with a real Redis: once with
three hosts, once with a hundred and a million entries. The time of a request is that of its
decision: reading at a peer, the look-up, three quotes, and the way. Requests alternate.
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

from redis.asyncio import Redis

from bench import rig
from bench.client import Client
from bench.report import Report, arguments_of, median, percentile, run_bench
from router.base.clock import MonotonicClock
from router.base.tasks import Tasks
from router.hosts.directory import Directory
from router.hosts.messages import Hello
from router.servers.program import free_port

COLUMNS = ("hosts", "entries", "n", "p50 ms", "p99 ms", "x fewest p50", "x fewest p99")
_IN_A_ROW = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.hosts", description=__doc__)
    parser.add_argument("--hosts", default="3,100", help="comma-separated")
    parser.add_argument("--entries", default="1000,1000000", help="for each number of hosts")
    parser.add_argument("--rounds", type=int, default=3000)
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
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        clients = []
        for hosts, entries in sizes:
            url = await stack.enter_async_context(_front(home / hosts, hosts, entries))
            clients.append(Client(url))
            stack.callback(clients[-1].close)
        times = await asyncio.to_thread(_rounds, clients, options.rounds)
    least = times[0]
    for (hosts, entries), found in zip(sizes, times, strict=True):
        report.add(
            *(int(hosts), int(entries), len(found), median(found), percentile(found, 99)),
            median(found) / median(least),
            percentile(found, 99) / percentile(least, 99),
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
    port, program = free_port(), shutil.which("redis-server")
    if program is None:
        raise rig.RigError("no redis-server: apt-get install -y redis-server")
    url = f"redis://127.0.0.1:{port}"
    redis = await asyncio.create_subprocess_exec(
        *(program, "--port", str(port), "--save", ""), stdout=asyncio.subprocess.DEVNULL
    )
    tasks = Tasks()
    try:
        await asyncio.sleep(0.5)
        hello = Hello("bench", "bench", "", "")
        directory = Directory(
            url, "bench", lambda _: hello, _Held(options.refill), MonotonicClock()
        )
        tasks.spawn(directory.run(), name="directory")
        async with Redis.from_url(url) as client:
            for number in range(4):
                began = perf_counter()
                while await client.dbsize() < options.refill:  # noqa: ASYNC110 - Redis has no event
                    await asyncio.sleep(0.01)
                if number:
                    report.add(options.refill, perf_counter() - began)
                await client.flushall()
        await tasks.aclose()
        await directory.aclose()
    finally:
        redis.kill()
        await redis.wait()
    return report


def _rounds(clients: list[Client], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each client's requests; the first hundred do not count."""
    times: list[list[float]] = [[] for _ in clients]
    for start in range(-100, rounds, _IN_A_ROW):
        for client, found in zip(clients, times, strict=True):
            for _ in range(_IN_A_ROW):
                reply = client.post("/completion", {"prompt": "x", "model": "any"})
                if start >= 0:
                    found.append(reply.total_s * 1000)
    return times


@asynccontextmanager
async def _front(home: Path, hosts: str, entries: str) -> AsyncIterator[str]:
    """Run a Redis, scripted peers and a front; yield the URL of the front."""
    await asyncio.to_thread(home.mkdir)
    program = shutil.which("redis-server")
    if program is None:
        raise rig.RigError("no redis-server: apt-get install -y redis-server")
    port, peer_port = free_port(), free_port()
    url = f"redis://127.0.0.1:{port}"
    redis = await asyncio.create_subprocess_exec(
        *(program, "--port", str(port), "--save", "", "--dir", str(home)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    peers = None
    try:
        await asyncio.sleep(0.5)
        peers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.scripted_peers", url, hosts, entries),
            stdout=asyncio.subprocess.PIPE,
        )
        assert peers.stdout is not None
        if await peers.stdout.readline() != b"ready\n":
            raise rig.RigError("the scripted peers did not start")
        await asyncio.sleep(2.5)  # they register
        more = f"fleet: {{name: front, listen: '127.0.0.1:{peer_port}', redis: '{url}'}}"
        async with rig.kvferry("front", [], home, more=more) as front:
            await asyncio.sleep(5.0)  # two rounds of checks
            yield front.url
    finally:
        for process in (peers, redis):
            if process is not None:
                process.kill()
                await process.wait()


if __name__ == "__main__":
    sys.exit(main())
