"""`kvferry bench`: measure each server of a configuration, one after the other, and report.

The report is a table to paste, what it means, and JSON.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import to_builtins
from rich.box import MARKDOWN
from rich.table import Table
from rich.text import Text

from router.assembly.backends import client_of, timeouts_of
from router.base.errors import BackendError, KvError, KvferryError
from router.config.schema import Config
from router.llama.server_client import Connections
from router.tools.bench.measure import Measured, Point, ServerBench
from router.tools.console.format import print_json
from router.tools.terminal import Progress, no_log_lines, output

_KVFERRY = "this is kvferry: give the addresses of its llama-servers"
_TITLES = ("prompt", "prefill tok/s", "cold s", "restored s", "sooner", "save s", "restore s", "MB")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options beside those of the fleet."""
    told = "compute prompts for about this long, all servers together; default %(default)g"
    command.add_argument("--seconds", type=float, default=45.0, metavar="N", help=told)
    command.add_argument("--json", action="store_true", help="print JSON")


async def bench(config: Config, options: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code: 0 if each server was measured, else 1."""
    results: list[Measured] = []
    with no_log_lines(), Progress() as progress:
        async with Connections() as connections:
            for backend in config.backends:
                client = client_of(backend, connections, timeouts_of(config))
                folder = None if backend.kv_dir is None else Path(backend.kv_dir)
                shares = len(config.backends)
                measuring = ServerBench(client, folder, options.seconds, shares, progress)
                try:
                    results.append(await measuring.run())
                except (BackendError, KvError) as error:
                    progress.stop()
                    told = _KVFERRY if isinstance(error, KvferryError) else str(error)
                    print(f"kvferry bench: {backend.name}: {told}", file=sys.stderr)
    if options.json:
        rows = [to_builtins(one) | {"pays_from_tokens": pays_from(one.points)} for one in results]
        print_json({"servers": rows})
    else:
        _print(results)
    return int(len(results) < len(config.backends))


def _print(results: list[Measured]) -> None:
    console = output()
    for one in results:
        context = f"{one.slots} slots of {one.n_ctx:,} tokens"
        title = f"{one.name}: {one.model}, {context}, llama.cpp {one.build}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(table(one))
        for line in lines(one):
            console.print(Text(line), soft_wrap=True)
        console.print()


def table(measured: Measured) -> Table:
    """Return the points of one server as a table in Markdown."""
    made = Table(box=MARKDOWN)
    for title in _TITLES:
        made.add_column(title, justify="right", no_wrap=True)
    for one in measured.points:
        made.add_row(
            *(f"{one.tokens:,}", f"{one.prefill_tokens_per_s:,.0f}", f"{one.cold_s:.3g}"),
            *(_number(one.here_s), f"{one.cold_s / one.here_s:.1f} x" if one.here_s else ""),
            *(_number(one.save_s), _number(one.restore_s), _number(one.size_bytes, 1e6)),
        )
    return made


def _number(value: float | None, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.3g}"


def lines(measured: Measured) -> Iterator[str]:
    """Yield what the table means, one sentence each."""
    if any(point.here_s for point in measured.points):
        at = pays_from(measured.points)
        if at is None:
            yield "Moving a prompt does not pay: computing the longest one is sooner."
        else:
            yield f"Moving a prompt pays from {at:,} tokens, at the latest."
    yield from (f"Note: {note}." for note in measured.notes)


def pays_from(points: Sequence[Point]) -> int | None:
    """Return the first length from which on a restored prompt is sooner than a computed one.

    None: the longest prompt does not gain.
    """
    found: int | None = None
    for point in reversed([point for point in points if point.here_s is not None]):
        if point.here_s is None or point.cold_s <= point.here_s:
            break
        found = point.tokens
    return found
