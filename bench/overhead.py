"""`python -m bench.overhead`: what the proxy's process costs, in CPU seconds and memory.

Requests go at a steady rate to a fake llama-server, which is another process and not counted.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench import rig
from bench.client import Client, Json, stream_all
from bench.conversation import Conversation, words
from bench.planning import slot_bytes, snapshot_bytes
from bench.report import Report, arguments_of, median, run_bench
from bench.rivals import NGINX, RIVALS, find_nginx, nginx
from router.base.tokens import WIDTH

COLUMNS = (
    *("case", "contender", "requests/s", "n", "CPU ms/request", "x baseline"),
    *("CPU ms/1,000 tokens", "idle CPU %", "RSS MiB", "KiB each"),
)
CHAT = "/v1/chat/completions"
BASELINE = "kvferry passthrough"
_KIB, _MIB = 1024, 1024**2
_ROUNDS = 3
_TOKENS = 8_000  # of each measured snapshot and slot


@dataclass(frozen=True, slots=True)
class Case:
    """Requests at a steady rate; `bodies` returns the n-th request."""

    name: str
    bodies: Callable[[int], Json]
    rate: float  # requests a second
    seconds: float


def _body(n_words: int, seed: int = 1, *, stream: bool = False) -> Json:
    question = words(Conversation(seed).random, n_words)
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 32 if stream else 1,
        "stream": stream,
    }


CASES: dict[str, Callable[[int], Json]] = {
    "short chat": lambda _: _body(1),
    "chat of 4,000 bytes, seen before": lambda _: _body(600),
    "chat of 4,000 bytes, new": lambda number: _body(600, number),
    "stream of 32 events": lambda _: _body(1, stream=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.overhead", description=__doc__)
    parser.add_argument("--rates", default="10,100", help="requests a second, comma-separated")
    parser.add_argument(
        "--seconds", type=float, default=12.0, help="for each case, rate and contender"
    )
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--snapshots", type=int, default=2_000, help="for the memory of one")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure one contender after the other, in three rounds."""
    report = Report("overhead", "CPU time and memory", list(COLUMNS), arguments_of(options))
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        proxies = [
            await stack.enter_async_context(_contender(name, home))
            for name in (BASELINE, "kvferry", *(["nginx"] if find_nginx() else []))
        ]
        if find_nginx() is None:
            report.notes.append(str(RIVALS[NGINX].missing))
        await _idle("idle, just started", proxies, options.idle_seconds, report)
        for rate in (float(text) for text in options.rates.split(",")):
            for name, bodies in CASES.items():
                case = Case(name, bodies, rate, options.seconds)
                await asyncio.to_thread(_loaded, proxies, case, report)
        await _idle("idle, after all of it", proxies, options.idle_seconds, report)
    _memory(options.snapshots, report)
    report.notes.append(
        "the fake's tokens are bytes, a token of real text has about four bytes; "
        "CPU ms/1,000 tokens: all CPU time of a request"
    )
    return report


@asynccontextmanager
async def _contender(name: str, home: Path) -> AsyncIterator[rig.Proxy]:
    folder = home / name.replace(" ", "-")
    folder.mkdir()
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(rig.fake_llama(folder))
        if name == "nginx":
            program = find_nginx()
            assert program is not None
            way = nginx(program, [fake.url], folder)
        else:
            policy = "passthrough" if name == BASELINE else "cheapest"
            # Without a directory the fake cannot save; bench.restore measures transfers.
            way = rig.kvferry(name, [fake.url], folder, policy=policy)
        yield await stack.enter_async_context(way)


async def _idle(case: str, proxies: list[rig.Proxy], seconds: float, report: Report) -> None:
    await asyncio.sleep(min(seconds, 2.0))  # earlier work ends
    before = [proxy.cpu_s() for proxy in proxies]
    start = perf_counter()
    await asyncio.sleep(seconds)
    passed = perf_counter() - start
    for proxy, cpu_s in zip(proxies, before, strict=True):
        percent = 100 * (proxy.cpu_s() - cpu_s) / passed
        memory = proxy.rss_bytes() / _MIB
        report.add(case, proxy.name, *[None] * 5, percent, memory, None)


def _memory(count: int, report: Report) -> None:
    """Measure memory in this process, with kvferry's own catalog and slots."""
    held = _TOKENS * WIDTH
    for what, n, beyond in (
        ("a snapshot", count, snapshot_bytes(count, _TOKENS)),
        ("a slot", None, slot_bytes(_TOKENS)),
    ):
        case = f"{what} of {_TOKENS:,} tokens"
        report.add(case, "kvferry", None, n, *[None] * 5, (held + beyond) / _KIB)
    report.notes.append(f"KiB each: {held / _KIB:.1f} of these are the tokens")


def _loaded(proxies: list[rig.Proxy], case: Case, report: Report) -> None:
    n = max(round(case.rate * case.seconds / _ROUNDS), 1)
    client = Client(proxies[0].url)
    usage = client.post(CHAT, case.bodies(0) | {"stream": False}).json()["usage"]
    client.close()
    costs: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
    rates: dict[str, list[float]] = {proxy.name: [] for proxy in proxies}
    for turn in range(-1, _ROUNDS):
        for proxy in proxies:
            cpu_s, start = proxy.cpu_s(), perf_counter()
            first = (turn + 1) * n
            steady(proxy.url, case, range(first, first + (n if turn >= 0 else max(n // 10, 1))))
            if turn >= 0:
                costs[proxy.name].append((proxy.cpu_s() - cpu_s) / n * 1000)
                rates[proxy.name].append(n / (perf_counter() - start))
    baseline = median(costs[BASELINE])
    for proxy in proxies:
        cost = median(costs[proxy.name])
        report.add(
            *(case.name, proxy.name, median(rates[proxy.name]), _ROUNDS * n, cost),
            *(cost / baseline if baseline else None, cost / usage["prompt_tokens"] * 1000),
            *(None, proxy.rss_bytes() / _MIB, None),
        )


def steady(url: str, case: Case, numbers: range) -> None:
    """Send a request every 1 / rate seconds, or without a break if that is slower."""
    client, nothing = Client(url), threading.Event()
    start = perf_counter()
    for done, number in enumerate(numbers):
        body = case.bodies(number)
        nothing.wait(max(start + done / case.rate - perf_counter(), 0.0))
        if body["stream"]:
            stream_all(url, CHAT, [body])
        else:
            client.post(CHAT, body)
    client.close()


if __name__ == "__main__":
    sys.exit(main())
