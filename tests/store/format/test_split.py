"""`router.store.format.split`: every byte is in one blob, and a longer state shares rows."""

import io
import struct
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import KvFileError
from router.store.format import layout
from router.store.format import split as module
from router.store.format.head import read_head
from router.store.format.layout import read_layout
from router.store.format.split import Area, Split, Strip, split
from tests.support.files.state_files import appendix, attention, full, head, recurrent, stream

Made = TypeVar("Made", Area, Split)

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
    for least in (1, 3, LEAST, 10_000):
        assert assembled(raw, plan(raw, least)) == raw


def test_a_longer_state_has_the_rows_of_the_shorter() -> None:
    short, long = state(9), state(14)
    before, after = blobs(short, plan(short)), blobs(long, plan(long))
    assert plan(short).areas[0].n_blobs == 2
    assert plan(long).areas[0].n_blobs == 3
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
        n_tokens = made.areas[0].n_tokens
        assert n_tokens & (n_tokens - 1) == 0, "a power of two: a prefix of a longer one"


def test_small_pieces_of_the_rest_are_joined() -> None:
    raw = FILES["checkpoints"]
    assert len(plan(raw, 1).ends) == 4
    assert len(plan(raw, 10_000).ends) == 1


def test_rows_of_a_transposed_v_are_rest() -> None:
    made = plan(FILES["v-trans"])
    assert len(made.areas[0].strips) == 2, "K of two layers"


@given(st.data())
def test_any_plan(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["plain", "window", "hybrid"]))
    raw = state(n)
    if kind == "window":
        first = data.draw(st.integers(0, n - 1))
        cells = [*range(first, n)]
        turn = data.draw(st.integers(0, len(cells)))
        raw += attention(stream(cells[turn:] + cells[:turn], row=ROW, cell=cell))
    elif kind == "hybrid":
        raw += recurrent(n - 1) + appendix(*((i + 1, recurrent(i)) for i in range(n // 7)))
    least = data.draw(st.integers(1, 500))
    made = plan(raw, least)
    assert assembled(raw, made) == raw
    assert [made.spans_of(at) for at in range(made.n_blobs)] == list(made.spans())
    assert made.sizes() == [sum(span.size for span in one) for one in made.spans()]
    with pytest.raises(IndexError):
        made.spans_of(made.n_blobs)


def windowed(n: int, *cells: range, checkpoint: range | None = None) -> bytes:
    """Return the file after `n` tokens of a model with a window, which has cells in this order."""
    base = attention(stream(range(n), row=ROW, cell=cell))
    raw = head(range(n)) + base + window(*cells)
    if checkpoint is None:
        return raw
    return raw + appendix((checkpoint[-1] + 1, window(checkpoint)), window=True)


def window(*cells: range) -> bytes:
    return attention(stream([at for some in cells for at in some], row=2 * ROW, cell=wide))


def wide(section: int, position: int) -> bytes:
    return cell(section, position) + b"in a win"


def blobs_of_window(raw: bytes) -> set[bytes]:
    return {one for one in blobs(raw, plan(raw)) if one[ROW : 2 * ROW] == b"in a win"}


def test_windows_share_the_positions_that_both_have() -> None:
    """A window is a ring: llama-server writes its cells as they lie in memory."""
    short, long = windowed(24, range(8, 24)), windowed(32, range(24, 32), range(16, 24))
    assert len(blobs_of_window(short)) == len(blobs_of_window(long)) == 8
    assert len(blobs_of_window(short) & blobs_of_window(long)) == 4


def test_a_window_shares_with_one_that_has_lost_no_cell() -> None:
    short, long = windowed(8, range(8)), windowed(12, range(4, 12))
    assert len(blobs_of_window(short) & blobs_of_window(long)) == 2


def test_a_padded_window_shares_with_one_that_is_not() -> None:
    assert blobs_of_window(windowed(24, range(8, 24))) == blobs_of_window(
        windowed(24, range(8, 24), range(7, 8))
    )


def test_a_checkpoint_has_the_rows_of_the_window() -> None:
    raw = windowed(24, range(8, 24), checkpoint=range(4, 20))
    assert len(blobs_of_window(raw)) == 10, "4 to 24, by two"
    assert len(blobs(raw, plan(raw))) == len(set(blobs(raw, plan(raw)))) + 6, "8 to 20, twice"


def test_cells_of_a_window_that_are_all_apart_are_rest() -> None:
    raw = windowed(24, range(8, 24, 2), range(9, 24, 2))
    assert not blobs_of_window(raw)
    assert assembled(raw, plan(raw)) == raw


def mixed(n: int) -> bytes:
    """Return the file after `n` tokens of a slot beside which another one decoded from 16 on."""
    cells = [*range(16), *(at ^ 1 for at in range(16, n))]
    return head(range(n)) + attention(stream(cells, row=ROW, cell=cell))


@pytest.mark.parametrize("most", [1, 2, 1000])
def test_slots_that_decode_side_by_side(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one buffer for all, their cells take turns: what follows is counted by cells."""
    monkeypatch.setattr(layout, "_MAX_RUNS", most)
    short, long = mixed(32), mixed(48)
    before = set(blobs(short, plan(short)))
    rows = blobs(long, plan(long))[: plan(long).areas[0].n_blobs]
    assert len(rows) == 12
    assert sum(one in before for one in rows) == 8
    assert assembled(long, plan(long)) == long


def test_pictures_with_m_rope() -> None:
    """A picture has one position, whatever its cells; what follows is at another cell."""
    positions = [0, 1, *[2] * 6, 3, 4, 5, 6, 7, 8]
    raw = head(range(14)) + attention(stream(positions, row=ROW, cell=cell, ext=True))
    assert plan(raw).areas[0].runs == ((0, 2), (9, 1))
    assert assembled(raw, plan(raw)) == raw


def broken() -> list[Split]:
    sound = plan(FILES["checkpoints"])
    (area,) = sound.areas
    first = area.strips[0]
    areas = [
        changed(area, runs=((0, area.n_blobs + 1),)),
        changed(area, runs=((0, -1),)),
        changed(area, runs=((-4, area.n_blobs),)),
        changed(area, runs=((0, 1), (0, area.n_blobs))),
        changed(area, runs=()),
        changed(area, n_tokens=0),
        changed(area, strips=()),
        changed(area, strips=area.strips[::-1]),
        changed(area, strips=(Strip(first.offset, 0), *area.strips[1:])),
        changed(area, runs=((0, 1 << 22),)),
        changed(area, runs=((0, 10**12), (0, area.n_blobs - 10**12))),
    ]
    return [
        changed(sound, start=sound.size_bytes + 1),
        changed(sound, size_bytes=sound.size_bytes + 1),
        changed(sound, areas=(area, area)),
        *(changed(sound, areas=(one,)) for one in areas),
        changed(sound, ends=sound.ends[:-1]),
        changed(sound, ends=sound.ends[::-1]),
        changed(sound, ends=(*sound.ends, sound.ends[-1])),
    ]


def changed(made: Made, **changes: object) -> Made:
    fields = {name: getattr(made, name) for name in made.__struct_fields__}
    return type(made)(**(fields | changes))


def test_a_split_that_contradicts_itself_is_refused() -> None:
    for one in broken():
        with pytest.raises(KvFileError, match="contradicts itself"):
            one.check()
