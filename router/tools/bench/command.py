"""`kvferry bench`: measure each server of a configuration, one after the other, and report."""

import argparse
import sys
from pathlib import Path

from rich.text import Text

from router.assembly.backends import client_of, timeouts_of
from router.base.errors import BackendError, KvError, KvferryError
from router.config.schema import Config
from router.llama.server_client import Connections
from router.tools.bench.measure import Measured, ServerBench
from router.tools.bench.report import as_json, lines, table
from router.tools.terminal import Progress, no_log_lines, output

_KVFERRY = "this is kvferry: give the addresses of its llama-servers"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options beside those of the fleet."""
    command.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        metavar="N",
        help="compute prompts for about this long, all servers together; default %(default)g",
    )
    command.add_argument("--json", action="store_true", help="print JSON")


async def bench(config: Config, options: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code: 0 if each server was measured, else 1."""
    results: list[Measured] = []
    failed = False
    with no_log_lines(), Progress() as progress:
        async with Connections() as connections:
            for backend in config.backends:
                measuring = ServerBench(
                    client_of(backend, connections, timeouts_of(config)),
                    None if backend.kv_dir is None else Path(backend.kv_dir),
                    options.seconds,
                    len(config.backends),
                    progress,
                )
                try:
                    results.append(await measuring.run())
                except (BackendError, KvError) as error:
                    failed = True
                    progress.stop()
                    told = _KVFERRY if isinstance(error, KvferryError) else str(error)
                    print(f"kvferry bench: {backend.name}: {told}", file=sys.stderr)
    if options.json:
        print(as_json(results))
    else:
        _print(results)
    return int(failed)


def _print(results: list[Measured]) -> None:
    console = output()
    for one in results:
        context = f"{one.slots} slots of {one.n_ctx:,} tokens"
        title = f"{one.name}: {one.model}, {context}, llama.cpp {one.build}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(Text(table(one)), soft_wrap=True)
        for line in lines(one):
            console.print(Text(line), soft_wrap=True)
        console.print()
