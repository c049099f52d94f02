"""`python -m bench.gpu.device_tests FILE...`: the tests of saved states, with layers on a device.

All layers on the device, then one: a state then comes from both memories.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from time import perf_counter

from bench.report import Report, arguments_of, run_bench
from tests.support.paths import ROOT

# Only these: the machine's own plugins are not ours to trust (pytest-benchmark warns beside xdist,
# and a warning is an error).
_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "xdist.plugin")
_LAYERS = "LLAMA_ARG_N_GPU_LAYERS"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests and return the exit code: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="bench.gpu.device_tests", description=__doc__)
    parser.add_argument("tests", nargs="+")
    failed: list[bool] = []

    def measure(options: argparse.Namespace) -> Report:
        report = asyncio.run(_measure(options))
        failed.append(any(row[2] or not row[1] for row in report.rows))
        return report

    return run_bench(parser, measure, argv) or int(failed[0])


async def _measure(options: argparse.Namespace) -> Report:
    columns = ["layers on the device", "passed", "failed", "seconds"]
    report = Report(
        "device tests", "Save, restore, cut, pad, restream", columns, arguments_of(options)
    )
    plugins = [option for name in _PLUGINS for option in ("-p", name)]
    env = {"PYTHON": sys.executable, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for layers in ("99", "1") if _LAYERS in os.environ else ("0",):
        begun = perf_counter()
        done = await asyncio.to_thread(
            subprocess.run,
            [str(ROOT / "tests" / "run"), "-m", "real", *plugins, *options.tests],
            env=os.environ | env | {_LAYERS: layers},
            stdout=subprocess.PIPE,
            text=True,
        )
        print(done.stdout)
        counts = {
            word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)
        }
        wrong = counts.get("failed", 0) + counts.get("error", 0) if done.returncode else 0
        report.add(layers, counts.get("passed", 0), wrong, perf_counter() - begun)
    return report


if __name__ == "__main__":
    sys.exit(main())
