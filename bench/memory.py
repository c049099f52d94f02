"""`python -m bench.memory`: memory of kvferry over half an hour of new prompts.

Clients chat without a pause; each prompt is new, so that all caches fill. Now and then a body of
10,000 parts comes. The tiny model has random weights: its answers are cheap, and its states small.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench import rig
from bench.client import Client, Json
from bench.report import Report, arguments_of, run_bench
from tests.support.models.tiny_models import tiny_model

COLUMNS = ("minute", "requests", "MB", "snapshots")
_PARTS = 10_000
_MB = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=-1, help="of all snapshots; -1: no limit")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between two rows")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure one router in front of one server."""
    report = Report("memory", "Memory over time", [*COLUMNS], arguments_of(options))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        home = Path(folder)
        model = tiny_model("llama").path
        more = f"store: {{max_tokens: {options.max_tokens}}}"
        async with (
            rig.llama(slots=4, ctx_per_slot=32768, kv_dir=home / "kv", model=model) as server,
            rig.kvferry("kvferry", [server.url], home, kv_dir=home / "kv", more=more) as proxy,
        ):
            await asyncio.to_thread(_run, options, proxy, report)
    return report


def _run(options: argparse.Namespace, proxy: rig.Proxy, report: Report) -> None:
    stop, sent = threading.Event(), [0] * options.clients
    threads = [
        threading.Thread(target=_chat, args=(proxy.url, number, sent, stop))
        for number in range(options.clients)
    ]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    with closing(Client(proxy.url)) as client:
        while True:
            minute = (time.monotonic() - began) / 60
            state: Json = client.get("/kvferry/state").json()
            report.add(
                round(minute, 1),
                sum(sent),
                round(proxy.rss_bytes() / _MB, 1),
                state["snapshots"]["count"],
            )
            if minute >= options.minutes:
                break
            stop.wait(options.every)
    stop.set()
    for thread in threads:
        thread.join()


def _chat(url: str, number: int, sent: list[int], stop: threading.Event) -> None:
    with closing(Client(url)) as client:
        while not stop.is_set():
            turn = sent[number]
            text = " ".join(f"ferry {number} {turn} leaves pier {word}" for word in range(60))
            content: object = text
            if turn % 200 == 199:
                content = [{"type": "text", "text": "a"} for _ in range(_PARTS)]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8}
            client.post("/v1/chat/completions", body)
            sent[number] += 1


if __name__ == "__main__":
    sys.exit(main())
