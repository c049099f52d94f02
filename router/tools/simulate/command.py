"""`kvferry simulate`: parse the options, run the experiment, write the results."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from router.base.types import MemoryKind
from router.config import values
from router.config.values import format_size
from router.core.model.policy import Policy, PolicyName
from router.core.model.request_queue import QueueLimits
from router.tools.simulate import report
from router.tools.simulate.accounting import Result
from router.tools.simulate.experiment import Experiment
from router.tools.simulate.machines.hardware import PRESETS, Hardware, OnDemand
from router.tools.simulate.requests import RequestSource
from router.tools.simulate.setup import Setup
from router.tools.simulate.trace import BLOCK_TOKENS, TraceError, TraceWorkload, read_trace
from router.tools.simulate.workload import WORKLOADS, Workload
from router.tools.terminal import Progress, output

OK, CANNOT_WORK, BAD_INPUT = 0, 1, 2
GIB = 1024**3

# `passthrough` does not use the scheduler, so there is nothing to simulate.
_POLICIES = {
    spelling: name
    for name in PolicyName
    if name is not PolicyName.PASSTHROUGH
    for spelling in (str(name), name.name.lower())
}
_DEFAULT = Policy()
_TRACE_ONLY = ("limit", "scale", "speed", "repeat")
_WORKLOAD_ONLY = ("requests", "conversations")

_AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `kvferry simulate`, which docs/simulate.md explains."""
    what = command.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format")
    what.add_argument("--workload", choices=sorted(WORKLOADS), help="made-up clients, closed loop")
    add = command.add_argument
    whole, above_zero, size = (
        _of(kind) for kind in (values.PositiveCount, _AboveZero, values.Size)
    )
    count, seconds, or_off = (
        _of(kind) for kind in (values.Count, values.PositiveSeconds, values.SecondsOrOff)
    )
    add("--limit", type=whole, metavar="N", help="trace: the first N requests")
    add("--scale", type=whole, metavar="N", help="trace: simulate one token for N; faster")
    add("--speed", type=above_zero, metavar="X", help="trace: X times as many requests a second")
    add("--repeat", type=whole, metavar="N", help="trace: N times, each time with new prompts")
    add("--requests", type=whole, metavar="N", help="workload: total requests; default 2000")
    add("--conversations", type=whole, metavar="N", help="workload: at a time; default 2 a slot")
    add("--seed", type=count, default=0, metavar="N", help="workload: random seed; default 0")
    add("--servers", type=whole, default=4, metavar="N", help="simulated; default 4")
    add("--models", type=whole, metavar="N", help="servers on demand, one a model; not --servers")
    add("--loaded", type=whole, metavar="N", help="models: loaded at a time; default 1")
    add("--load-time", type=seconds, default=10.0, metavar="TIME", help="models; default 10s")
    add("--stop-time", type=seconds, default=1.0, metavar="TIME", help="models; default 1s")
    add(
        "--model-max-wait",
        type=seconds,
        default=120.0,
        metavar="TIME",
        help="models: as `max_wait` of a model in the configuration file",
    )
    add("--slots", type=whole, default=4, metavar="N", help="slots of each server; default 4")
    add("--ctx", type=whole, default=32_768, metavar="N", help="tokens of each slot; default 32768")
    kinds = [kind for kind in MemoryKind if kind is not MemoryKind.UNKNOWN]
    add("--memory", choices=kinds, default="full", help="memory kind; default full")
    add("--rates", choices=sorted(PRESETS), default="gpu-8b", help="costs preset; default gpu-8b")
    add("--prefill", type=above_zero, metavar="N", help="override: prompt tokens/s")
    add("--decode", type=above_zero, metavar="N", help="override: answer tokens/s of a stream")
    add("--bytes-per-token", type=size, metavar="SIZE", help="override: state of one token")
    add("--save-rate", type=size, metavar="SIZE", help="override: bytes saved per second")
    add("--restore-rate", type=size, metavar="SIZE", help="override: bytes restored")
    add(
        *("--policy", "--policies"),
        action="append",
        choices=sorted(_POLICIES),
        metavar="NAME",
        help=f"repeatable; default all: {', '.join(p.name.lower() for p in _all_policies())}",
    )
    add(
        "--budget",
        type=_of(values.SizeOrNoLimit),
        action="append",
        metavar="SIZE",
        help="for snapshots, such as 16GiB; 0: none, -1: no limit; repeatable; default 32GiB",
    )
    # Same spelling and defaults as in the configuration file.
    for flag, kind, default in (
        ("--max-wait", seconds, _DEFAULT.max_wait_s),
        ("--coalesce-above", or_off, _DEFAULT.coalesce_above_s),
        ("--prefill-chunk", or_off, _DEFAULT.prefill_chunk_s),
        ("--idle-save-after", or_off, _DEFAULT.idle_save_after_s),
        ("--min-tokens", count, 128),
        ("--max-requests", _of(values.CountOrNoLimit), 1024),
        ("--deadline", or_off, 600.0),
        ("--reuse-probability", _of(values.Ratio), _DEFAULT.reuse_probability),
    ):
        add(flag, type=kind, default=default, metavar="VALUE", help="as in the configuration file")
    add("--explain", action="store_true", help="show where recomputed tokens had been")
    add("--output", type=Path, metavar="DIR", help="write simulate.json there")
    command.set_defaults(run=simulate)


