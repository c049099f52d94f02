"""A picture of the table: computed tokens against the oracle's, and times to the first token."""

from collections.abc import Sequence
from pathlib import Path

from bench.fleet.measure import Run


def draw(runs: Sequence[Run], title: str, path: Path) -> str:
    """Write PNG or SVG, by the ending of `path`. Returns a note on what came of it."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, times) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    names = [f"{run.contender.name} {run.number}" for run in runs]
    bars.bar(names, [run.counted.computed for run in runs], label="computed")
    bars.plot(names, [run.oracle for run in runs], "k_", markersize=24, label="oracle")
    bars.set_ylabel("prompt tokens")
    bars.tick_params(axis="x", rotation=30)
    bars.legend()
    for name, run in zip(names, runs, strict=True):
        ttft = sorted(sample.ttft_s for sample in run.samples if sample.ttft_s is not None)
        shares = [(number + 1) / len(ttft) for number in range(len(ttft))]
        times.step(ttft, shares, where="post", label=name)
    times.set_xscale("log")
    times.set_xlabel("time to the first token, s")
    times.set_ylabel("share of requests")
    times.legend(fontsize="small")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"plot: {path.name}"
