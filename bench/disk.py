"""`python -m bench.disk`: what conversations take and write on a disk, with the defaults.

A real llama-server of SmolLM2, or of another model, behind `kvferry serve`.

1. shared: conversations on one prompt. Bytes of all directories some time after the last answer,
   against one state.
2. day: one agent, turn by turn. Bytes that llama-server and kvferry wrote, as /proc counts them,
   against the bytes of its new tokens.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from bench import rig
from bench.client import Client
from bench.report import Report, arguments_of, run_bench
from router.tools.demo.model import small_model

COLUMNS = ("part", "n", "tokens", "MB of one state", "MB", "x one state", "MB written", "x new")
_VOCABULARY = range(1000, 40_000)
_ANSWER = 8  # tokens
_MB = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.disk", description=__doc__)
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=3000, help="tokens that all share")
    parser.add_argument("--own", type=int, default=20, help="tokens of each conversation after it")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds after the last answer")
    parser.add_argument("--turns", type=int, default=40, help="of the agent")
    parser.add_argument("--growth", type=int, default=200, help="tokens of each turn")
    parser.add_argument("--gap", type=float, nargs="*", default=[1.0], help="seconds of each day")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="for the KV directory")
    parser.add_argument("--model", type=Path, help="a GGUF file; SmolLM2 unless given")
    parser.add_argument("--more", default="", help="YAML for the configuration")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure both parts, each with a server and a directory of its own."""
    report = Report("disk", "Disk", list(COLUMNS), arguments_of(options))
    for gap_s in [*([None] if options.conversations else []), *options.gap]:
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-", dir=options.disk) as scratch:
            folder = Path(scratch)
            kv_dir = folder / "kv"
            kv_dir.mkdir(mode=0o700)
            model = options.model or await small_model(lambda _: None)
            async with (
                rig.llama(
                    slots=options.slots, ctx_per_slot=16_384, kv_dir=kv_dir, model=model
                ) as server,
                rig.kvferry(
                    "kvferry", [server.url], folder, kv_dir=kv_dir, more=options.more
                ) as proxy,
            ):
                with closing(Client(proxy.url)) as client:
                    pids = [proxy.pid, server.pid or 0]
                    if gap_s is None:
                        await _shared(report, options, client, pids, folder)
                    else:
                        await _day(report, options, client, pids, gap_s)
    return report


async def _ask(client: Client, tokens: Sequence[int]) -> list[int]:
    """Return a prompt with its answer."""
    body = {"prompt": list(tokens), "n_predict": _ANSWER, "return_tokens": True, "seed": 1}
    reply = await asyncio.to_thread(client.post, "/completion", body)
    return [*tokens, *reply.json()["tokens"]]


async def _shared(
    report: Report, options: argparse.Namespace, client: Client, pids: list[int], folder: Path
) -> None:
    draw = random.Random(1)
    prompt = draw.choices(_VOCABULARY, k=options.prompt)
    before, tokens = _written(pids), prompt
    for _ in range(options.conversations):
        own = draw.choices(_VOCABULARY, k=options.own)
        tokens = await _ask(client, prompt + own)
    one = _bytes_per_token(client) * len(tokens)
    await asyncio.sleep(options.wait)
    on_disk = await asyncio.to_thread(_bytes_below, folder)
    numbers = (one / _MB, on_disk / _MB, on_disk / one, (_written(pids) - before) / _MB, None)
    report.add("shared", options.conversations, len(tokens), *numbers)


async def _day(
    report: Report, options: argparse.Namespace, client: Client, pids: list[int], gap_s: float
) -> None:
    draw, tokens = random.Random(2), list[int]()
    before = _written(pids)
    for _ in range(options.turns):
        tokens += draw.choices(_VOCABULARY, k=options.growth - _ANSWER)
        tokens = await _ask(client, tokens)
        await asyncio.sleep(gap_s)
    await asyncio.sleep(options.wait)
    written = _written(pids) - before
    one = _bytes_per_token(client) * len(tokens)
    numbers = (options.turns, len(tokens), one / _MB, None, None, written / _MB, written / one)
    report.add(f"day, a turn each {gap_s:g} s", *numbers)


def _bytes_per_token(client: Client) -> float:
    """Return what a token takes in a state file, as the server tells."""
    backend = client.get("/kvferry/state").json()["backends"][0]
    return float(backend["rates"]["bytes_per_token"])


def _bytes_below(folder: Path) -> int:
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def _written(pids: Sequence[int]) -> int:
    """Return the bytes that processes have written to files on disks, so far."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += int(dict(line.split(": ") for line in lines)["write_bytes"])
    return total


if __name__ == "__main__":
    sys.exit(main())
