"""The result of `kvferry bench`: a table to paste, what it means, and JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from router.tools.bench.measure import Measured, Point

_TITLES = (
    *("prompt", "prefill tok/s", "cold s", "restored s", "sooner"),
    *("save s", "restore s", "MB"),
)


def table(measured: Measured) -> str:
    """Return the points of one server as a table in Markdown, aligned."""
    rows = [_TITLES, *(_cells(point) for point in measured.points)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines_ = [
        "| "
        + " | ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        + " |"
        for row in rows
    ]
    lines_.insert(1, "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|")
    return "\n".join(lines_)


def _cells(point: Point) -> tuple[str, ...]:
    return (
        f"{point.tokens:,}",
        f"{point.prefill_tokens_per_s:,.0f}",
        _seconds(point.cold_s),
        _seconds(point.here_s),
        "" if not point.here_s else f"{point.cold_s / point.here_s:.1f} x",
        _seconds(point.save_s),
        _seconds(point.restore_s),
        "" if point.size_bytes is None else f"{point.size_bytes / 1e6:,.1f}",
    )


def lines(measured: Measured) -> Iterator[str]:
    """Yield what the table means, one sentence each."""
    moved = [point for point in measured.points if point.save_s and point.size_bytes]
    if moved:
        at = pays_from(moved)
        if at is None:
            yield "Moving a prompt does not pay: computing the longest one is sooner."
        elif at <= moved[0].tokens:
            yield f"Moving a prompt pays at every length in the table (from {at:,} tokens)."
        else:
            yield f"Moving a prompt pays from about {at:,} tokens."
    yield from (f"Note: {note}." for note in measured.notes)


def pays_from(points: Sequence[Point]) -> int | None:
    """Return the length from which a restored prompt is sooner than a computed one.

    The first length, if it is so there; between two lengths both times are taken as straight
    lines. None: the longest prompt does not gain.
    """
    before: tuple[int, float] | None = None  # length, and seconds gained there
    found: int | None = None
    for point in points:
        assert point.here_s is not None
        gained_s = point.cold_s - point.here_s
        if gained_s <= 0:
            found = None
        elif before is None:
            found = point.tokens
        elif found is None:
            share = -before[1] / (gained_s - before[1])
            found = round(before[0] + share * (point.tokens - before[0]))
        before = point.tokens, gained_s
    return found


def as_json(results: Sequence[Measured]) -> str:
    """Return all results for machines: seconds, bytes and tokens."""
    told: list[dict[str, Any]] = []
    for one in results:
        moved = [point for point in one.points if point.here_s is not None]
        pays = pays_from(moved) if moved else None
        told.append(msgspec.to_builtins(one) | {"pays_from_tokens": pays})
    return msgspec.json.format(msgspec.json.encode({"servers": told}), indent=2).decode()


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
