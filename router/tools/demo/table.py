"""The result of `kvferry demo` as a table of at most 100 columns and as one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from router.tools.demo.chat import ChatAnswer

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One request, sent without and with kvferry."""

    what: str
    without: ChatAnswer
    with_: ChatAnswer

    @property
    def resident(self) -> int:
        """Return the reused tokens that were resident in the slot."""
        return 0 if self._moved else self.with_.cached_tokens

    @property
    def snapshot(self) -> int:
        """Return the reused tokens that came from a state file."""
        return self.with_.cached_tokens if self._moved else 0

    @property
    def _moved(self) -> bool:
        return self.with_.source in ("snapshot", "copy")


def table(rows: Sequence[Row]) -> Table:
    """Return a table of all rows and their sums. Token counts are those of the servers."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, show_footer=True)
    made.add_column("#", justify="right")
    made.add_column("request", "all (TTFT: mean)", ratio=1)
    titles = "prompt\ntokens without\ncomputed \nTTFT_s with\nslot kvferry\nsource \nresident"
    titles += " \nsnapshot \ncomputed \nTTFT_s"
    cells = [_cells(row) for row in rows]
    for title, column in zip(titles.split(" "), zip(*cells, strict=True), strict=True):
        words = title.endswith(("slot", "source"))
        footer = "" if words else _footer(column)
        justify: Literal["left", "right"] = "left" if words else "right"
        made.add_column(title.replace("_", " "), footer, justify=justify, no_wrap=True)
    for number, (row, values) in enumerate(zip(rows, cells, strict=True), 1):
        made.add_row(str(number), row.what, *map(_shown, values))
    return made


def _cells(row: Row) -> tuple[int | float | str, ...]:
    without, with_ = row.without, row.with_
    return (
        *(with_.prompt_tokens, without.computed_tokens, without.ttft_s),
        *(f"{with_.backend}/{with_.slot}", with_.source, row.resident, row.snapshot),
        *(with_.computed_tokens, with_.ttft_s),
    )


def _footer(column: Sequence[int | float | str]) -> str:
    """Return the sum of tokens, and the mean of times: clients wait for single requests."""
    numbers = [value for value in column if not isinstance(value, str)]
    tokens = all(isinstance(value, int) for value in numbers)
    return _shown(sum(numbers) if tokens else fmean(numbers))


def _shown(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return value if isinstance(value, str) else f"{value:,}" if value else "-"


def summary(rows: Sequence[Row]) -> str:
    """Return the totals as one sentence."""
    before = sum(row.without.computed_tokens for row in rows)
    after = sum(row.with_.computed_tokens for row in rows)
    slow = fmean(row.without.ttft_s for row in rows)
    fast = fmean(row.with_.ttft_s for row in rows)
    fewer, sooner = before / max(after, 1), slow / max(fast, 1e-9)
    return (
        f"kvferry: {after:,} prompt tokens computed instead of {before:,} ({fewer:.1f} times "
        f"fewer); first token after {fast:.2f} s on average instead of {slow:.2f} s "
        f"({sooner:.1f} times sooner)."
    )
