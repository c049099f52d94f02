"""The result of `kvferry demo` as a table of at most 100 columns and as one sentence."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table

from router.tools.demo.chat import ChatAnswer

WIDTH = 100
Row = tuple[str, ChatAnswer, ChatAnswer]
"""One request: what it is, the answer without kvferry, the answer with it."""

_TITLES = (
    *("prompt\ntokens", "without\ncomputed", "\nTTFT s", "with\nslot", "kvferry\nsource"),
    *("\nresident", "\nsnapshot", "\ncomputed", "\nTTFT s"),
)


def table(rows: Sequence[Row]) -> Table:
    """Return a table of all rows and their sums. Token counts are those of the servers."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, show_footer=True)
    made.add_column("#", justify="right")
    made.add_column("request", "all (TTFT: mean)", ratio=1)
    cells = [_cells(*answers) for _, *answers in rows]
    for title, column in zip(_TITLES, zip(*cells, strict=True), strict=True):
        numbers = [value for value in column if not isinstance(value, str)]
        total = sum(numbers) if all(isinstance(one, int) for one in numbers) else fmean(numbers)
        footer = _shown(total) if numbers else ""
        made.add_column(title, footer, justify="right" if numbers else "left", no_wrap=True)
    for number, ((what, *_), values) in enumerate(zip(rows, cells, strict=True), 1):
        made.add_row(str(number), what, *map(_shown, values))
    return made


def _cells(without: ChatAnswer, with_: ChatAnswer) -> tuple[int | float | str, ...]:
    moved = with_.source in ("snapshot", "copy")  # else what it reused was in the slot
    return (
        *(with_.prompt_tokens, without.computed_tokens, without.ttft_s),
        *(f"{with_.backend}/{with_.slot}", with_.source),
        *(with_.cached_tokens * (not moved), with_.cached_tokens * moved),
        *(with_.computed_tokens, with_.ttft_s),
    )


def _shown(value: int | float | str) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return value if isinstance(value, str) else f"{value:,}" if value else "-"


def summary(rows: Sequence[Row]) -> str:
    """Return the totals as one sentence."""
    before = sum(without.computed_tokens for _, without, _ in rows)
    after = sum(with_.computed_tokens for _, _, with_ in rows)
    slow = fmean(without.ttft_s for _, without, _ in rows)
    fast = fmean(with_.ttft_s for _, _, with_ in rows)
    fewer, sooner = before / max(after, 1), slow / max(fast, 1e-9)
    return (
        f"kvferry: {after:,} prompt tokens computed instead of {before:,} ({fewer:.1f} times "
        f"fewer); first token after {fast:.2f} s on average instead of {slow:.2f} s "
        f"({sooner:.1f} times sooner)."
    )
