"""`python -m bench.load`: what a thousand concurrent clients of every kind do to the router.

The table has memory, descriptors, the longest event-loop iteration, and how the requests ended. The
backends are fakes in a process of their own. They give every stream a token at each beat, so that
all streams are open at the same time. `--real` adds real servers with the tiny model.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter

import aiohttp
import uvloop

from bench import rig, stalls
from bench.client import Client as _Alone
from bench.client import WrongAnswerError
from bench.crowd import Client, connects, send
from bench.report import Report, arguments_of, run_bench
from bench.rivals import NGINX, RIVALS, find_nginx, nginx

COLUMNS = (
    *("case", "contender", "clients", "ended", "requests/s", "queue max"),
    *("RSS MiB before", "peak", "after", "KiB a client"),
    *("descriptors before", "peak ", "after ", "longest turn ms", "of CPU ms"),
)
_MIB = 1024**2
_LOOK_S = 0.25
_BACKENDS = 8
_BEAT_S = 0.5
_STOPPED_S = 3.0
_PADDING = 256 * 1024
Load = Callable[[str], Awaitable[Counter[str]]]


@dataclass
class _Looks:
    """Measurements of one process while clients come and go."""

    proxy: rig.Proxy
    rss: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    queue: float = 0.0
    turns_s: dict[str, float] = field(default_factory=dict)

    async def keep_looking(self, session: aiohttp.ClientSession) -> None:
        """Measure at intervals, without end."""
        while True:
            self.look()
            await self.ask(session)
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Measure memory and descriptors, by the kernel."""
        self.rss.append(self.proxy.rss_bytes())
        self.descriptors.append(self.proxy.descriptors())

    async def ask(self, session: aiohttp.ClientSession) -> None:
        """Measure queue and event-loop iterations, by kvferry's own metrics."""
        if not self.proxy.name.startswith("kvferry"):
            return
        async with session.get(self.proxy.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        self.queue = max(self.queue, float(found["kvferry_queue_depth"]))
        for by in stalls.BY:
            seconds = float(found[f'{stalls.NAME}{{by="{by}"}}'])
            self.turns_s[by] = max(self.turns_s.get(by, 0.0), seconds)


@dataclass(frozen=True)
class _Bench:
    report: Report
    session: aiohttp.ClientSession
    settle_s: float

    async def case(self, name: str, proxy: rig.Proxy, n: int, load: Load) -> Counter[str]:
        """Run one case and add its row. Raises WrongAnswerError for a wrong answer."""
        looks = _Looks(proxy)
        await looks.ask(self.session)
        looks.queue, looks.turns_s = 0.0, {}
        looks.look()
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(looks.keep_looking(self.session))
            start = perf_counter()
            ended = await load(proxy.url)
            seconds = perf_counter() - start
            looking.cancel()
        await asyncio.sleep(self.settle_s)
        looks.look()
        await looks.ask(self.session)
        rss, fds = looks.rss, looks.descriptors
        turns = (looks.turns_s.get(by) for by in stalls.BY)
        self.report.add(
            *(name, proxy.name, n, ", ".join(f"{k} × {v}" for k, v in ended.most_common())),
            *(sum(ended.values()) / seconds, round(looks.queue) if looks.turns_s else None),
            *(rss[0] / _MIB, max(rss) / _MIB, rss[-1] / _MIB, (max(rss) - rss[0]) / 1024 / n),
            *(fds[0], max(fds), fds[-1]),
            *(None if turn is None else turn * 1000 for turn in turns),
        )
        if odd := ended.keys() - {"right", "whole", "503", "left", "closed"}:
            raise WrongAnswerError(f"{name}, {proxy.name}: {odd}")
        return ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.load", description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="a tenth of the clients, shorter")
    # Idle connections to backends are kept for two seconds.
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before `after`")
    parser.add_argument("--only", metavar="CASE", help="run only this case")
    parser.add_argument("--real", action="store_true", help="add 64 clients on two real servers")
    return run_bench(parser, lambda options: uvloop.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Run each case on a fresh router; the kernel's numbers are of its process alone."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    n = options.clients // 10 if options.quick else options.clients
    report = Report("load", f"{n:,} clients at once", list(COLUMNS), arguments_of(options))
    async with aiohttp.ClientSession() as session:
        bench = _Bench(report, session, options.settle)
        seconds = 2.0 if options.quick else 6.0
        cases: dict[str, Callable[[], Awaitable[None]]] = {
            "streams": lambda: _streams(bench, n),
            "one moment": lambda: _moment(bench, n),
            "queue": lambda: _queue(bench, n),
            "queue full": lambda: _limit(bench, n),
            "slow readers": lambda: _slow(bench, max(n // 10, 5), seconds),
            "stopped reading": lambda: _stopped(bench, max(n // 10, 5), seconds),
            "leaving": lambda: _leaving(bench, n),
            "connects": lambda: _connecting(bench, n, seconds),
        }
        if options.real:
            cases["real servers"] = lambda: _real(bench, 64)
        for name, case in cases.items():
            if options.only in (None, name):
                await case()
    report.notes += [
        "KiB a client: growth of the process at its peak, for each client",
        f"longest turn: delay of the event loop, sampled every {stalls.EVERY_S * 1000:g} ms; "
        "of CPU: CPU time of its thread between two samples",
    ]
    if find_nginx() is None:
        report.notes.append(str(RIVALS[NGINX].missing))
    return report


@asynccontextmanager
async def _fleet(
    contender: str = "kvferry",
    *,
    backends: int = _BACKENDS,
    slots: int = 8,
    more: Sequence[str] = (),
    yaml: str = "",
) -> AsyncIterator[rig.Proxy]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        fakes = rig.fake_fleet(folder, backends=backends, slots=slots, more=more)
        urls = await stack.enter_async_context(fakes)
        if contender == "nginx":
            program = find_nginx()
            assert program is not None
            way = nginx(program, urls, folder, keep=False, connections=16 * 1024)
        else:
            policy = "passthrough" if contender.endswith("passthrough") else "cheapest"
            way = rig.kvferry(
                contender, urls, folder, policy=policy, more=yaml, module="bench.stalls"
            )
        yield await stack.enter_async_context(way)


def _clients(n: int, n_tokens: int, **more: int | float) -> list[Client]:
    """Return `n` clients, each with a question of its own."""
    return [Client(f"{number} is what I ask. " * 8, n_tokens, **more) for number in range(n)]  # type: ignore[arg-type]


async def _streams(bench: _Bench, n: int) -> None:
    """Run with a slot for each client: all streams are read at the same time."""
    beat = ["--beat", str(_BEAT_S)]
    contenders = ["kvferry", "kvferry passthrough", *(["nginx"] if find_nginx() else [])]
    for contender in contenders:
        async with _fleet(contender, slots=-(-n // _BACKENDS), more=beat) as proxy:
            await bench.case("streams", proxy, n, lambda url: send(url, _clients(n, 12)))


async def _moment(bench: _Bench, n: int) -> None:
    """Stop the router until all clients have sent: one iteration finds all requests."""

    async def load(proxy: rig.Proxy, url: str) -> Counter[str]:
        go = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(send(url, _clients(n, 4), go))
            while proxy.descriptors() < n:  # noqa: ASYNC110 - another process
                await asyncio.sleep(_LOOK_S)
            await asyncio.sleep(_LOOK_S)  # the last clients
            os.kill(proxy.pid, signal.SIGSTOP)
            go.set()
            await asyncio.sleep(_STOPPED_S)
            os.kill(proxy.pid, signal.SIGCONT)
        return sending.result()

    for slots in (8, -(-n // _BACKENDS)):
        async with _fleet(slots=slots, yaml=f"queue: {{max_requests: {n}}}") as proxy:
            name = f"one moment, {slots * _BACKENDS:,} slots"
            await bench.case(name, proxy, n, partial(load, proxy))


async def _queue(bench: _Bench, n: int) -> None:
    """Run with few slots: most requests wait, and all get their answer."""
    async with _fleet(yaml=f"queue: {{max_requests: {n}}}") as proxy:
        await bench.case("queue", proxy, n, lambda url: send(url, _clients(n, 4)))


async def _limit(bench: _Bench, n: int) -> None:
    """Run with one slot, busy until all requests have come: exactly the limit waits."""
    limit = n // 4
    async with _fleet(
        backends=1, slots=1, more=["--beat", "3"], yaml=f"queue: {{max_requests: {limit}}}"
    ) as proxy:
        clients = _clients(n, 10, stays_s=12.0)
        ended = await bench.case("queue full", proxy, n, lambda url: send(url, clients))
    if ended["503"] != n - limit - 1:
        raise WrongAnswerError(f"{ended['503']} requests got 503, not {n - limit - 1}")


async def _slow(bench: _Bench, n: int, seconds: float) -> None:
    """Run clients that read 1 KiB a second."""
    async with _fleet() as proxy:
        clients = _clients(n, round(seconds * 1024 / 160), rate=1024)
        await bench.case("slow readers", proxy, n, lambda url: send(url, clients))


async def _stopped(bench: _Bench, n: int, seconds: float) -> None:
    """Run clients that read the head of a hundred megabytes, stop, and disconnect later."""
    more = ["--padding", str(_PADDING)]
    async with _fleet(slots=-(-n // _BACKENDS), more=more) as proxy:
        clients = _clients(n, 400, takes=1024, stays_s=seconds)
        await bench.case("stopped reading", proxy, n, lambda url: send(url, clients))


async def _leaving(bench: _Bench, n: int) -> None:
    """Run clients that disconnect at any moment, some of them after their answer."""
    chance = random.Random(1)
    async with _fleet(more=["--beat", "0.02"]) as proxy:
        clients = [
            Client(f"{number} is what I ask. " * 8, 8, stays_s=chance.uniform(0.0, 6.0))
            for number in range(n)
        ]
        await bench.case("leaving", proxy, n, lambda url: send(url, clients))


async def _connecting(bench: _Bench, per_s: int, seconds: float) -> None:
    """Open connections without a whole request."""
    async with _fleet() as proxy:
        n = round(per_s * seconds)
        await bench.case("connects", proxy, n, lambda url: connects(url, per_s, seconds))


async def _real(bench: _Bench, n: int) -> None:
    """Run two real servers with four slots each; right is what one client alone gets."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        kv_dir = folder / "kv"
        servers = [
            await stack.enter_async_context(rig.llama(slots=4, ctx_per_slot=512, kv_dir=kv_dir))
            for _ in range(2)
        ]
        urls = [server.url for server in servers]
        way = rig.kvferry("kvferry", urls, folder, kv_dir=kv_dir, module="bench.stalls")
        proxy = await stack.enter_async_context(way)
        alone = [
            dataclasses.replace(client, expected=await asyncio.to_thread(_said, urls[0], client))
            for client in _clients(n, 24)
        ]
        await bench.case("real servers", proxy, n, lambda url: send(url, alone))


def _said(url: str, client: Client) -> str:
    """Return the text that one client alone gets from a server."""
    body = {"prompt": client.prompt, "n_predict": client.n_tokens, "temperature": 0}
    with closing(_Alone(url)) as alone:
        answer = alone.post("/completion", body | {"ignore_eos": True, "cache_prompt": False})
    return str(answer.json()["content"])


if __name__ == "__main__":
    sys.exit(main())
