"""`python -m bench.gpu.busy`: a prompt that comes again while the slot that holds it is at work.

One server with two slots. The first request streams; then the same prompt comes again. The server
alone has its RAM cache, as by default.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path
from time import perf_counter

import aiohttp

from bench import rig
from bench.client import Client, Json
from bench.conversation import prompt_of
from bench.gpu.streams import streaming
from bench.report import Report, arguments_of, run_bench
from tests.support.servers.llama_server import LlamaServer

ALONE, KVFERRY = "llama-server", "kvferry"
COLUMNS = (
    *("contender", "prompt", "cold, first token s", "again, first token s", "x sooner"),
    *("again, computed", "longest gap of the stream s", "usual gap ms"),
)
_RAM_CACHE = ("--cache-ram", "8192")
_MARGIN = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.gpu.busy", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--lengths", default="3000", help="tokens of the prompts")
    parser.add_argument("--threads", type=int, default=1)
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure both contenders with a server of their own."""
    report = Report("busy", "A prompt again beside itself", list(COLUMNS), arguments_of(options))
    lengths = list(map(int, options.lengths.split(",")))
    for contender in (ALONE, KVFERRY):
        async with AsyncExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
            server = LlamaServer(
                options.model,
                slots=2,
                ctx=2 * (lengths[-1] + _MARGIN),
                kv_dir=home / "kv",
                threads=options.threads,
                extra_args=_RAM_CACHE if contender == ALONE else (),
            )
            await stack.enter_async_context(server)
            url = server.url
            if contender == KVFERRY:
                way = rig.kvferry(contender, [server.url], home, kv_dir=home / "kv")
                url = (await stack.enter_async_context(way)).url
            session = await stack.enter_async_context(aiohttp.ClientSession())
            for number, n_tokens in enumerate(lengths):
                prompt = await asyncio.to_thread(_prompt, server.url, n_tokens, number)
                report.add(contender, n_tokens, *await _twice(session, url, prompt))
    return report


def _prompt(url: str, n_tokens: int, seed: int) -> list[int]:
    with closing(Client(url)) as client:
        return prompt_of(client, n_tokens, seed)


async def _twice(
    session: aiohttp.ClientSession, url: str, prompt: list[int]
) -> tuple[float, float, float, int, float, float]:
    async with streaming(session, url, {"prompt": prompt}) as stream:
        cold_s = stream.times[0] - stream.begun
        begun = perf_counter()
        body: Json = {"prompt": prompt, "n_predict": 1, "temperature": 0}
        async with session.post(f"{url}/completion", json=body) as response:
            response.raise_for_status()
            answer: Json = await response.json()
        again_s = perf_counter() - begun
        gap_s = stream.longest_gap_s(begun)
        computed = answer["timings"]["prompt_n"]
        usual_ms = stream.median_gap_s() * 1000
        return cold_s, again_s, cold_s / again_s, computed, gap_s, usual_ms


if __name__ == "__main__":
    sys.exit(main())
