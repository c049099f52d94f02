"""`python -m bench.cold`: a host that is new gets from the cold tier what a lost one had.

A kvferry computes prompts and copies them; another one, with an empty KV directory, is asked to go
on with each. Beside that, prompts of the same length that nobody has, with a store that answers and
with one that hangs. `directory` is this disk, `s3` a server of the package moto, `sealed` the same
with encryption.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter

from bench.client import Json
from bench.report import Cell, Report, arguments_of, median, run_bench
from router.tools.terminal import no_log_lines
from tests.support.conversations.prompts import ids
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, RunningRouter, running
from tests.support.servers.s3_server import S3_KEYS, S3Server

COLUMNS = (
    *("place", "tokens", "prompts", "state MB", "copied s", "written / state", "reused %"),
    *("computed: first token s", "fetched: first token s", "quoted s", "fetched / quoted"),
    *("no tier: first token s", "tier hangs: first token s"),
)
NEW = 20  # tokens of the next turn
PLACES = ("directory", "s3", "sealed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.cold", description=__doc__)
    parser.add_argument("--model", type=Path, help="a .gguf file; default: a tiny model")
    parser.add_argument("--tokens", type=int, default=3000, help="of a prompt, up to 3,900")
    parser.add_argument("--prompts", type=int, default=5)
    with no_log_lines():
        return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure each place."""
    report = Report("cold", "A new host and a cold tier", list(COLUMNS), arguments_of(options))
    os.environ |= S3_KEYS
    model = options.model or tiny_model("llama").path
    for place in PLACES:
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
            async with S3Server.started() as s3:
                report.add(*await of_place(place, s3, model, Path(folder), options))
    return report


def section(place: str, s3: S3Server, folder: Path) -> str:
    """Return the configuration of a place."""
    if place == "directory":
        (folder / "cold").mkdir(mode=0o700, exist_ok=True)
        return f"cold: {{url: '{folder}/cold', after: 0}}"
    key = folder / "key"
    key.write_text("k" * 40)
    sealed = f", key_file: '{key}'" if place == "sealed" else ""
    return f"cold: {{{s3.yaml}, after: 0{sealed}}}"


async def of_place(
    place: str, s3: S3Server, model: Path, folder: Path, options: argparse.Namespace
) -> list[Cell]:
    """Return a row."""
    seeds = range(100, 100 + options.prompts)
    prompts = [ids(seed, options.tokens) for seed in seeds]
    yaml = section(place, s3, folder)
    async with router(model, folder / "a", yaml) as kvferry:
        for prompt in prompts:
            await first_token(kvferry, prompt)
        begun = perf_counter()
        state = await kvferry.until(lambda state: is_copied(state, len(prompts)))
        copied_s = perf_counter() - begun
    cold, items = state["snapshots"]["cold"], state["snapshots"]["items"]
    state_bytes = sum(item["size_bytes"] for item in items)

    fetched: list[tuple[float, float, Answer]] = []
    async with router(model, folder / "b", yaml) as kvferry:
        await first_token(kvferry, ids(1, 500))  # rates are learned
        await kvferry.until(lambda state: state["snapshots"]["cold"]["states"] >= len(prompts))
        computed = [(await first_token(kvferry, ids(500 + s, options.tokens)))[0] for s in seeds]
        for prompt in prompts:
            took_s, answer = await first_token(kvferry, [*prompt, *ids(9, NEW)])
            if "x-kvferry-fetched-from" not in answer.headers:
                raise RuntimeError("nothing was fetched: to compute it was cheaper")
            name = answer.headers["x-kvferry-request-id"]
            told = (await kvferry.get(f"/kvferry/requests/{name}")).json
            fetched.append((took_s, told["hosts"]["own"]["price_s"], answer))
    without = await alone(model, folder / "c", "", options)
    hanging: Cell = None
    if place != "directory":
        async with router(model, folder / "d", yaml) as kvferry:
            await kvferry.until(lambda state: state["snapshots"]["cold"]["states"] > 0)
            s3.pause()
            hanging = median(
                [(await first_token(kvferry, ids(700 + s, options.tokens)))[0] for s in seeds]
            )
            s3.go_on()
    return [
        place,
        options.tokens,
        len(prompts),
        state_bytes / len(items) / 1e6,
        copied_s,
        cold["written_bytes"] / state_bytes,
        100 * median([answer.cached / options.tokens for _, _, answer in fetched]),
        median(computed),
        median([took_s for took_s, _, _ in fetched]),
        median([quoted_s for _, quoted_s, _ in fetched]),
        median([took_s / quoted_s for took_s, quoted_s, _ in fetched]),
        without,
        hanging,
    ]


async def alone(model: Path, kv_dir: Path, yaml: str, options: argparse.Namespace) -> float:
    """Return the time to the first token of new prompts."""
    async with router(model, kv_dir, yaml) as kvferry:
        await first_token(kvferry, ids(1, 500))
        seeds = range(700, 700 + options.prompts)
        return median([(await first_token(kvferry, ids(s, options.tokens)))[0] for s in seeds])


@asynccontextmanager
async def router(model: Path, kv_dir: Path, yaml: str) -> AsyncIterator[RunningRouter]:
    """Yield a router with one server of two slots."""
    async with (
        LlamaServer(model, slots=2, ctx=8192, kv_dir=kv_dir) as server,
        running([("a", server.url)], kv_dir, yaml=yaml) as kvferry,
    ):
        yield kvferry


def is_copied(state: Json, n: int) -> bool:
    """Return whether so many snapshots were copied."""
    cold = state["snapshots"]["cold"]
    return cold["copied"] >= n and not cold["waiting"]


async def first_token(kvferry: RunningRouter, prompt: list[int]) -> tuple[float, Answer]:
    """Ask for one token; return the seconds and the answer."""
    begun = perf_counter()
    answer = await kvferry.complete(prompt, n_predict=1)
    took_s = perf_counter() - begun
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {answer.body[:300]!r}")
    await kvferry.until_quiet()
    return took_s, answer


if __name__ == "__main__":
    sys.exit(main())
