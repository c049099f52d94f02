"""`python -m bench.overhead`: what the proxy's process costs, in CPU seconds and memory.

Requests at a steady rate to a fake llama-server, which is a process of its own and not counted.
CPU time comes from the kernel, in steps of 10 ms: many requests make it exact.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter

from bench import rig
from bench.client import Client, Json, stream_all
from bench.conversation import Conversation, words
from bench.report import Report, arguments_of, median, run_bench

COLUMNS = (
    *("case", "contender", "requests/s", "n", "CPU ms/request", "x baseline"),
    *("idle CPU %", "RSS MiB"),
)
CHAT = "/v1/chat/completions"
BASELINE = "kvferry passthrough"
_MIB = 1024**2
_ROUNDS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.overhead", description=__doc__)
    parser.add_argument("--rate", type=float, default=50.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each case and contender")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """One contender after the other is asked, three times round."""
    report = Report("overhead", "What the process costs", list(COLUMNS), arguments_of(options))
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        proxies = [
            await stack.enter_async_context(_contender(name, home))
            for name in (BASELINE, "kvferry", *(["nginx"] if rig.find_nginx() else []))
        ]
        if rig.find_nginx() is None:
            report.notes.append(rig.NGINX_HINT)
        await _idle(proxies, options.idle_seconds, report)
        for case, body in (
            ("short chat", _body(1, stream=False)),
            ("chat of 4,000 bytes", _body(600, stream=False)),
            ("stream of 32 events", _body(1, stream=True)),
        ):
            await asyncio.to_thread(_loaded, proxies, case, body, options, report)
    return report


@asynccontextmanager
async def _contender(name: str, home: Path) -> AsyncIterator[rig.Proxy]:
    folder = home / name.replace(" ", "-")
    folder.mkdir()
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(rig.fake_llama(folder))
        if name == "nginx":
            program = rig.find_nginx()
            assert program is not None
            way = rig.nginx(program, [fake.url], folder)
        else:
            policy = "passthrough" if name == BASELINE else "cheapest"
            # The fake cannot save without a directory; the price of a save is bench.restore's.
            way = rig.kvferry(name, [fake.url], folder, policy=policy)
        yield await stack.enter_async_context(way)


async def _idle(proxies: list[rig.Proxy], seconds: float, report: Report) -> None:
    await asyncio.sleep(min(seconds, 2.0))  # what starting left behind
    before = [proxy.cpu_s() for proxy in proxies]
    start = perf_counter()
    await asyncio.sleep(seconds)
    passed = perf_counter() - start
    for proxy, cpu_s in zip(proxies, before, strict=True):
        percent = 100 * (proxy.cpu_s() - cpu_s) / passed
        memory = proxy.rss_bytes() / _MIB
        report.add("idle", proxy.name, None, None, None, None, percent, memory)


def _loaded(
    proxies: list[rig.Proxy], case: str, body: Json, options: argparse.Namespace, report: Report
) -> None:
    n = max(round(options.rate * options.seconds / _ROUNDS), 1)
    costs: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
    rates: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
    for turn in range(-1, _ROUNDS):
        for proxy in proxies:
            cpu_s, start = proxy.cpu_s(), perf_counter()
            _steady(proxy.url, body, n if turn >= 0 else max(n // 10, 1), options.rate)
            if turn >= 0:
                costs[proxy.name].append((proxy.cpu_s() - cpu_s) / n * 1000)
                rates[proxy.name].append(n / (perf_counter() - start))
    baseline = median(costs[BASELINE])
    for proxy in proxies:
        cost = median(costs[proxy.name])
        report.add(
            *(case, proxy.name, median(rates[proxy.name]), _ROUNDS * n, cost),
            *(cost / baseline if baseline else None, None, proxy.rss_bytes() / _MIB),
        )


def _steady(url: str, body: Json, n: int, rate: float) -> None:
    """`n` requests, one every 1 / `rate` seconds, or as fast as they go if that is slower."""
    client, nothing = Client(url), threading.Event()
    start = perf_counter()
    for number in range(n):
        nothing.wait(max(start + number / rate - perf_counter(), 0.0))
        if body["stream"]:
            stream_all(url, CHAT, [body])
        else:
            client.post(CHAT, body)
    client.close()


def _body(n_words: int, *, stream: bool) -> Json:
    question = words(Conversation(1).random, n_words)
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32 if stream else 1,
        "stream": stream,
    }


if __name__ == "__main__":
    sys.exit(main())
