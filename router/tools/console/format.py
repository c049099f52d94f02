"""Format numbers and tables for a person to read at a glance; JSON has the exact numbers."""

import sys
from collections.abc import Sequence

import orjson
from rich.box import SIMPLE_HEAD
from rich.table import Table

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: object) -> None:
    """Print a value for machines."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode() + "\n")


def number_of(number: int, what: str) -> str:
    """Return a number with its noun: `1 request`, `2,000 requests`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def size(n_bytes: float) -> str:
    """Return a size with three digits and a unit: `4.21GiB`."""
    amount, unit = n_bytes, _UNITS[0]
    for larger in _UNITS[1:]:
        if amount < 1000:  # four digits are too many
            break
        amount, unit = amount / 1024, larger
    digits = 0 if unit == "B" or amount >= 100 else 1 if amount >= 10 else 2
    return f"{amount:.{digits}f}{unit}"


def span(seconds: float | None) -> str:
    """Return a duration: `45ms`, `1.25s`, `12s`, `3m05s`, `2h10m`, `3d04h`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f}ms"
    if seconds < 10:
        return f"{seconds:.2f}s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_m = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return f"{days}d{rest_h:02d}h"
    if hours:
        return f"{hours}h{rest_m:02d}m"
    return f"{minutes}m{rest_s:02d}s" if minutes else f"{rest_s}s"


def bar(share: float, width: int) -> str:
    """Return a bar of `width` columns, filled up to `share` (0 to 1)."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "█" * filled + "░" * (width - filled)


def table(*columns: str, right: Sequence[str] = (), last: str = "", wrap: bool = False) -> Table:
    """Return a table. Column `last` takes the rest of the width; longer text is cut or wrapped."""
    made = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    made.add_column(last, no_wrap=not wrap, overflow="fold" if wrap else "ellipsis", ratio=1)
    return made
