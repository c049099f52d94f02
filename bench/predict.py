"""`python -m bench.predict`: `kvferry simulate` against a real run of the same trace.

A recorded trace is sent at its own times to kvferry in front of real llama-servers. Then the same
trace is simulated with the rates that kvferry has learned meanwhile, and the results are compared.
"""

import argparse
import asyncio
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.client import Client, Json
from bench.fleet import traces
from bench.fleet.contenders import KVFERRY, Contender, Shape, running
from bench.fleet.counters import Counts, counts, settle
from bench.fleet.drive import Driver, Sample
from bench.report import Report, arguments_of, median, percentile, run_bench
from router.core.model.policy import UNLIMITED, Policy, PolicyName
from router.tools.simulate.accounting import Result
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.hardware import PRESETS, Hardware
from router.tools.simulate.setup import Setup
from router.tools.simulate.trace import TraceError, TraceRow, TraceWorkload, read_trace
from tests.support.models.tiny_models import tiny_model

COLUMNS = ("what", "real", "predicted", "error %")
_MARGIN = 512  # of a slot, in tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench and return the exit code."""
    parser = argparse.ArgumentParser(prog="bench.predict", description=__doc__)
    parser.add_argument(
        "--trace", type=Path, required=True, metavar="FILE", help="in Mooncake's format"
    )
    parser.add_argument("--limit", type=int, default=300, help="requests")
    parser.add_argument("--scale", type=int, default=8, help="trace tokens for each token sent")
    parser.add_argument("--speed", type=float, default=1.0, help="times faster than recorded")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=2, help="of each server")
    return run_bench(parser, lambda options: asyncio.run(measure(options)), argv)


async def measure(options: argparse.Namespace) -> Report:
    """Compare one real run with one simulation."""
    report = Report("predict", "Simulated and real", list(COLUMNS), arguments_of(options))
    try:
        lines = read_trace(options.trace, options.limit)
    except (OSError, TraceError) as error:
        raise SystemExit(f"bench.predict: argument --trace: {error}") from None
    longest = max(line.input_tokens + line.output_tokens for line in lines) // options.scale
    model = (await asyncio.to_thread(tiny_model, "llama")).path
    shape = Shape(model, options.servers, options.slots, longest + _MARGIN, threads=1)
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as home:
        samples, counted, state = await _real(shape, options, Path(home))
    failed = [sample.problem for sample in samples if sample.ending != "ok"]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    hardware = _hardware([each["rates"] for each in state["backends"]], options.scale)
    predicted = await asyncio.to_thread(_simulated, lines, shape, hardware, options)
    prompt = sum(sample.prompt_tokens or 0 for sample in samples)
    ttft = [sample.ttft_s * 1000 for sample in samples if sample.ttft_s is not None]
    scale = options.scale
    rows = [
        ("prompt tokens", prompt, predicted.prompt_tokens / scale),
        ("computed tokens", counted.computed, predicted.computed_tokens / scale),
        ("reused, %", 100 * (1 - counted.computed / prompt), 100 * predicted.reused_share),
        *(
            (f"TTFT p{p} ms", percentile(ttft, p), percentile(predicted.ttft_s, p) * 1000)
            for p in (50, 90, 99)
        ),
        ("restores", counted.restores or 0, predicted.restores),
        ("saves", counted.saves or 0, sum(predicted.saves.values())),
        (
            "moved MB",
            (counted.moved_bytes or 0) / 1e6,
            (predicted.saved_bytes + predicted.restored_bytes) / 1e6,
        ),
    ]
    for what, real, said in rows:
        report.add(what, real, said, 100 * (said - real) / real if real else None)
    report.notes.append(
        f"{len(samples)} requests on {shape.servers} servers with {shape.slots} slots; learned: "
        f"{1 / hardware.prefill_s / scale:,.0f} prompt tokens/s, "
        f"{1 / hardware.decode_s / scale:,.0f} answer tokens/s, "
        f"{hardware.bytes_per_token * scale:,} bytes/token, save "
        f"{hardware.save_bytes_per_s / 1e6:,.0f} MB/s, restore "
        f"{hardware.restore_bytes_per_s / 1e6:,.0f} MB/s"
    )
    return report


async def _real(
    shape: Shape, options: argparse.Namespace, home: Path
) -> tuple[list[Sample], Counts, Json]:
    async with running(Contender(KVFERRY), shape, home) as kvferry:
        client = Client(kvferry.servers[0])
        words = await asyncio.to_thread(traces.vocabulary, client)
        client.close()
        load = traces.build(
            *(options.trace, words),
            scale=options.scale,
            speed=options.speed,
            limit=options.limit,
            raw=True,
        )
        before = await asyncio.to_thread(counts, kvferry)
        driver = Driver(kvferry.urls, load, real_answers=False)
        await driver.open()
        after = await settle(kvferry)
        client = Client(kvferry.urls[0])
        state: Json = (await asyncio.to_thread(client.get, "/kvferry/state")).json()
        client.close()
    return driver.samples, after.since(before), state


def _hardware(rates: Sequence[Json], scale: int) -> Hardware:
    """Return the costs of one server per trace token; `scale` of these are one token sent."""

    def middle(key: str) -> float:
        return median([float(each[key]) for each in rates])

    plain = PRESETS["cpu-small"]
    size = 1000 * middle("bytes_per_token")

    def speed(seconds: float) -> float:
        return size / max(seconds - plain.transfer_s, seconds / 10, 1e-6)

    return dataclasses.replace(
        plain,
        prefill_s=1 / middle("prefill_tokens_per_s") / scale,
        prefill_depth_s=0.0,
        decode_s=1 / middle("output_tokens_per_s") / scale,
        decode_more_s=0.0,
        bytes_per_token=round(size / 1000 / scale),
        save_bytes_per_s=speed(middle("save_1000_tokens_s")),
        restore_bytes_per_s=speed(middle("restore_1000_tokens_s")),
        batch=plain.batch * scale,
    )


def _simulated(
    lines: list[TraceRow], shape: Shape, hardware: Hardware, options: argparse.Namespace
) -> Result:
    scale: int = options.scale
    plain = Setup(hardware)
    setup = dataclasses.replace(
        plain,
        servers=shape.servers,
        slots=shape.slots,
        n_ctx=shape.ctx_per_slot * scale,
        policy=Policy(name=PolicyName.PREFER_IDLE),
        budget_bytes=UNLIMITED,
        min_tokens=plain.min_tokens * scale,
        scale=scale,
    )
    source = partial(TraceWorkload, lines, scale, options.speed)
    experiment = Experiment(setup, source, (PolicyName.PREFER_IDLE,), (UNLIMITED,))
    (run,) = experiment.runs()
    return experiment.run(run)


if __name__ == "__main__":
    sys.exit(main())
