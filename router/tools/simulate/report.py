"""Results as tables, and as JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.config.values import format_size
from router.tools.simulate.accounting import PERCENTILES, Result, percentiles

GIB = 1024**3
_JSON = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
_SOURCES = ("resident", "snapshot", "copy")
_WIDTH = 120  # columns of the tables in a file
_UNBUDGETED = ("sticky", "round_robin", "least_busy")


def show(console: Console, results: Sequence[Result]) -> None:
    """Print all results."""
    if not console.is_terminal:
        console.width = _WIDTH
    tokens, *others = _tables(results)
    share = _percent(results[0].oracle_tokens, results[0].prompt_tokens)
    tokens.caption = f"limit: an unlimited cache of everything ever computed, {share} %"
    tokens.caption_justify = "left"
    console.print(tokens, *others)
    for result in results:
        if result.misses:
            console.print(_miss_table(result))
    for result in results:
        if result.swaps:
            told = f"{result.swaps:,} swaps of models for {result.requests:,} requests"
            console.print(Text(f"{result.policy}, {_budget(result)}: {told}"))
        if result.rejected:
            why = ", ".join(f"{n:,} x {error}" for error, n in sorted(result.rejected.items()))
            console.print(Text(f"{result.policy}, {_budget(result)}: refused {why}"))


def as_json(settings: dict[str, Any], results: Sequence[Result]) -> bytes:
    """Return all results with their shares, in seconds, tokens and bytes; budget -1: no limit."""
    shares = ("reused_tokens", "reused_share", "oracle_share")
    rows = [
        {field.name: getattr(r, field.name) for field in fields(r)}
        | {name: getattr(r, name) for name in shares}
        | {f"{source}_tokens": r.reused[source] for source in _SOURCES}
        | {name: percentiles(getattr(r, name)) for name in ("ttft_s", "waited_s")}
        for r in results
    ]
    return orjson.dumps({"settings": settings, "results": rows}, option=_JSON)


def _plain(result: Result) -> bool:
    """Return True if the policy never moves KV and so has no budget."""
    return result.policy in _UNBUDGETED


def _budget(result: Result) -> str:
    return "-" if _plain(result) else format_size(result.budget_bytes)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=None, title_justify="left", pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _at(name: str, p: int) -> Callable[[Result], str]:
    return lambda r: f"{percentiles(getattr(r, name))[f'p{p}']:.2f}"


def _from(source: str) -> Callable[[Result], str]:
    return lambda r: _percent(r.reused[source], r.prompt_tokens)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _tables(results: Sequence[Result]) -> Iterator[Table]:
    """Yield the tables of all results: a row for each, a column for each value."""
    columns: dict[str, dict[str, Callable[[Result], str]]] = {
        "Prompt tokens, %": {
            "reused": lambda r: _percent(r.reused_tokens, r.prompt_tokens),
            "of limit": lambda r: _percent(r.reused_tokens, r.oracle_tokens),
            **{source: _from(source) for source in _SOURCES},
            "computed": lambda r: _percent(r.computed_tokens, r.prompt_tokens),
        },
        "Seconds": {
            **{f"TTFT p{p}": _at("ttft_s", p) for p in PERCENTILES},
            **{f"wait p{p}": _at("waited_s", p) for p in PERCENTILES},
            "answered": lambda r: f"{r.answered:,}",
            "refused": lambda r: f"{r.rejected.total():,}",
        },
        "State files, GiB": {
            "saves": lambda r: f"{r.saves.total():,}",
            "restores": lambda r: f"{r.restores:,}",
            "cuts": lambda r: f"{r.cuts:,}",
            "saved": lambda r: f"{r.saved_bytes / GIB:,.1f}",
            "restored": lambda r: f"{r.restored_bytes / GIB:,.1f}",
            "kept at most": lambda r: f"{r.peak_bytes / GIB:,.1f}",
            "evicted": lambda r: f"{r.evictions:,}",
        },
    }
    for title, cells in columns.items():
        table = _table(title, "policy", "budget", *cells)
        for r in results:
            table.add_row(r.policy, _budget(r), *(cell(r) for cell in cells.values()))
        yield table


def _miss_table(result: Result) -> Table:
    table = _table(
        f"{result.policy}, {_budget(result)}: computed tokens, by reason",
        *("reason", "% of prompt tokens"),
    )
    for reason, tokens in sorted(result.misses.items(), key=lambda item: -item[1]):
        table.add_row(reason, _percent(tokens, result.prompt_tokens))
    return table
