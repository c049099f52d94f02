"""`python -m bench.fleet`: the same clients and llama-servers, with one router after the other.

Each contender has fresh servers. Prompts, their order and the answers that conversations go on with
are the same for all. The servers count the tokens.
"""

import argparse
import asyncio
import re
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from bench.client import Client
from bench.conversation import words_for
from bench.fleet import options as cli
from bench.fleet import plots, traces, workload
from bench.fleet.contenders import URL, Shape
from bench.fleet.measure import COLUMNS, PARTS, Load, Run, brief, medians, run, write_samples
from bench.report import Report, add_output, arguments_of, save
from router.tools.simulate.trace import TraceError
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer

_WIDTH = 170  # of the table, wherever it is printed
_SAMPLE = 1_000  # tokens, to count the words in them
_MARGIN = 256  # of a slot, in tokens
_TEMPLATE = 16  # tokens around each message, at most
_ENDINGS = {
    "left": "clients that disconnected in mid-answer",
    "abandoned": "clients that disconnected before the answer",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = cli.parser()
    add_output(parser)
    options = parser.parse_args(argv)
    cli.resolve(parser, options)
    report = asyncio.run(measure(parser, options))
    report.show(Console(width=_WIDTH))
    save(report, options, brief(report))
    return 0


async def measure(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Report:
    """Run all contenders `--runs` times; every second run reverses their order."""
    arguments = arguments_of(options) | {"contender": [c.name for c in cli.contenders(options)]}
    report = Report("fleet", f"Fleet, case {options.case}", list(COLUMNS), arguments)
    report.parts = {f"{report.title}: {part}": columns for part, columns in PARTS.items()}
    wanted = cli.contenders(options)
    report.notes.extend(dict.fromkeys(c.missing for c in wanted if c.missing))
    wanted = [contender for contender in wanted if not contender.missing]
    model = options.model or (await asyncio.to_thread(tiny_model, "llama")).path
    try:
        load, ctx = await _load(model, options)
    except TraceError as error:
        parser.error(f"argument --trace: {error}")
    shape = Shape(
        *(model, options.servers, options.slots, options.ctx or ctx, options.threads),
        log_level="info" if options.logs is None else "debug",
    )
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="kvferry-fleet-") as scratch:
        for number in range(1, options.runs + 1):
            for contender in wanted if number % 2 else wanted[::-1]:
                name = re.sub(r"[ :/]+", "-", f"{number} {contender.name}")
                home = (options.logs or Path(scratch)) / name
                home.mkdir(parents=True)
                runs.append(await run(contender, number, shape, load, home))
                if options.logs is not None:
                    write_samples(runs[-1], home / "requests.jsonl")
    for contender in wanted:
        own = [each for each in runs if each.contender == contender]
        for each in own:
            report.add(*each.cells())
        if len(own) > 1:
            report.add(*medians(own))
    report.notes += _notes(runs, shape, load)
    if options.plot is not None:
        report.notes.append(plots.draw(report.records(), report.title, options.plot))
    return report


async def _load(model: Path, options: argparse.Namespace) -> tuple[Load, int]:
    """Return the workload and the tokens that a slot needs; both depend on the vocabulary."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(LlamaServer(model, ctx=1024))
        client = Client(server.url)
        stack.callback(client.close)
        if options.trace is not None:
            vocabulary = await asyncio.to_thread(traces.vocabulary, client)
            made = await asyncio.to_thread(
                traces.build,
                *(options.trace, vocabulary),
                scale=options.scale,
                speed=options.speed or 1.0,
                limit=options.limit,
                raw=options.raw_tokens,
            )
            per_word = 1.0
        else:
            n_words = await asyncio.to_thread(words_for, client, _SAMPLE)
            per_word = _SAMPLE / n_words
            made = workload.build(cli.sizes(options, per_word), options.seed, per_word)
    n_words, n_tokens = made.longest
    ctx = round(1.1 * per_word * n_words) + n_tokens + _MARGIN + 2 * _TEMPLATE * options.turns
    load = Load(
        *(made, options.clients, options.speed is not None, options.real_answers),
        model_name=options.model_name,
    )
    return load, -(-ctx // 256) * 256


def _notes(runs: Sequence[Run], shape: Shape, load: Load) -> list[str]:
    n_asks = sum(len(step.asks) for step in load.workload.steps)
    loop = "open loop" if load.open_loop else f"{load.clients} clients in a closed loop"
    answers = "the model's own" if load.real_answers else "made up, the same for all contenders"
    notes = [
        f"{n_asks} requests, {loop}; {shape.servers} llama-servers with {shape.slots} slots of "
        f"{shape.ctx_per_slot:,} tokens each, {shape.threads} thread each; fresh for every "
        f"row; answers that conversations go on with: {answers}",
        "computed: by the servers' counters, kvferry's own prefills included; oracle: what a cache "
        "without limits would compute of the same prompts in the same order",
        "saves to stall: kvferry's, with its idle saves after the last answer; stall: seconds of "
        "servers; streams' stall: seconds of the streams that ran there, summed",
    ]
    if any(each.contender.kind == URL for each in runs):
        notes.append("for a URL, computed is by its answers; the server is used as it is")
    for ending in _ENDINGS:
        found = [sum(sample.ending == ending for sample in each.samples) for each in runs]
        if any(found):
            notes.append(f"{_ENDINGS[ending]}: {_range(found)} in each run")
    for each in runs:
        name = f"{each.contender.name} {each.number}"
        if each.errors:
            notes.append(f"{name}: first error: {each.errors[0].problem}")
        if each.miscounted:
            notes.append(
                f"{name}: {each.miscounted} prompts have another length by the server's usage than "
                "by its tokenizer: the oracle is no good"
            )
    return notes


def _range(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return str(most) if least == most else f"{least} to {most}"
