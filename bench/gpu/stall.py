"""`python -m bench.gpu.stall`: how long a stream stands still while its server saves and restores.

One slot streams; the state of the other is saved, erased and restored, three times.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import aiohttp

from bench.client import Client, Json
from bench.conversation import prompt_of
from bench.gpu.streams import Stream, streaming
from bench.report import Report, arguments_of, median, run_bench
from tests.support.servers.llama_server import LlamaServer

COLUMNS = (
    *("action", "tokens", "MB", "server's s", "client's s", "longest gap s", "usual gap ms"),
)
_MARGIN = 4096  # for what the stream generates
_TIMES = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu.stall", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the state")
    parser.add_argument("--threads", type=int, default=1)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Save and restore beside a stream."""
    report = Report(
        "stall", "A stream beside saves and restores", list(COLUMNS), arguments_of(options)
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as home:
        async with LlamaServer(
            options.model,
            slots=2,
            ctx=2 * (options.tokens + _MARGIN),
            kv_dir=Path(home),
            threads=options.threads,
        ) as server:
            prompt = await asyncio.to_thread(_computed, server.url, options.tokens)
            async with aiohttp.ClientSession() as session:
                body = {"prompt": prompt[:64], "id_slot": 1}
                async with streaming(session, server.url, body) as stream:
                    for action in ("save", "restore"):
                        rows = [
                            await _beside(session, server.url, stream, action)
                            for _ in range(_TIMES)
                        ]
                        report.add(action, *map(median, zip(*rows, strict=True)))
    report.notes.append(f"medians of {_TIMES}, column by column")
    return report


def _computed(url: str, n_tokens: int) -> list[int]:
    client = Client(url)
    prompt = prompt_of(client, n_tokens, 1)
    client.post("/completion", {"prompt": prompt, "n_predict": 0, "id_slot": 0})
    client.close()
    return prompt


async def _beside(
    session: aiohttp.ClientSession, url: str, stream: Stream, action: str
) -> tuple[float, ...]:
    if action == "restore":
        await _post(session, f"{url}/slots/0?action=erase", {})
    since = perf_counter()
    done = await _post(session, f"{url}/slots/0?action={action}", {"filename": "a"})
    took_s = perf_counter() - since
    n_bytes, n_tokens = (
        (done["n_written"], done["n_saved"])
        if action == "save"
        else (done["n_read"], done["n_restored"])
    )
    told_s = done["timings"][f"{action}_ms"] / 1000
    gaps = (stream.longest_gap_s(since), stream.median_gap_s() * 1000)
    return (n_tokens, n_bytes / 1e6, told_s, took_s, *gaps)


async def _post(session: aiohttp.ClientSession, url: str, body: Json) -> Json:
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        done: Json = await response.json()
        return done


if __name__ == "__main__":
    sys.exit(main())
