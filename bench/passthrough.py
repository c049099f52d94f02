"""`python -m bench.passthrough`: what a proxy adds to routes that are no completions.

One llama-server for all contenders, started with `--embeddings`: nothing on these routes depends
on what a slot holds. Each contender is asked once a round, everybody first in turn; a second
direct connection shows how far two equal things differ in the same run.
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

from bench import rig
from bench.client import Client, Json, WrongAnswerError
from bench.report import Report, arguments_of, median, percentile, run_bench

DIRECT = "direct"
COLUMNS = (
    *("route", "contender", "n", "p50 ms", "p99 ms", "x direct"),
    *("added p50 ms", "added p99 ms"),
)
_TEXT = "What is the weather in London today, and what will it be tomorrow?"


@dataclass(frozen=True, slots=True)
class Case:
    """One request, always the same. `expected` is in its answer."""

    method: str
    path: str
    body: Json | None
    expected: str

    def seconds(self, client: Client) -> float:
        """Ask once. Raises WrongAnswerError."""
        raw = None if self.body is None else json.dumps(self.body).encode()
        reply = client.send(self.method, self.path, raw)
        if self.expected not in reply.json():
            raise WrongAnswerError(f"{self.path}: no {self.expected!r} in {reply.body[:300]!r}")
        return reply.total_s


CASES = (
    Case("POST", "/v1/embeddings", {"input": _TEXT}, "data"),
    Case("POST", "/tokenize", {"content": _TEXT}, "tokens"),
    Case("POST", "/apply-template", {"messages": [{"role": "user", "content": _TEXT}]}, "prompt"),
    Case("GET", "/v1/models", None, "data"),
    Case("GET", "/props", None, "model_path"),
    Case("GET", "/health", None, "status"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="bench.passthrough", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000, help="of each route")
    parser.add_argument("--warm-up", type=int, default=20, help="rounds that do not count")
    parser.add_argument("--only", help="contenders beside direct, comma-separated")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """All routes, all contenders."""
    title = "Latency of routes that are no completions, by what is in front"
    report = Report("passthrough", title, list(COLUMNS), arguments_of(options))
    async with AsyncExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        clients = await start(stack, home, options, report.notes)
        for case in CASES:
            found = await asyncio.to_thread(
                run_rounds, case, clients, options.warm_up, options.rounds
            )
            _add_rows(report, case, found)
    report.notes.append(
        "added p50: median of the differences to direct in the same round; added p99: difference "
        "of the two p99"
    )
    return report


async def start(
    stack: AsyncExitStack, home: Path, options: argparse.Namespace, notes: list[str]
) -> dict[str, Client]:
    """The server, and a process in front of it for each contender that is installed."""
    wanted = options.only.split(",") if options.only is not None else None
    kv_dir = home / "kv"
    server = await stack.enter_async_context(
        rig.llama(
            slots=2,
            ctx_per_slot=2048,
            kv_dir=kv_dir,
            extra_args=["--embeddings", "--pooling", "mean"],
        )
    )
    clients: dict[str, Client] = {}
    for name in (DIRECT, "direct again", "kvferry", "kvferry passthrough", "nginx"):
        if wanted is not None and name != DIRECT and name not in wanted:
            continue
        url, folder = server.url, home / name.replace(" ", "-")
        folder.mkdir()
        if name == "kvferry":
            way = rig.kvferry(name, [url], folder, kv_dir=kv_dir)
            url = (await stack.enter_async_context(way)).url
        elif name == "kvferry passthrough":
            way = rig.kvferry(name, [url], folder, policy="passthrough")
            url = (await stack.enter_async_context(way)).url
        elif name == "nginx":
            program = rig.find_nginx()
            if program is None:
                notes.append(rig.NGINX_HINT)
                continue
            url = (await stack.enter_async_context(rig.nginx(program, [url], folder))).url
        clients[name] = Client(url)
        stack.callback(clients[name].close)
    return clients


def run_rounds(
    case: Case, clients: dict[str, Client], warm_up: int, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each contender, by round."""
    names = list(clients)
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = case.seconds(clients[name])
            if number >= 0:
                found[name].append(seconds)
    return found


def _add_rows(report: Report, case: Case, found: dict[str, list[float]]) -> None:
    direct = [1000 * seconds for seconds in found[DIRECT]]
    for name, seconds in found.items():
        times = [1000 * second for second in seconds]
        baseline = name == DIRECT
        report.add(
            *(f"{case.method} {case.path}", name, len(times), median(times)),
            *(percentile(times, 99), median(times) / median(direct)),
            None if baseline else median([a - b for a, b in zip(times, direct, strict=True)]),
            None if baseline else percentile(times, 99) - percentile(direct, 99),
        )


if __name__ == "__main__":
    sys.exit(main())
