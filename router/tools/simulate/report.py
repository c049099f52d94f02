"""Results as tables, and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from router.config.values import format_size
from router.tools.simulate.accounting import Result

GIB = 1024**3
_WIDTH = 120  # columns of the tables in a file
_UNBUDGETED = ("sticky", "round_robin", "least_busy")


def show(console: Console, results: Sequence[Result]) -> None:
    """Print all results."""
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(_tokens_table(results))
    console.print(_seconds_table(results))
    console.print(_bytes_table(results))
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
    rows = [
        asdict(r)
        | {
            "reused_tokens": r.reused_tokens,
            "reused_share": r.reused_share,
            "oracle_share": r.oracle_share,
        }
        for r in results
    ]
    return orjson.dumps({"settings": settings, "results": rows}, option=orjson.OPT_INDENT_2)


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


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _tokens_table(results: Sequence[Result]) -> Table:
    table = _table(
        "Prompt tokens, %",
        *("policy", "budget", "reused", "of limit", "resident", "snapshot", "copy", "computed"),
    )
    for r in results:
        parts = (r.resident_tokens, r.snapshot_tokens, r.copy_tokens, r.computed_tokens)
        table.add_row(
            r.policy,
            _budget(r),
            _percent(r.reused_tokens, r.prompt_tokens),
            _percent(r.reused_tokens, r.oracle_tokens),
            *(_percent(part, r.prompt_tokens) for part in parts),
        )
    if results:
        share = _percent(results[0].oracle_tokens, results[0].prompt_tokens)
        table.caption = f"limit: an unlimited cache of everything ever computed, {share} %"
        table.caption_justify = "left"
    return table


def _seconds_table(results: Sequence[Result]) -> Table:
    table = _table(
        "Seconds",
        *("policy", "budget", "TTFT p50", "p90", "p99", "wait p50", "p90", "p99"),
        *("answered", "refused"),
    )
    for r in results:
        times = [r.ttft_s["p50"], r.ttft_s["p90"], r.ttft_s["p99"]]
        times += [r.waited_s["p50"], r.waited_s["p90"], r.waited_s["p99"]]
        table.add_row(
            r.policy,
            _budget(r),
            *(f"{t:.2f}" for t in times),
            f"{r.answered:,}",
            f"{sum(r.rejected.values()):,}",
        )
    return table


def _bytes_table(results: Sequence[Result]) -> Table:
    table = _table(
        "State files, GiB",
        *("policy", "budget", "saves", "restores", "cuts", "saved", "restored", "kept at most"),
        "evicted",
    )
    for r in results:
        table.add_row(
            r.policy,
            _budget(r),
            f"{sum(r.saves.values()):,}",
            f"{r.restores:,}",
            f"{r.cuts:,}",
            f"{r.saved_bytes / GIB:,.1f}",
            f"{r.restored_bytes / GIB:,.1f}",
            f"{r.peak_bytes / GIB:,.1f}",
            f"{r.evictions:,}",
        )
    return table


def _miss_table(result: Result) -> Table:
    table = _table(
        f"{result.policy}, {_budget(result)}: computed tokens, by reason",
        *("reason", "% of prompt tokens"),
    )
    for reason, tokens in sorted(result.misses.items(), key=lambda item: -item[1]):
        table.add_row(reason, _percent(tokens, result.prompt_tokens))
    return table