def simulate(options: argparse.Namespace) -> int:
    """Run the experiment, print and write its results. Returns the exit code."""
    if problem := _misfit(options):
        return _refuse(problem)
    try:
        experiment = _experiment(options)
    except TraceError as error:
        return _refuse(f"--trace: {error}")
    except OSError as error:
        return _refuse(f"--trace: {options.trace}: {error.strerror}")
    if options.output is not None:
        try:
            options.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return _refuse(f"--output: {options.output}: {error.strerror}")
    with Progress() as progress:
        results = [_run(experiment, setup, progress) for setup in experiment.runs()]
    console = output()
    report.show(console, results)
    if options.output is not None:
        file = options.output / "simulate.json"
        file.write_bytes(report.as_json(_settings(options), results))
        console.print(f"\nWritten: {file}", soft_wrap=True)
    return OK


def _run(experiment: Experiment, setup: Setup, progress: Progress) -> Result:
    """Execute one run, and show how far it is."""
    budget = f", budget {format_size(setup.budget_bytes)}" if setup.policy.name.moves_kv else ""
    what, total = f"{setup.policy.name.name.lower()}{budget}", experiment.source().total
    progress(f"{what}: {total:,} requests")
    return experiment.run(setup, lambda n: progress(f"{what}: {n:,} of {total:,} requests"))


def _misfit(options: argparse.Namespace) -> str | None:
    """Return a message about options that are incompatible or out of range, or None."""
    wrong, other = (_WORKLOAD_ONLY, "trace") if options.trace else (_TRACE_ONLY, "workload")
    for name in wrong:
        if getattr(options, name) is not None:
            return f"--{name}: not together with --{other}"
    if options.models is not None and options.workload is None:
        return "--models: only with --workload: a trace names no models"
    if options.loaded is not None and options.models is None:
        return "--loaded: needs --models"
    scale = options.scale or 1
    if scale > BLOCK_TOKENS:
        return f"--scale: at most {BLOCK_TOKENS}, the tokens of a block, not {scale}"
    if options.workload is not None:
        habits = WORKLOADS[options.workload]
        longest = habits.system[1] + habits.question[1] + habits.answer[1]
        if options.ctx <= longest:
            return f"--ctx: {options.workload} needs more than {longest}, not {options.ctx}"
    if options.output is not None and options.output.exists() and not options.output.is_dir():
        return f"--output: {options.output} is not a directory"
    return None


def _experiment(options: argparse.Namespace) -> Experiment:
    """Build the experiment from the options. Raises OSError or TraceError."""
    scale = options.scale or 1
    policy = Policy(
        max_wait_s=options.max_wait,
        coalesce_above_s=options.coalesce_above,
        prefill_chunk_s=options.prefill_chunk,
        reuse_probability=options.reuse_probability,
        idle_save_after_s=options.idle_save_after,
    )
    setup = Setup(
        hardware=_hardware(options),
        servers=options.models or options.servers,
        slots=options.slots,
        n_ctx=options.ctx,
        memory_kind=MemoryKind(options.memory),
        policy=policy,
        min_tokens=options.min_tokens,
        queue=QueueLimits(
            sys.maxsize if options.max_requests == -1 else options.max_requests, options.deadline
        ),
        scale=scale,
        on_demand=None
        if options.models is None
        else OnDemand(
            options.loaded or 1, options.load_time, options.stop_time, options.model_max_wait
        ),
    )
    policies = tuple(dict.fromkeys(_POLICIES[name] for name in options.policy or ()))
    return Experiment(
        setup,
        _source(options, setup),
        policies or _all_policies(),
        tuple(dict.fromkeys(options.budget or (32 * GIB,))),
        explain=options.explain,
    )


def _source(options: argparse.Namespace, setup: Setup) -> Callable[[], RequestSource]:
    if options.trace is not None:
        lines = read_trace(options.trace, options.limit)
        return partial(
            TraceWorkload, lines, options.scale or 1, options.speed or 1.0, options.repeat or 1
        )
    return partial(
        Workload,
        WORKLOADS[options.workload],
        options.requests or 2000,
        options.conversations or 2 * setup.servers * options.slots,
        options.ctx,
        options.seed,
        setup.models,
    )


def _hardware(options: argparse.Namespace) -> Hardware:
    hardware = PRESETS[options.rates]
    given = {
        "prefill_s": 1 / options.prefill if options.prefill else None,
        "decode_s": 1 / options.decode if options.decode else None,
        "bytes_per_token": options.bytes_per_token,
        "save_bytes_per_s": options.save_rate,
        "restore_bytes_per_s": options.restore_rate,
    }
    return replace(hardware, **{key: value for key, value in given.items() if value is not None})


def _all_policies() -> tuple[PolicyName, ...]:
    return tuple(name for name in PolicyName if name is not PolicyName.PASSTHROUGH)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options as they are written to the JSON."""
    return {
        key: os.fspath(value) if isinstance(value, Path) else value
        for key, value in vars(options).items()
        if key != "run"
    }


def _refuse(problem: str) -> int:
    sys.stderr.write(f"kvferry simulate: {problem}\n")
    return BAD_INPUT


def _of(kind: Any) -> Callable[[str], Any]:
    """Return an argparse type that reads a value as the configuration file does."""
    adapter = TypeAdapter(kind)

    def convert(text: str) -> Any:
        try:
            return adapter.validate_python(int(text) if text.removeprefix("-").isdigit() else text)
        except ValidationError as error:
            told = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise argparse.ArgumentTypeError(told) from None

    return convert
