"""`python -m bench.several`: answers per second of clients that ask for several at once.

A llama-server asked directly, and one behind kvferry, take turns. Clients ask as fast as they are
answered: for two answers to a chat, for two prompts in a list, for embeddings of one, two and eight
texts. The ratio is the median over the rounds.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

from bench import rig
from bench.client import Client, Json
from bench.report import Report, arguments_of, run_bench
from router.tools.demo.model import small_model

COLUMNS = ("case", "direct answers/s", "kvferry answers/s", "x direct", "least", "most")
_TEXTS = [
    f"The ferry number {n} leaves the pier at {n} past six, and nobody counts." for n in range(8)
]
_CHAT = [{"role": "user", "content": "Tell me of a ferry."}]
# The path, the body, and the answers in one reply.
CASES: dict[str, tuple[str, Json, int]] = {
    "chat, n: 2": ("/v1/chat/completions", {"messages": _CHAT, "n": 2}, 2),
    "two prompts": ("/completion", {"prompt": _TEXTS[:2]}, 2),
    "chat": ("/v1/chat/completions", {"messages": _CHAT}, 1),
    "embedding of 1": ("/v1/embeddings", {"input": _TEXTS[0]}, 1),
    "embedding of 2": ("/v1/embeddings", {"input": _TEXTS[:2]}, 2),
    "embedding of 8": ("/v1/embeddings", {"input": _TEXTS}, 8),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.several", description=__doc__)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure all cases."""
    report = Report("several", "Several answers at once", [*COLUMNS], arguments_of(options))
    model = await small_model(lambda _: None)
    for embeds in (False, True):
        extra = ["--embeddings", "--pooling", "mean"] if embeds else []
        async with AsyncExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
            servers = [
                await stack.enter_async_context(
                    rig.llama(
                        slots=options.slots,
                        ctx_per_slot=512,
                        kv_dir=home / f"kv{number}",
                        model=model,
                        extra_args=extra,
                    )
                )
                for number in range(2)
            ]
            kv_dir = None if embeds else home / "kv1"
            proxy = await stack.enter_async_context(
                rig.kvferry("kvferry", [servers[1].url], home, kv_dir=kv_dir)
            )
            for case, (path, body, n) in CASES.items():
                if path.endswith("embeddings") is not embeds:
                    continue
                found = await asyncio.to_thread(
                    _rounds, options, [servers[0].url, proxy.url], path, body, n
                )
                ratios = [mine / theirs for theirs, mine in found]
                direct, kvferry = (median(rates) for rates in zip(*found, strict=True))
                report.add(case, direct, kvferry, median(ratios), min(ratios), max(ratios))
    return report


def _rounds(
    options: argparse.Namespace, urls: Sequence[str], path: str, body: Json, n: int
) -> list[tuple[float, float]]:
    """Return the answers per second of both, in each round."""
    more = {"max_tokens": options.tokens, "ignore_eos": True, "temperature": 0.7}
    body = {**body, "model": "any"} if "input" in body else {**body, **more}
    for url in urls:
        _rate(options, url, path, body, n, 1.0)
    found = []
    for number in range(options.rounds):
        turn = urls if number % 2 else [*reversed(urls)]
        rates = {url: _rate(options, url, path, body, n, options.seconds) for url in turn}
        found.append((rates[urls[0]], rates[urls[1]]))
    return found


def _rate(
    options: argparse.Namespace, url: str, path: str, body: Json, n: int, seconds: float
) -> float:
    """Return the answers per second that all clients get together."""
    counts = [0] * options.clients
    started = time.perf_counter()
    end = started + seconds

    def ask(number: int) -> None:
        client = Client(url)
        while time.perf_counter() < end:
            client.post(path, body).json()
            counts[number] += n

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(options.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - started)


if __name__ == "__main__":
    sys.exit(main())
