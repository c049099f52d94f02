"""`python -m bench.passthrough`: what a proxy adds to routes other than completions.

As in `bench.latency`, every contender has a llama-server of its own, here with `--embeddings`.
Contenders alternate after a few requests each. A second direct server shows how far two equal
things differ in the same run.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.client import Json, WrongAnswerError
from bench.latency import (
    DIRECT,
    WAYS,
    Contender,
    Sample,
    add_arguments,
    contenders_of,
    run_rounds,
    start,
)
from bench.report import Report, arguments_of, median, percentile, run_bench
from bench.rivals import NGINX, SGLANG

COLUMNS = (
    *("route", "contender", "n", "p50 ms", "p99 ms", "x direct"),
    *("added p50 ms", "added p99 ms"),
)
_TEXT = "What is the weather in London today, and what will it be tomorrow?"


@dataclass(frozen=True, slots=True)
class Case:
    """One request, always the same; `expected` is a key of its answer."""

    method: str
    path: str
    body: Json | None
    expected: str

    def __call__(self, contender: Contender, _: int) -> Sample:
        """Send the request once. Raises WrongAnswerError."""
        raw = None if self.body is None else json.dumps(self.body).encode()
        reply = contender.client.send(self.method, self.path, raw)
        if self.expected not in reply.json():
            raise WrongAnswerError(f"{self.path}: no {self.expected!r} in {reply.body[:300]!r}")
        return Sample(reply.total_s)


CASES = (
    Case("POST", "/v1/embeddings", {"model": "any", "input": _TEXT}, "data"),
    Case("POST", "/tokenize", {"content": _TEXT}, "tokens"),
    Case("POST", "/apply-template", {"messages": [{"role": "user", "content": _TEXT}]}, "prompt"),
    Case("GET", "/v1/models", None, "data"),
    Case("GET", "/props", None, "model_path"),
    Case("GET", "/health", None, "status"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.passthrough", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="of each route")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds that do not count")
    add_arguments(parser)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure all routes with all contenders."""
    title = "Latency of routes other than completions, by contender"
    report = Report("passthrough", title, list(COLUMNS), arguments_of(options))
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        contenders = await start(
            *(stack, home, contenders_of(options, [*WAYS, NGINX, SGLANG]), report.notes),
            ctx=2048,
            extra_args=["--embeddings", "--pooling", "mean"],
        )
        for case in CASES:
            # sglang-router answers or refuses the other routes itself.
            able = [c for c in contenders if c.name != SGLANG or case is CASES[0]]
            found = await asyncio.to_thread(
                run_rounds, able, case, options.warm_up, options.rounds, options.in_a_row
            )
            _add_rows(report, case, found)
    report.notes.append(
        "added p50: median of the differences to direct in the same round; added p99: difference "
        "of the two p99"
    )
    return report


def _add_rows(report: Report, case: Case, found: dict[str, list[Sample]]) -> None:
    direct = [1000 * sample.seconds for sample in found[DIRECT]]
    for name, samples in found.items():
        times = [1000 * sample.seconds for sample in samples]
        baseline = name == DIRECT
        report.add(
            *(f"{case.method} {case.path}", name, len(times), median(times)),
            *(percentile(times, 99), median(times) / median(direct)),
            None if baseline else median([a - b for a, b in zip(times, direct, strict=True)]),
            None if baseline else percentile(times, 99) - percentile(direct, 99),
        )


if __name__ == "__main__":
    sys.exit(main())
