"""Parts that all benches share: percentiles, one table on the terminal, one JSON file.

A time means nothing without its baseline: rows have ratios to a row of the same run.
"""

import argparse
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table as RichTable

Cell = str | int | float | None


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by nearest rank: one of `values`; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)]


def median(values: Sequence[float]) -> float:
    """Return the 50th percentile."""
    return percentile(values, 50)


@dataclass
class Report:
    """One table, the arguments of its run, and notes for its reader."""

    bench: str
    title: str
    columns: list[str]
    arguments: dict[str, object]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    # The parts in which a wide table is shown: title and columns of each.
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    load_before: float = field(default_factory=lambda: os.getloadavg()[0])
    machine: str = ""  # of a run that was written; empty: this machine, now

    def add(self, *cells: Cell) -> None:
        """Add a row; None is an empty cell. Raises ValueError for a wrong number of cells."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append([None if isinstance(c, float) and math.isnan(c) else c for c in cells])

    def show(self, console: Console | None = None) -> None:
        """Print the table."""
        # Wide enough for every column if the output is a file.
        console = console or Console(width=None if os.isatty(1) else 140)
        for title, columns in self._shown().items():
            console.print(self._table(title, columns))
        for note in [*self.notes, self.machine or machine_line(self.load_before)]:
            console.print(f"- {note}", markup=False, highlight=False)

    def records(self) -> list[dict[str, Cell]]:
        """Return each row as a mapping from column to cell."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Return what `write` wrote, to be shown: `markdown` repeats the machine of the run."""
        rows = content["rows"]
        columns = list(rows[0]) if rows else []
        report = cls(content["bench"], content["title"], columns, content["arguments"])
        report.rows = [list(row.values()) for row in rows]
        report.notes, report.machine = content["notes"], content["machine"]
        report.parts = content["parts"]
        return report

    def _shown(self) -> Mapping[str, Sequence[str]]:
        return self.parts or {self.title: self.columns}

    def _cells(self, columns: Sequence[str]) -> list[list[Cell]]:
        columns_at = [self.columns.index(column) for column in columns]
        return [[row[at] for at in columns_at] for row in self.rows]

    def _table(self, title: str, columns: Sequence[str]) -> RichTable:
        table, rows = RichTable(title=title), self._cells(columns)
        for index, column in enumerate(columns):
            left = all(isinstance(row[index], str | None) for row in rows)
            table.add_column(column, justify="left" if left else "right")
        firsts = [row[0] for row in rows]
        grouped = len(set(firsts)) < len(firsts)
        for index, row in enumerate(rows):
            if grouped and index and row[0] != firsts[index - 1]:
                table.add_section()
            table.add_row(*map(shown, row))
        return table

    def markdown(self) -> str:
        """Return the table as Markdown for docs/benchmarks."""
        lines: list[str] = []
        for columns in self._shown().values():
            header, *rows = (
                f"| {' | '.join(map(shown, row))} |" for row in (columns, *self._cells(columns))
            )
            lines += [header, "|---" * len(columns) + "|", *rows, ""]
        lines += [
            f"- {note}" for note in [*self.notes, self.machine or machine_line(self.load_before)]
        ]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Write the table as JSON, with cells as numbers."""
        content = {
            "bench": self.bench,
            "title": self.title,
            "machine": machine_line(self.load_before),
            "arguments": self.arguments,
            "rows": self.records(),
            "notes": self.notes,
            "parts": self.parts,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")


def shown(cell: Cell) -> str:
    """Return a cell as text: three significant digits are more than a run repeats."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def machine_line(load_before: float) -> str:
    """Describe the machine, with its one-minute load before and after the run."""
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, "
        f"load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after"
    )


def run_bench(
    parser: argparse.ArgumentParser,
    bench: Callable[[argparse.Namespace], Report],
    argv: Sequence[str] | None,
) -> int:
    """Parse, measure, print, and write the files that the options name."""
    add_output(parser)
    options = parser.parse_args(argv)
    report = bench(options)
    report.show()
    save(report, options)
    return 0


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the options that `save` reads."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table as Markdown")


def save(report: Report, options: argparse.Namespace, brief: Report | None = None) -> None:
    """Write the files that the options name. `brief`: a shorter report for the Markdown."""
    if options.output is not None:
        report.write(options.output)
    if options.markdown is not None:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text((brief or report).markdown())


def arguments_of(options: argparse.Namespace) -> dict[str, object]:
    """Return the options for the report, without the names of its files."""
    where = ("output", "markdown")
    return {name: value for name, value in vars(options).items() if name not in where}
