"""`python -m bench.tenants`: can a tenant tell by time if another tenant sent the same prompt?

One tenant sends a prompt. Another tenant then sends the same prompt, or as often the same words in
a new order. With `share_cache: none` both take equally long. The bench tries several routes, on one
slot or two of a real server.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from math import nan, sqrt
from pathlib import Path
from statistics import NormalDist

from bench import rig
from bench.client import Client, Json
from bench.conversation import words, words_for
from bench.report import Report, arguments_of, median, percentile, run_bench
from router.base.api_keys import hash_text, new_key

COLUMNS = ("share_cache", "route", "n", "new p50 ms", "theirs p50 ms", "ratio", "p95 ratio", "p")
ROUTES = ("/completion", "/v1/chat/completions", "/v1/messages")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.tenants", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="for each row")
    parser.add_argument("--tokens", type=int, default=1_000, help="of each prompt, about")
    parser.add_argument("--slots", type=int, default=2, help="of the server")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure a row for each route, with separate and with shared caches."""
    title = "A prompt that another tenant has sent, against a new one"
    report = Report("tenants", title, list(COLUMNS), arguments_of(options))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        home, keys = Path(folder), {name: new_key() for name in ("alice", "bob")}
        listed = ", ".join(f"{{name: {n}, hash: '{hash_text(k)}'}}" for n, k in keys.items())
        for share in ("none", "all"):
            yaml = f"auth: {{share_cache: {share}, keys: [{listed}]}}"
            kv_dir, ctx = home / f"kv-{share}", 2 * options.tokens + 1024
            async with (
                rig.llama(slots=options.slots, ctx_per_slot=ctx, kv_dir=kv_dir) as server,
                rig.kvferry(share, [server.url], home, kv_dir=kv_dir, more=yaml) as proxy,
            ):
                await asyncio.to_thread(_rows, proxy.url, keys, share, options, report)
    report.notes.append(
        "new: the same words in an order that no tenant has sent; theirs: another tenant has just "
        "sent it. ratio: theirs to new, of medians; p: of both being alike (Mann-Whitney, "
        "two-sided); far below 0.05 the two can be told apart"
    )
    return report


def _rows(
    url: str, keys: dict[str, str], share: str, options: argparse.Namespace, report: Report
) -> None:
    alice, bob = (Client(url, {"x-api-key": keys[name]}) for name in ("alice", "bob"))
    n_words = words_for(bob, options.tokens)
    chance = random.Random(1)
    for route in ROUTES:
        new: list[float] = []
        theirs: list[float] = []
        # Send one of the two after each prompt of alice: the second of two would find the slots
        # as the first left them.
        for number in range(2 * options.rounds + 4):
            text = words(chance, n_words)
            other = text.split(" ")
            chance.shuffle(other)  # same length: a prompt's length is no secret
            asked, fresh = _body(route, text), _body(route, " ".join(other))
            alice.post(route, asked)
            body, times = (asked, theirs) if number % 4 in (0, 3) else (fresh, new)
            times.append(bob.post(route, body).first_byte_s * 1000)
        del new[:2], theirs[:2]  # before the router has learned the times of a save and a restore
        p50, p95 = median(new), percentile(new, 95)
        report.add(
            share,
            route,
            len(new),
            p50,
            median(theirs),
            median(theirs) / p50,
            percentile(theirs, 95) / p95,
            alike(new, theirs),
        )
    alice.close()
    bob.close()


def _body(route: str, text: str) -> Json:
    if route == "/completion":
        return {"prompt": text, "n_predict": 1}
    return {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}


def alike(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the chance of ranks so uneven if both samples are alike; NaN for an empty sample.

    The test is Mann-Whitney's U, by its normal approximation.
    """
    if not a or not b:
        return nan
    u = sum((x > y) + (x == y) / 2 for x in a for y in b)
    n, m = len(a), len(b)
    z = (u - n * m / 2) / sqrt(n * m * (n + m + 1) / 12)
    return 2 * NormalDist().cdf(-abs(z))


if __name__ == "__main__":
    sys.exit(main())
