"""`python -m bench.instructions`: processor instructions of the router for each request.

`valgrind --tool=callgrind` counts them, for changes that save little. Beside other work the count
repeats to half a percent, CPU time only to ten. On a machine that keeps its processes waiting the
count repeats to three percent, because event-loop iterations fall differently. The kernel's share
is not counted.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter

from bench import rig
from bench.client import Client
from bench.latency import CHAT, words_of
from bench.report import Report, arguments_of, run_bench

COLUMNS = ("route", "policy", "n", "instructions/request", "CPU ms/request")
POLICIES = ["prefer_idle_slot_with_global_restore", "passthrough"]
EMBEDDINGS = "/v1/embeddings"
_CONVERSATIONS = 20  # known prompts, sent again and again
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
# The router's periodic work goes by the clock: less of it here, and `_asked` subtracts the rest.
_QUIET = "store: {idle_save_after: off}\nhealth: {interval: 1h}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.instructions", description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=5.0)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--route", choices=[CHAT, EMBEDDINGS], default=CHAT)
    parser.add_argument("--by-clock", action="store_true", help="CPU time, with --requests 2000")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Measure each policy with a server and a router of its own."""
    extra = ["--embeddings", "--pooling", "mean"] if options.route == EMBEDDINGS else []
    report = Report("instructions", "Cost of a request", list(COLUMNS), arguments_of(options))
    for policy in options.policies.split(","):
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
            kv_dir = folder / "kv"
            server = await stack.enter_async_context(
                rig.llama(slots=2, ctx_per_slot=2048, kv_dir=kv_dir, extra_args=extra)
            )
            under = ["env", "PYTHONHASHSEED=0"]
            if not options.by_clock:
                under += ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
                under += [f"--callgrind-out-file={folder}/counted"]
            way = rig.kvferry(
                *("kvferry", [server.url], folder),
                kv_dir=None if policy == "passthrough" else kv_dir,
                policy=policy,
                more=_QUIET,
                under=under,
            )
            proxy = await stack.enter_async_context(way)
            count = _cpu_ms if options.by_clock else _instructions
            found = await asyncio.to_thread(_asked, proxy, options, count, folder)
            each = found / options.requests
            cells = (None, each) if options.by_clock else (round(each), None)
            report.add(options.route, policy, options.requests, *cells)
    return report


def _asked(
    proxy: rig.Proxy,
    options: argparse.Namespace,
    count: Callable[[rig.Proxy, Path], float],
    folder: Path,
) -> float:
    """Return the cost of all requests after the warm-up, less the router's idle cost."""
    client = Client(proxy.url)
    _ask(client, options.route, options.warm_up)
    marks = [(perf_counter(), count(proxy, folder))]
    _ask(client, options.route, options.requests)
    marks.append((perf_counter(), count(proxy, folder)))
    client.close()
    threading.Event().wait(options.idle_seconds)
    marks.append((perf_counter(), count(proxy, folder)))
    (start, before), (over, after), (end, idle) = marks
    return after - before - (idle - after) / (end - over) * (over - start)


def _ask(client: Client, route: str, n: int) -> None:
    for number in range(n):
        text = words_of(number % _CONVERSATIONS)
        if route == EMBEDDINGS:
            client.post(route, {"model": "any", "input": text})
            continue
        messages = [{"role": "user", "content": text}]
        client.post(CHAT, {"model": "any", "messages": messages, "max_tokens": 4, "seed": 1})


def _cpu_ms(proxy: rig.Proxy, _: Path) -> float:
    return proxy.cpu_s() * 1000


def _instructions(proxy: rig.Proxy, folder: Path) -> float:
    """Return the instructions so far; counting begins with the first call."""
    for order in (("-i", "on"), ("-d",)):
        subprocess.run(
            ["callgrind_control", *order, str(proxy.pid)], check=True, stdout=subprocess.DEVNULL
        )
    totals = [_TOTAL.search(dump.read_text()) for dump in folder.glob("counted.*")]
    return sum(float(total[1]) for total in totals if total is not None)


if __name__ == "__main__":
    sys.exit(main())
