"""Traces in Mooncake's format as requests."""

from pathlib import Path

import orjson
import pytest

from router.base.tokens import common_prefix, count
from router.base.types import RequestId
from router.tools.simulate.requests import SimulatedRequest
from router.tools.simulate.trace import TraceError, TraceRow, TraceWorkload, read_trace

LINES = [
    TraceRow(1000, 1000, 20, (0, 1)),
    TraceRow(3000, 1024, 30, (0, 2)),
    TraceRow(5000, 1300, 4, (0, 1, 3)),
]


def asks(*lines: TraceRow, **more: float) -> list[SimulatedRequest]:
    return list(TraceWorkload(list(lines), **more).arrivals())  # type: ignore[arg-type]


def test_equal_blocks_are_equal_tokens() -> None:
    first, second, third = asks(*LINES)
    assert [len(a.prompt) for a in (first, second, third)] == [1000, 1024, 1300]
    assert common_prefix(first.prompt.tokens, second.prompt.tokens) == 512
    assert common_prefix(first.prompt.tokens, third.prompt.tokens) == 1000
    assert common_prefix(first.prompt.tokens, asks(*LINES)[0].prompt.tokens) == 1000


def test_time_begins_with_the_first() -> None:
    assert [a.at for a in asks(*LINES)] == [0.0, 2.0, 4.0]
    assert [a.at for a in asks(*LINES, speed=4.0)] == [0.0, 0.5, 1.0]


def test_scale() -> None:
    """Blocks shrink with the lengths, so the shares of reuse stay the same."""
    first, second, third = asks(*LINES, scale=8)
    assert [len(a.prompt) for a in (first, second, third)] == [125, 128, 162]
    assert [count(a.answer) for a in (first, second, third)] == [2, 3, 1]
    assert common_prefix(first.prompt.tokens, second.prompt.tokens) == 64


def test_repeats_share_nothing_with_each_other() -> None:
    found = asks(*LINES, repeat=2)
    assert [a.id for a in found] == [RequestId(f"r{n}") for n in range(6)]
    assert [a.at for a in found] == [0.0, 2.0, 4.0, 4.0, 6.0, 8.0]
    assert common_prefix(found[0].prompt.tokens, found[3].prompt.tokens) == 0
    assert common_prefix(found[3].prompt.tokens, found[4].prompt.tokens) == 512


def test_answers_are_nobody_elses() -> None:
    first, second, _ = asks(*LINES)
    assert not set(first.answer) & {0} or common_prefix(first.answer, second.answer) == 0
    assert common_prefix(first.answer, first.prompt.tokens) == 0


def write(path: Path, *rows: object) -> Path:
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    return path


def row(**more: object) -> dict[str, object]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]} | more


def test_read_in_the_order_of_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t", row(timestamp=9), row(timestamp=2), row(timestamp=1))
    assert [line.at_ms for line in read_trace(path, limit=2)] == [2.0, 9.0]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("[1, 2]", "line 2: not a request"),
        ('{"timestamp": 0}', "line 2: not a request"),
        ("{nonsense", "line 2: not a request"),
        ('{"timestamp":0,"input_length":600,"output_length":1,"hash_ids":[1]}', "does not fit"),
    ],
)
def test_names_the_line_that_is_wrong(tmp_path: Path, bad: str, said: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(orjson.dumps(row()) + b"\n" + bad.encode())
    with pytest.raises(TraceError, match=said):
        read_trace(path)


def test_empty(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no requests"):
        read_trace(write(tmp_path / "t"))


def test_too_many_blocks_for_token_ids() -> None:
    line = TraceRow(0, 512, 1, (4_000_000,))
    with pytest.raises(TraceError, match="larger scale"):
        TraceWorkload([line])
    assert len(asks(line, scale=8)[0].prompt) == 64
