"""`python -m bench.batch`: a person's first token beside a batch of long answers.

One llama-server with a small real model and all slots busy with the batch. The batch can wait
(`service_tier: flex`) or does not say so; an idle server is the baseline. A person asks short
questions with a new document, one after the other.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench import rig
from bench.client import Client, Json
from bench.conversation import words
from bench.report import Report, arguments_of, percentile, run_bench
from router.tools.demo.model import small_model

COLUMNS = (
    "beside",
    "first token p50 s",
    "p90 s",
    "p90 x",
    "batch answers",
    "batch tokens",
    "batch tokens/s",
)
CASES = {"nothing": None, "a batch that can wait": "flex", "a batch that does not": "default"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.batch", description=__doc__)
    parser.add_argument("--questions", type=int, default=15)
    parser.add_argument("--words", type=int, default=400, help="of each question's document")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="answers of the batch at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each of these answers")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two questions")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Ask the same questions beside each batch."""
    report = Report("batch", "First tokens beside a batch", [*COLUMNS], arguments_of(options))
    model = await small_model(lambda _: None)
    idle_s = 0.0
    for case, tier in CASES.items():
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
            home = Path(folder)
            async with (
                rig.llama(
                    slots=options.slots, ctx_per_slot=4096, kv_dir=home / "kv", model=model
                ) as server,
                rig.kvferry("kvferry", [server.url], home, kv_dir=home / "kv") as proxy,
            ):
                person = _Person(proxy.url, options)
                batch = _Batch(proxy.url, options, tier)
                await asyncio.to_thread(person.ask_once)  # the first one after the start
                started = time.perf_counter()
                n_workers = options.batch if tier else 0
                work = asyncio.gather(*(asyncio.to_thread(batch.work, n) for n in range(n_workers)))
                first_s = await asyncio.to_thread(person.ask)
                batch.over.set()
                await work
                seconds = time.perf_counter() - started
        p50, p90 = percentile(first_s, 50), percentile(first_s, 90)
        idle_s = idle_s or p90
        tokens = batch.computed + batch.generated
        report.add(
            case, p50, p90, p90 / idle_s, batch.answers, tokens, tokens / seconds if tier else None
        )
    return report


class _Person:
    """Asks questions with a new document each."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._client = Client(url)
        self._options = options
        self._random = random.Random(7)
        self._never = threading.Event()

    def ask_once(self) -> float:
        """Return the seconds until the first token of an answer."""
        question = words(self._random, self._options.words)
        body: Json = {"messages": [{"role": "user", "content": question}], "max_tokens": 1}
        reply = self._client.post("/v1/chat/completions", body | {"temperature": 0})
        return reply.total_s

    def ask(self) -> list[float]:
        """Ask all questions; return the seconds until the first token of each."""
        found = []
        for _ in range(self._options.questions):
            self._never.wait(self._options.pause)
            found.append(self.ask_once())
        return found


class _Batch:
    """Generates long answers until `over`. The counts are those of whole answers."""

    def __init__(self, url: str, options: argparse.Namespace, tier: str | None) -> None:
        self._url, self._options, self._tier = url, options, tier
        self._lock = threading.Lock()
        self.over = threading.Event()
        self.answers = self.computed = self.generated = 0

    def work(self, n: int) -> None:
        """Ask for one answer after the other."""
        client, random_ = Client(self._url), random.Random(100 + n)
        while not self.over.is_set():
            story = f"Tell a long story of {words(random_, 150)}."
            body: Json = {
                "messages": [{"role": "user", "content": story}],
                "max_tokens": self._options.tokens,
                "temperature": 0.7,
                "service_tier": self._tier,
            }
            timings = client.post("/v1/chat/completions", body).json()["timings"]
            with self._lock:
                self.answers += 1
                self.computed += timings["prompt_n"]
                self.generated += timings["predicted_n"]


if __name__ == "__main__":
    sys.exit(main())
