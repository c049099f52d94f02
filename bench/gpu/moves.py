"""`python -m bench.gpu.moves`: `kvferry bench` on two servers with one device and one folder."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.report import Report, arguments_of, run_bench
from router.base.types import BackendId
from router.llama.client import LlamaClient
from router.llama.server_client import Connections, Timeouts
from router.tools.bench.command import lines, pays_from
from router.tools.bench.measure import Measured, ServerBench
from tests.support.servers.llama_server import LlamaServer

COLUMNS = (
    *("folder", "prompt", "prefill tok/s", "cold s", "restored s", "x sooner"),
    *("save s", "restore s", "MB", "save GB/s", "restore GB/s"),
)
_MARGIN = 256
_SECONDS = 1e6  # the part's own limit ends it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu.moves", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lengths", default="1024,4096,16384", help="tokens")
    parser.add_argument("--folder", type=Path, required=True, help="where states are saved")
    parser.add_argument("--threads", type=int, default=1)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure the first of two servers, and restores into the second one."""
    report = Report("moves", "Computed, saved, restored", list(COLUMNS), arguments_of(options))
    lengths = tuple(map(int, options.lengths.split(",")))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.folder) as folder:
        ctx = lengths[-1] + _MARGIN
        async with LlamaServer(
            options.model, ctx=ctx, kv_dir=Path(folder), threads=options.threads
        ) as server:
            found = await _measured(server.url, Path(folder), lengths)
    for point in found.points:
        size = point.size_bytes or 0
        report.add(
            *(found.folder, point.tokens, point.prefill_tokens_per_s, point.cold_s),
            *(point.here_s, point.cold_s / point.here_s if point.here_s else None),
            *(point.save_s, point.restore_s, size / 1e6),
            *(size / 1e9 / s if s else None for s in (point.save_s, point.restore_s)),
        )
    report.notes += [line.rstrip(".") for line in lines(found)]
    report.notes.append(f"moving pays from {pays_from(found.points)} tokens")
    return report


async def _measured(url: str, folder: Path, lengths: tuple[int, ...]) -> Measured:
    async with Connections() as connections:
        client = LlamaClient(BackendId("a"), url, connections, Timeouts())
        return await ServerBench(client, folder, _SECONDS, 1, print, lengths).run()


if __name__ == "__main__":
    sys.exit(main())
