"""A plot of the table: computed tokens against the oracle's, times to the first token, wall time.

The plot depends on the table alone: the same table gives the same file, byte by byte.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.report import Cell

Row = Mapping[str, Cell]
_OURS, _OTHERS = "tab:blue", "tab:gray"
_PERCENTILES = (("TTFT p50 ms", "o"), ("p90", "D"), ("p99", "|"))


def draw(rows: Sequence[Row], title: str, path: Path) -> str:
    """Write PNG or SVG, by the suffix of `path`. Return a note on the result."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed"
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = title  # else the ids in the file are random
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    shown = _of_each(rows)
    places = range(len(shown))
    colours = [_OURS if str(row["contender"]).startswith("kvferry") else _OTHERS for row in shown]
    size = (13, 1.6 + 0.32 * len(shown))
    figure, (tokens, times, walls) = pyplot.subplots(1, 3, figsize=size, sharey=True)
    tokens.barh(places, [row["computed"] for row in shown], color=colours)
    oracle = [row["oracle"] for row in shown]
    tokens.plot(oracle, places, "k|", markersize=16, label="a cache without limits")
    tokens.set_yticks(places, [row["contender"] for row in shown])
    tokens.invert_yaxis()
    tokens.set_xlabel("prompt tokens computed")
    for column, marker in _PERCENTILES:
        name = column.removeprefix("TTFT ").removesuffix(" ms")
        at = [row[column] for row in shown]
        times.scatter(at, places, c=colours, marker=marker, s=40, label=name)
    times.set_xscale("log")
    for axis_formatter in (times.xaxis.set_major_formatter, times.xaxis.set_minor_formatter):
        axis_formatter(lambda value, _: f"{value:,.0f}" if f"{value:.0f}"[0] in "125" else "")
    times.set_xlabel("to the first token, ms")
    walls.barh(places, [row["wall s"] for row in shown], color=colours)
    for place, row in zip(places, shown, strict=True):
        walls.plot(_range(rows, row), [place, place], color="black")
    walls.set_xlabel("all of it, s; line: least and most of the runs")
    for axes in (tokens, times, walls):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    for axes in (tokens, times):
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no program name, so that the file depends on the table alone.
    nothing = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    figure.savefig(path, dpi=100, metadata=nothing)
    pyplot.close(figure)
    return f"plot: {path.name}"


def _of_each(rows: Sequence[Row]) -> list[Row]:
    """Return one row of each contender: the medians, which come last, or its only run."""
    return list({row["contender"]: row for row in rows}.values())


def _range(rows: Sequence[Row], of: Row) -> list[float]:
    walls = [row["wall s"] for row in rows if row["contender"] == of["contender"]]
    found = [wall for wall in walls if isinstance(wall, float)]
    return [min(found), max(found)]
