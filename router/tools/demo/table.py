"""The result of `kvferry demo` as a table of at most 100 columns and as one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
    without, with_ = [row.without for row in rows], [row.with_ for row in rows]
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, show_footer=True)
    made.add_column("#", justify="right")
    made.add_column("request", "all (TTFT: mean)", ratio=1)
    for title, footer in (
        ("prompt\ntokens", _tokens(sum(answer.prompt_tokens for answer in with_))),
        ("without\ncomputed", _tokens(sum(answer.computed_tokens for answer in without))),
        ("\nTTFT s", _mean(without)),
        ("with\nslot", ""),
        ("kvferry\nsource", ""),
        ("\nresident", _tokens(sum(row.resident for row in rows))),
        ("\nsnapshot", _tokens(sum(row.snapshot for row in rows))),
        ("\ncomputed", _tokens(sum(answer.computed_tokens for answer in with_))),
        ("\nTTFT s", _mean(with_)),
    ):
        words = title.endswith(("slot", "source"))
        made.add_column(title, footer, justify="left" if words else "right", no_wrap=True)
    for number, row in enumerate(rows, 1):
        made.add_row(*_cells(number, row))
    return made


def _cells(number: int, row: Row) -> list[str]:
    without, with_ = row.without, row.with_
    return [
        str(number),
        row.what,
        _tokens(with_.prompt_tokens),
        _tokens(without.computed_tokens),
        f"{without.ttft_s:.2f}",
        f"{with_.backend}/{with_.slot}",
        with_.source,
        _tokens(row.resident),
        _tokens(row.snapshot),
        _tokens(with_.computed_tokens),
        f"{with_.ttft_s:.2f}",
    ]


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


def _tokens(number: int) -> str:
    return f"{number:,}" if number else "-"


def _mean(answers: Sequence[ChatAnswer]) -> str:
    """Return the mean TTFT. A sum would mean nothing: clients wait for single requests."""
    return f"{fmean(answer.ttft_s for answer in answers):.2f}"
