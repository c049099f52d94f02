"""`router.store.format.split`: every byte is in one blob, and a longer state shares rows."""

import io
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import KvFileError
from router.store.format import split as module
from router.store.format.head import read_head
from router.store.format.layout import OPAQUE, read_layout
from router.store.format.split import Split, Strip, split
from tests.support.files.state_files import appendix, attention, full, head, recurrent, stream

ROW = 8
LEAST = 4 * 4 * ROW  # bytes: 4 tokens with 4 rows each


def cell(section: int, position: int) -> bytes:
    return struct.pack("<HHI", section, position, 7 * position)


def state(n: int) -> bytes:
    """Return the file of a full-attention model after `n` tokens; rows depend on the position."""
    return full(range(n), row=ROW, cell=cell)


def plan(raw: bytes, least_bytes: int = LEAST) -> Split:
    file = io.BytesIO(raw)
    found = read_head(file)
    made = split(found.end, read_layout(file, found, len(raw)), len(raw), least_bytes)
    made.check()
    return made


def blobs(raw: bytes, made: Split) -> list[bytes]:
    return [b"".join(raw[s.offset : s.offset + s.size] for s in spans) for spans in made.spans()]


def assembled(raw: bytes, made: Split) -> bytes:
    """Return the file that is put together from the head and the blobs."""
    out = bytearray(made.size_bytes)
    out[: made.start] = raw[: made.start]
    for blob, spans in zip(blobs(raw, made), made.spans(), strict=True):
        at = 0
        for offset, size in spans:
            out[offset : offset + size] = blob[at : at + size]
            at += size
        assert at == len(blob)
    return bytes(out)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a blob of rows have 4 tokens, not 256."""
    monkeypatch.setattr(module, "TOKENS", 1)


WINDOW = attention(stream(range(3, 9), row=ROW, cell=cell))
FILES = {
    "full": state(9),
    "one-token": state(1),
    "legacy": head(range(9), legacy=True) + attention(stream(range(9), row=ROW, cell=cell)),
    "v-trans": full(range(9), row=ROW, cell=cell, v_trans=True),
    "no-v": full(range(9), row=ROW, cell=cell, has_v=False),
    "second-stream": head(range(9))
    + attention(struct.pack("<I", 0), stream(range(9), row=ROW, cell=cell)),
    "window": head(range(9)) + attention(stream(range(9), row=ROW, cell=cell)) + WINDOW,
    "hybrid": head(range(9)) + attention(stream(range(9), row=ROW, cell=cell)) + recurrent(8),
    "recurrent": head(range(9)) + recurrent(8),
    "checkpoints": head(range(9))
    + attention(stream(range(9), row=ROW, cell=cell))
    + recurrent(8)
    + appendix((3, recurrent(2)), (6, recurrent(5)), (8, recurrent(7))),
}


@pytest.mark.parametrize("most", [5, 64, 1000])
@pytest.mark.parametrize("raw", FILES.values(), ids=FILES)
def test_pieces_of_any_size(raw: bytes, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", most)
    monkeypatch.setattr(module, "OPAQUE_BYTES", most)
    for least in (1, 3, LEAST, 10_000):
        assert assembled(raw, plan(raw, least)) == raw
    opaque = split(20, OPAQUE, len(raw))
    opaque.check()
    assert assembled(raw, opaque) == raw
    assert max(opaque.sizes()) <= most


def test_a_longer_state_has_the_rows_of_the_shorter() -> None:
    short, long = state(9), state(14)
    before, after = blobs(short, plan(short)), blobs(long, plan(long))
    assert plan(short).n_rows == 2
    assert plan(long).n_rows == 3
    assert before[:2] == after[:2]
    assert not set(before[2:]) & set(after)


def test_a_longer_state_has_the_checkpoints_of_the_shorter() -> None:
    first, second, third = ((n, recurrent(n - 1)) for n in (3, 6, 8))
    short = head(range(9)) + recurrent(8) + appendix(first, second)
    long = head(range(12)) + recurrent(11) + appendix(first, second, third)
    before, after = blobs(short, plan(short, 30)), blobs(long, plan(long, 30))
    assert before[1:3] == after[1:3]
    assert len(after) == len(before) + 1


def test_blobs_are_large_enough() -> None:
    raw = state(40)
    for least in (1, LEAST, 5 * LEAST):
        made = plan(raw, least)
        assert made.sizes()[0] >= least
        assert made.n_tokens & (made.n_tokens - 1) == 0, "a power of two: a prefix of a longer one"


def test_small_pieces_of_the_rest_are_joined() -> None:
    raw = FILES["checkpoints"]
    assert len(plan(raw, 1).ends) == 4
    assert len(plan(raw, 10_000).ends) == 1


def test_rows_of_a_transposed_v_are_rest() -> None:
    made = plan(FILES["v-trans"])
    assert len(made.strips) == 2, "K of two layers"


@given(st.data())
def test_any_plan(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["plain", "window", "hybrid"]))
    raw = state(n)
    if kind == "window":
        first = data.draw(st.integers(0, n - 1))
        raw += attention(stream(range(first, n), row=ROW, cell=cell))
    elif kind == "hybrid":
        raw += recurrent(n - 1) + appendix(*((i + 1, recurrent(i)) for i in range(n // 7)))
    least = data.draw(st.integers(1, 500))
    assert assembled(raw, plan(raw, least)) == raw


def broken() -> list[Split]:
    sound = plan(FILES["checkpoints"])
    return [
        changed(sound, start=sound.size_bytes + 1),
        changed(sound, size_bytes=sound.size_bytes + 1),
        changed(sound, n_rows=sound.n_rows + 1),
        changed(sound, n_rows=-1),
        changed(sound, strips=()),
        changed(sound, strips=sound.strips[::-1]),
        changed(sound, strips=(Strip(sound.strips[0].offset, 0), *sound.strips[1:])),
        changed(sound, ends=sound.ends[:-1]),
        changed(sound, ends=sound.ends[::-1]),
        changed(sound, ends=(*sound.ends, sound.ends[-1])),
    ]


def changed(made: Split, **changes: object) -> Split:
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return Split(**(fields | changes))


def test_a_split_that_contradicts_itself_is_refused() -> None:
    for one in broken():
        with pytest.raises(KvFileError, match="contradicts itself"):
            one.check()
