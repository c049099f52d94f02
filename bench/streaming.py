"""`python -m bench.streaming`: long streams through the proxy and without it.

Each contender has a llama-server of its own, and contenders alternate. All must bring the same
number of events, or the run ends with an error.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench import rig
from bench.client import Json, Stream, WrongAnswerError, stream_all
from bench.conversation import Conversation, words
from bench.report import Report, arguments_of, median, percentile, run_bench

COLUMNS = (
    *("streams", "contender", "n", "events each", "events/s", "x direct"),
    *("gap p50 ms", "gap p99 ms", "reads per event"),
)
CHAT = "/v1/chat/completions"
TRIES = 3  # of a round: this process can sleep so long on a busy machine that one read brings all


@dataclass
class _Seen:
    # Events a second of all streams of a round, from the first event to the last; bench.latency
    # measures the time to the first.
    rates: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    n_reads: int = 0
    n_events: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.streaming", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--model", type=Path, metavar="FILE", help="GGUF; default: the tiny llama")
    parser.add_argument("--streams", default="1,4", help="how many at once, comma-separated")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure direct and kvferry, alternating."""
    report = Report(
        "streaming", "Streams of server-sent events", list(COLUMNS), arguments_of(options)
    )
    numbers = [int(text) for text in options.streams.split(",")]
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        urls: dict[str, str] = {}
        for name in ("direct", "direct again", "kvferry"):
            folder = home / name.replace(" ", "-")
            folder.mkdir()
            server = await stack.enter_async_context(
                rig.llama(
                    slots=max(numbers),
                    ctx_per_slot=options.tokens + 1024,
                    kv_dir=folder / "kv",
                    model=options.model,
                )
            )
            urls[name] = server.url
            if name == "kvferry":
                quiet = "store: {idle_save_after: off}"  # as in bench.latency
                way = rig.kvferry(name, [server.url], folder, kv_dir=folder / "kv", more=quiet)
                urls[name] = (await stack.enter_async_context(way)).url
        for number in numbers:
            await asyncio.to_thread(_measure_one, urls, number, options, report)
    report.notes.append(
        "gap: between two reads of a stream that bring events; x direct: median of the ratios "
        "within a round"
    )
    return report


def _measure_one(
    urls: dict[str, str], number: int, options: argparse.Namespace, report: Report
) -> None:
    seen = {name: _Seen() for name in urls}
    each = 0
    for turn in range(-1, options.rounds):
        names = list(urls)
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            bodies = [_body(options.tokens, i) for i in range(number)]
            for _ in range(TRIES):
                streams = stream_all(urls[name], CHAT, bodies)
                if _span_s(streams):
                    break
            else:
                raise WrongAnswerError(f"{name}: all events came at once: raise --tokens")
            counts = {stream.n_events for stream in streams}
            each = each or max(counts)
            if counts != {each}:
                raise WrongAnswerError(f"{name}: streams of {sorted(counts)} events, not {each}")
            if turn < 0:
                continue  # warm-up
            found = seen[name]
            found.rates.append(number * (each - 1) / _span_s(streams))
            found.n_events += number * each
            for stream in streams:
                found.gaps_ms += [gap * 1000 for gap in stream.gaps_s]
                found.n_reads += len(stream.reads_s)
    for name, found in seen.items():
        report.add(
            *(number, name, len(found.rates), each, median(found.rates)),
            median([a / b for a, b in zip(found.rates, seen["direct"].rates, strict=True)]),
            *(median(found.gaps_ms), percentile(found.gaps_ms, 99)),
            found.n_reads / max(found.n_events, 1),
        )


def _span_s(streams: Sequence[Stream]) -> float:
    """Return the seconds from the first event to the last; 0 if one read brought all."""
    first = min(stream.reads_s[0] for stream in streams)
    return max(stream.reads_s[-1] for stream in streams) - first


def _body(n_tokens: int, number: int) -> Json:
    question = words(Conversation(number).random, 20)
    return {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


if __name__ == "__main__":
    sys.exit(main())
