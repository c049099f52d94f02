"""Numbers in short forms."""

import pytest

from router.tools.console.format import bar, number_of, size, span


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (1000, "0.98KiB"),
        (1536, "1.50KiB"),
        (20 * 2**20, "20.0MiB"),
        (999 * 2**20, "999MiB"),
        (1000 * 2**20, "0.98GiB"),
        (32 * 2**30, "32.0GiB"),
        (5000 * 2**40, "5000TiB"),
    ],
)
def test_size(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0, "0ms"),
        (0.0454, "45ms"),
        (1.25, "1.25s"),
        (12.7, "12s"),
        (59.9, "59s"),
        (185, "3m05s"),
        (3599, "59m59s"),
        (7800, "2h10m"),
        (86399, "23h59m"),
        (3 * 86400 + 4 * 3600, "3d04h"),
    ],
)
def test_span(seconds: float | None, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"), [(-1, "░░░░"), (0, "░░░░"), (0.5, "██░░"), (1, "████"), (9, "████")]
)
def test_bar(share: float, text: str) -> None:
    assert bar(share, 4) == text


def test_number_of() -> None:
    assert [number_of(n, "slot") for n in (0, 1, 2000)] == ["0 slots", "1 slot", "2,000 slots"]
