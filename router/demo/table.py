"""The result of `kvferry demo` as a table of at most 100 columns, and as one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from router.demo.chat import Answer

WIDTH = 100


@dataclass(frozen=True, slots=True)
class Row:
    """One request, sent twice."""

    what: str
    without: Answer
    with_: Answer

    @property
    def resident(self) -> int:
        """Tokens that were in the slot already."""
        return 0 if self._moved else self.with_.cached_tokens

    @property
    def snapshot(self) -> int:
        """Tokens that were restored from a state file."""
        return self.with_.cached_tokens if self._moved else 0

    @property
    def _moved(self) -> bool:
        return self.with_.source in ("snapshot", "copy")


def table(rows: Sequence[Row]) -> Table:
    """All rows and their sum. Tokens are as the servers reported them."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_footer=True, pad_edge=False)
    made.add_column("#", justify="right", no_wrap=True)
    made.add_column("request", "all", ratio=1)
    numbers = {
        "prompt\ntokens": [row.with_.prompt_tokens for row in rows],
        "without:\ncomputed": [row.without.computed_tokens for row in rows],
    }
    for title, values in numbers.items():
        made.add_column(title, f"{sum(values):,}", justify="right", no_wrap=True)
    made.add_column("\nTTFT", _mean([row.without for row in rows]), justify="right", no_wrap=True)
    made.add_column("with:\nslot", no_wrap=True)
    made.add_column("\nsource", no_wrap=True)
    numbers = {
        "\nresident": [row.resident for row in rows],
        "\nsnapshot": [row.snapshot for row in rows],
        "\ncomputed": [row.with_.computed_tokens for row in rows],
    }
    for title, values in numbers.items():
        made.add_column(title, f"{sum(values):,}", justify="right", no_wrap=True)
    made.add_column("\nTTFT", _mean([row.with_ for row in rows]), justify="right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        made.add_row(*_cells(number, row))
    return made


def _cells(number: int, row: Row) -> list[str]:
    without, with_ = row.without, row.with_
    return [
        str(number),
        row.what,
        f"{with_.prompt_tokens:,}",
        f"{without.computed_tokens:,}",
        _seconds(without.ttft_s),
        f"{with_.backend}/{with_.slot}",
        with_.source,
        f"{row.resident:,}" if row.resident else "",
        f"{row.snapshot:,}" if row.snapshot else "",
        f"{with_.computed_tokens:,}",
        _seconds(with_.ttft_s),
    ]


def summary(rows: Sequence[Row]) -> str:
    """What the table comes to."""
    before = sum(row.without.computed_tokens for row in rows)
    after = sum(row.with_.computed_tokens for row in rows)
    slow = fmean(row.without.ttft_s for row in rows)
    fast = fmean(row.with_.ttft_s for row in rows)
    fewer, sooner = before / max(after, 1), slow / max(fast, 1e-9)
    return (
        f"kvferry: {after:,} prompt tokens computed instead of {before:,} ({fewer:.1f} times "
        f"fewer); first token after {_seconds(fast)} on average instead of {_seconds(slow)} "
        f"({sooner:.1f} times sooner)."
    )


def _mean(answers: Sequence[Answer]) -> str:
    """The sum would mean nothing: nobody waits for all of them."""
    return f"ø {_seconds(fmean(answer.ttft_s for answer in answers))}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"
