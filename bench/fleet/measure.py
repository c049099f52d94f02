"""Run one contender once: drive it, count, and compare it with the oracle."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.client import Client, Json
from bench.fleet import oracle
from bench.fleet.contenders import URL, Contender, Shape, running
from bench.fleet.counters import Counts, counts, settle
from bench.fleet.drive import Driver, Sample
from bench.fleet.workload import Workload
from bench.report import Cell, Report, median, percentile, shown

_WHO = ("contender", "run")
_TOKENS = (
    *("prompt", "computed", "oracle", "x oracle", "reused %", "of limit %"),
    *("saves", "restores", "failed", "moved MB", "stall s", "streams' stall s"),
)
_TIMES = (
    *("TTFT p50 ms", "p90", "p99", "gap p50 ms", "gap p99", "gap max"),
    *("tokens/s", "requests/s", "wall s", "errors", "router CPU s", "server CPU s"),
)
_RANGED = ("TTFT p50 ms", "p90", "wall s")
COLUMNS = (*_WHO, *_TOKENS, *_TIMES)
PARTS = {"prompt tokens, and state moved": (*_WHO, *_TOKENS), "times": (*_WHO, *_TIMES)}


@dataclass(frozen=True, slots=True)
class Load:
    """A workload and how clients send it to a contender."""

    workload: Workload
    clients: int
    open_loop: bool = False
    real_answers: bool = False
    model_name: str = "any"


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run.

    `needed`: for each sample, the tokens that the oracle had to compute; None if the client
    disconnected before the first byte.
    """

    contender: Contender
    number: int
    wall_s: float
    counted: Counts
    samples: tuple[Sample, ...]  # in the order in which they were sent
    needed: tuple[int | None, ...]
    prompt_tokens: int  # of all answered requests
    miscounted: int  # answered requests for which the server reports another length

    @property
    def oracle(self) -> int:
        """Return the prompt tokens that a cache without limits would have computed."""
        return sum(needed for needed in self.needed if needed is not None)

    @property
    def errors(self) -> list[Sample]:
        """Return the requests that failed."""
        return [sample for sample in self.samples if sample.ending == "error"]

    def cells(self) -> list[Cell]:
        """Return the row of the table."""
        streams = [sample for sample in self.samples if sample.ask.kind == "stream"]
        others = [sample for sample in self.samples if sample.ask.kind != "stream"]
        ttft = [sample.ttft_s * 1000 for sample in others if sample.ttft_s is not None]
        # If there are long streams, only their gaps are measured.
        gaps = [gap * 1000 for sample in streams or others for gap in sample.gaps_s]
        answered = sum(sample.answered for sample in others)
        counted, prompt, limit = self.counted, self.prompt_tokens, self.prompt_tokens - self.oracle
        reused, theirs = prompt - counted.computed, self.contender.kind == URL
        moved = counted.moved_bytes
        return [
            *(self.contender.name, self.number),
            *(prompt, counted.computed, self.oracle, counted.computed / max(self.oracle, 1)),
            100 * reused / prompt if prompt else None,
            100 * reused / limit if limit else None,
            *(counted.saves, counted.restores, counted.failures),
            None if moved is None else moved / 1e6,
            *(counted.stall_s, counted.stopped_s),
            *(percentile(ttft, percent) for percent in (50, 90, 99)),
            *(percentile(gaps, percent) for percent in (50, 99, 100)),
            *(counted.generated / self.wall_s, answered / self.wall_s, self.wall_s),
            len(self.errors),
            *((None, None) if theirs else (counted.router_cpu_s, counted.server_cpu_s)),
        ]


async def run(contender: Contender, number: int, shape: Shape, load: Load, home: Path) -> Run:
    """Run a contender once on fresh servers, and count everything."""
    async with running(contender, shape, home) as fleet:
        before = await asyncio.to_thread(counts, fleet)
        driver = Driver(fleet.urls, load.workload, load.real_answers, load.model_name)
        wall_s = await (driver.open() if load.open_loop else driver.closed(load.clients))
        after = await settle(fleet)
        samples = sorted(driver.samples, key=lambda sample: sample.sent_s)
        found = await asyncio.to_thread(_tokens, fleet.tokenizer, samples)
    counted = after.since(before)
    if not fleet.servers:
        counted = _told(counted, samples)
    needed = iter(oracle.computed(tokens for tokens in found if tokens is not None))
    return Run(
        contender,
        number,
        wall_s,
        counted,
        tuple(samples),
        tuple(None if tokens is None else next(needed) for tokens in found),
        sum(len(tokens[0]) for tokens in found if tokens is not None),
        sum(
            sample.prompt_tokens is not None and sample.prompt_tokens != len(tokens[0])
            for sample, tokens in zip(samples, found, strict=True)
            if tokens is not None
        ),
    )


def _told(counted: Counts, samples: Sequence[Sample]) -> Counts:
    """Return the counts by the answers' own usage, if no server can be asked."""
    said = [(s.prompt_tokens - s.cached_tokens) for s in samples if s.prompt_tokens is not None]
    generated = sum(sample.generated_tokens for sample in samples)
    return dataclasses.replace(counted, computed=sum(said), generated=generated)


def _tokens(server: str, samples: Sequence[Sample]) -> list[tuple[list[int], list[int]] | None]:
    """Return each sample's prompt and answer, by the server's own template and vocabulary.

    None for a client that did not wait for an answer.
    """
    client = Client(server)

    def tokens(text: str, *, special: bool) -> list[int]:
        asked = {"content": text, "add_special": special, "parse_special": special}
        found: list[int] = client.post("/tokenize", asked).json()["tokens"]
        return found

    def prompt(sample: Sample) -> list[int]:
        raw = sample.ask.prompt
        if isinstance(raw, list):
            return raw
        if raw is None:
            reply = client.post("/apply-template", {"messages": sample.messages})
            raw = str(reply.json()["prompt"])
        return tokens(raw, special=True)

    found = [
        (prompt(sample), tokens(sample.text, special=False)) if sample.answered else None
        for sample in samples
    ]
    client.close()
    return found


def medians(runs: Sequence[Run]) -> list[Cell]:
    """Return the medians of all runs of a contender, each cell by itself."""
    rows = [run.cells() for run in runs]
    columns = list(zip(*rows, strict=True))[2:]
    return [runs[0].contender.name, "median", *map(_median, columns)]


def _median(cells: Sequence[Cell]) -> Cell:
    numbers = [cell for cell in cells if isinstance(cell, int | float)]
    return median(numbers) if numbers else None


def brief(report: Report) -> Report:
    """Return a report with one row for each contender: its medians.

    The columns of `_RANGED` also have the least and the most of the runs.
    """
    rows = []
    for who in dict.fromkeys(row["contender"] for row in report.records()):
        own = [row for row in report.records() if row["contender"] == who]
        *runs, last = own
        found = {column: [row[column] for row in runs] for column in _RANGED if runs}
        rows.append([_ranged(cell, found.get(column, ())) for column, cell in last.items()])
    return dataclasses.replace(report, rows=rows)


def _ranged(cell: Cell, runs: Sequence[Cell]) -> Cell:
    numbers = [run for run in runs if isinstance(run, int | float)]
    if not numbers:
        return cell
    return f"{shown(cell)} ({shown(min(numbers))} to {shown(max(numbers))})"


def write_samples(run: Run, path: Path) -> None:
    """Write each request as a line of JSON without its text, to read beside kvferry's log."""
    lines = []
    for sample, needed in zip(run.samples, run.needed, strict=True):
        line: Json = asdict(sample)
        line["kind"] = sample.ask.kind
        line["oracle_computed"] = needed
        line["gap_max_s"] = max(sample.gaps_s, default=None)
        for name in ("ask", "messages", "text", "gaps_s"):
            del line[name]
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines) + "\n")
