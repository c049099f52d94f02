"""`router.store.format`: the reader on hand-made, damaged and real state files."""

import io
import os
import struct
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.base import tokens as tok
from router.base.errors import KvFileError
from router.store.format.head import MAX_TOKENS, Head, collapse_media, read_head, tokens_of
from router.store.format.layout import Layout, check_agreement, read_layout
from tests.support.files.state_files import (
    appendix,
    attention,
    full,
    head,
    i32,
    recurrent,
    stream,
    u32,
)

TOKENS = [5, 6, 7, 8]
POSITIONS = range(4)
MEDIA = head([1, -1, -1, -1, 2], [(1, b"abc"), (3, b"defgh")])

FILES = {
    "full": full(TOKENS),
    "legacy": head(TOKENS, legacy=True) + attention(stream(POSITIONS)),
    "transposed": full(TOKENS, v_trans=True),
    "version 3": head(TOKENS, version=3) + attention(stream(POSITIONS, has_rot=False)),
    "version 2": head(TOKENS, legacy=True, version=2)
    + attention(stream(POSITIONS, has_rot=False))
    + recurrent(3),
    "dsa iswa": head(TOKENS)
    + attention(stream(POSITIONS, has_v=False))
    + attention(stream(POSITIONS, has_v=False))
    + attention(stream([2, 3], has_v=False)),
    "no base layers": head(TOKENS)
    + attention(stream(POSITIONS, layers=0))
    + attention(stream([3])),
    "mla": full(TOKENS, has_v=False),
    "ext": full(TOKENS, ext=True),
    "two streams": head(TOKENS) + attention(stream([]), stream(POSITIONS)),
    "iswa": head(TOKENS) + attention(stream(POSITIONS)) + attention(stream([2, 3])),
    "hybrid": head(TOKENS) + attention(stream(POSITIONS)) + recurrent(3),
    "hybrid mla": head(TOKENS) + attention(stream(POSITIONS, has_v=False)) + recurrent(3),
    "hybrid iswa": head(TOKENS)
    + attention(stream(POSITIONS))
    + attention(stream([2, 3]))
    + recurrent(3),
    "recurrent": head(TOKENS) + recurrent(3),
    "ple": head(TOKENS) + attention(stream(POSITIONS, ext=True)) + recurrent(3, ple=400),
    "media": MEDIA + attention(stream(range(5), ext=True)),
    "checkpoints": head(TOKENS)
    + attention(stream(POSITIONS))
    + recurrent(3)
    + appendix((2, recurrent(1)), (3, recurrent(2))),
    "recurrent checkpoints": head(TOKENS) + recurrent(3) + appendix((2, recurrent(1))),
    "swa checkpoints": head(TOKENS)
    + attention(stream(POSITIONS))
    + attention(stream([2, 3]))
    + appendix((3, attention(stream([1, 2])))),
    "empty": head([]) + attention(stream([]), stream([])),
}


class Watched(io.BytesIO):
    """A file that fails the test at a read of more bytes than the file has."""


def parse(raw: bytes) -> tuple[Head, Layout]:
    file = Watched(raw)
    found = read_head(file)
    layout = read_layout(file, found, len(raw))
    check_agreement(found, layout)
    return found, layout


@pytest.mark.parametrize("name", FILES)
def test_every_shape_is_read(name: str) -> None:
    found, layout = parse(FILES[name])

    expected = {"media": [1, -1, -1, -1, 2], "empty": []}.get(name, TOKENS)
    assert expected == tok.unpack(found.tokens)
    assert found.legacy == (name in ("legacy", "version 2"))
    if layout.checkpoints:
        assert layout.checkpoints[-1].end == len(FILES[name])
    else:
        assert layout.blocks[-1].end == len(FILES[name])
    assert bool(layout.checkpoints) == ("checkpoints" in name)
    assert (name in ("ext", "ple", "media")) == any(block.ext for block in layout.attention)


def test_offsets_point_at_the_data() -> None:
    """Rewriting cuts and copies at these offsets."""
    raw = FILES["two streams"]
    block = parse(raw)[1].attention[0]
    filled = block.streams[1]

    assert u32(4) == raw[filled.offset : filled.cells_offset]
    assert i32(0, 1, 0) == raw[filled.cells_offset : filled.cells_offset + block.cell_bytes]
    for layer, (k, v) in enumerate(zip(filled.k, filled.v, strict=True)):
        assert bytes([layer + 1]) * 16 == raw[k.offset : k.offset + 4 * k.row_bytes]
        assert bytes([layer + 0x81]) * 16 == raw[v.offset : v.offset + 4 * v.row_bytes]


def test_fingerprint_tells_shapes_apart() -> None:
    same = ("legacy", "two streams", "media", "empty", "version 2", "version 3")  # like others
    names = [name for name in FILES if name not in same and "checkpoints" not in name]
    assert len(names) == len({parse(FILES[name])[1].fingerprint() for name in names})


def test_checkpoints_do_not_change_the_fingerprint() -> None:
    """A llama-server without checkpoints ignores those in a file, so the file still fits."""
    with_, without = parse(FILES["checkpoints"])[1], parse(FILES["hybrid"])[1]

    assert [checkpoint.n_tokens for checkpoint in with_.checkpoints] == [2, 3]
    assert without.fingerprint() == with_.fingerprint()


def test_checkpoint_behind_the_tokens_is_refused() -> None:
    with pytest.raises(KvFileError, match="checkpoint"):
        parse(FILES["hybrid"] + appendix((5, recurrent(4))))


@pytest.mark.parametrize(
    ("name", "n_tokens", "state", "what"),
    [
        ("hybrid", 2, b"", "ends inside"),
        ("hybrid", 2, recurrent(2), "last position is 2"),
        ("hybrid", 2, recurrent(1, with_state=1), "other shapes"),
        ("hybrid", 2, attention(stream([0, 1])), "no one sequence|recurrent"),
        ("recurrent", 0, recurrent(0), "not within the"),
        ("iswa", 3, attention(stream([0, 2])), "2 cells for 3 positions"),
        ("iswa", 3, attention(stream([0, 1, 2], row=8)), "other shapes"),
        ("iswa", 3, attention(stream([-1, 2])), "position -1"),
        ("iswa", 3, attention(u32(0)), "other shapes"),
    ],
)
def test_checkpoint_that_kills_a_server(name: str, n_tokens: int, state: bytes, what: str) -> None:
    """b11549 loads a window with a cell at position -1 and then aborts on it."""
    with pytest.raises(KvFileError, match=what):
        parse(FILES[name] + appendix((n_tokens, state)))


def test_state_of_one_slot() -> None:
    """The state of a sequence has one stream, one recurrent cell and every position."""
    two = head(TOKENS) + attention(stream(POSITIONS), stream(POSITIONS))
    cells = head(TOKENS) + u32(2) + i32(3, 0, 3, 0) + u32(0, 1) + i32(0, 8, 0) + b"r" * 16
    for raw, what in (
        (two, "two streams"),
        (cells, "2 recurrent cells"),
        (head(TOKENS) + attention(stream([1, 2, 3])), "first position is 1"),
        (head(TOKENS) + attention(stream([0, 1, 3])), "3 cells for 4 positions"),
        (head(TOKENS) + attention(stream([0, 1, 2, 2, 3])), "5 cells for 4 positions"),
    ):
        with pytest.raises(KvFileError, match=what):
            parse(raw)


def test_empty_state_has_no_fingerprint() -> None:
    with pytest.raises(KvFileError, match="empty"):
        parse(FILES["empty"])[1].fingerprint()


def test_bytes_per_token_is_what_a_token_adds() -> None:
    grown = len(full([*TOKENS, 9])) - len(FILES["full"])
    assert grown == parse(FILES["full"])[1].bytes_per_token


@pytest.mark.parametrize("name", FILES)
def test_truncated_anywhere(name: str) -> None:
    """A file that is short by one byte can abort llama-server (llama-server.md section 0.3).

    A file cut where a V or another block begins is a whole file of another kind. A file cut where
    its checkpoints begin is whole, without checkpoints. The size that the backend reported tells
    these files apart.
    """
    raw = FILES[name]
    original = parse(raw)[1]
    survivors: list[Layout] = []
    for cut in range(len(raw)):
        with suppress(KvFileError):
            survivors.append(parse(raw[:cut])[1])
    assert len(survivors) <= 5
    for layout in survivors:
        if original.checkpoints and not layout.checkpoints:
            continue
        assert layout.fingerprint() != original.fingerprint()


@pytest.mark.parametrize("name", FILES)
def test_trailing_bytes_are_refused(name: str) -> None:
    with pytest.raises(KvFileError):
        parse(FILES[name] + b"\0")


words = st.one_of(
    st.integers(0, 16), st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**24, 2**16]), st.integers(0)
)


@given(
    st.sampled_from(sorted(FILES)),
    st.lists(st.tuples(st.integers(0, 400), words), min_size=1, max_size=4),
    st.integers(0, 12),
)
@example("full", [(2, 2**32 - 1)], 0)
@settings(max_examples=1500, deadline=None)
def test_damage_is_an_error_or_a_layout(name: str, edits: list[tuple[int, int]], cut: int) -> None:
    raw = bytearray(FILES[name])
    for word, value in edits:
        at = word * 4 % len(raw)
        raw[at : at + 4] = u32(value % 2**32)
    raw = raw[: len(raw) - cut]
    try:
        _, layout = parse(bytes(raw))
    except KvFileError:
        return
    assert (*layout.blocks, *layout.checkpoints)[-1].end == len(raw) or len(raw) - 12 == (
        layout.blocks[-1].end  # an appendix without checkpoints
    )


@pytest.mark.parametrize(
    "start",
    [
        u32(0x67677371, 4, 2**32 - 1) + i32(-1) + u32(1, 2**31),
        u32(0x67677371, 4, 2**32 - 1) + i32(5),
        u32(0x67677371, 4, 5) + i32(-1) + u32(1, 1, 3, 0) + u32(1, 2**24 - 1),
        u32(0x67677371, 4, 5) + i32(-1) + u32(1, 1, 3, 0) + u32(256),
    ],
    ids=["packed", "legacy", "cells", "streams"],
)
def test_sparse_file_of_terabytes_costs_nothing(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "hostile"
    path.write_bytes(start)
    os.truncate(path, 1 << 40)
    tracemalloc.start()
    try:
        with path.open("rb") as file, pytest.raises(KvFileError):
            read_layout(file, read_head(file), 1 << 40)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert MAX_TOKENS * 4 < 1 << 40


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"x" * 40, "magic"),
        (u32(0x67677371, 1, 0), "version is 1"),
        (u32(0x67677371, 4, 9), "ends at byte 48"),
        (u32(0x67677371, 4, 2) + i32(-1, 2), "payload version is 2"),
        (head([1, -2]), "token id is -2"),
        (head([1, -1]), "no media part begins at position 1"),
        (head([1, 2], [(1, b"abcd")]), "media begins at position 1"),
        (head([-1, -1], [(1, b"a"), (0, b"b")]), "ascend"),
        (head([-1], [(0, b"")]), "descriptor is empty"),
        (u32(0x67677371, 4, 6) + i32(-1) + u32(1, 1, 5, 0, 0), "announced to end at 36"),
        (head(TOKENS, legacy=True)[:-4] + i32(-1), "no media part"),
    ],
)
def test_head_errors_say_what(raw: bytes, what: str) -> None:
    with pytest.raises(KvFileError, match=what):
        read_head(io.BytesIO(raw))


def test_layout_errors_say_what() -> None:
    plain = FILES["full"]
    cells = plain.index(i32(0, 1, 0))
    k = plain.index(struct.pack("<iQ", 1, 4), cells)
    header = FILES["recurrent"].index(u32(0, 3))
    for raw, at, word, what in (
        (plain, cells + 4, 2, "in no one sequence"),
        (plain, cells, 2**32 - 2, "has position -2"),
        (plain, k, 99, "unknown tensor type 99"),
        (plain, k + 4, 3, "rows of 3 bytes"),
        (plain, k - 16, 2, "v_trans 2"),
        (plain, k - 12, 513, "layers 513"),
        (FILES["recurrent"], header, 1, "no recurrent header"),
    ):
        with pytest.raises(KvFileError, match=what):
            parse(raw[:at] + u32(word) + raw[at + 4 :])


@pytest.mark.parametrize(
    "raw",
    [
        head([5, 6, 7]) + attention(stream(range(4))),
        head([5, 6, 7, 8, 9]) + attention(stream(range(4))),
        head([]) + attention(stream(range(4))),
        head(TOKENS) + attention(stream([])),
        head(TOKENS) + attention(stream(POSITIONS)) + recurrent(2),
    ],
)
def test_tokens_and_memory_must_agree(raw: bytes) -> None:
    """llama-server aborts on such a file (llama-server.md section 4.4)."""
    with pytest.raises(KvFileError):
        parse(raw)


def test_media_counts_as_one_token() -> None:
    found = read_head(io.BytesIO(MEDIA))

    assert found.media_starts == (1, 3)
    assert tok.pack([1, -77, -88, 2]) == collapse_media(found, [-77, -88])
    assert collapse_media(found, [-77]) is None


@pytest.mark.parametrize(
    ("positions", "media", "found"),
    [
        ([1, -1, -1, 255, -1], [-5, -6], [1, -5, 255, -6]),
        ([-1, 2], [-5], [-5, 2]),
        ([0xFFFF, -1, -1, 0xFF], [-5], [0xFFFF, -5, 0xFF]),
        ([1, -1], [-5, -6], [1, -1]),  # of another number: unchanged
        ([1, 2], [], [1, 2]),
    ],
)
def test_media_positions_become_one_id_each(
    positions: list[int], media: list[int], found: list[int]
) -> None:
    at = [i for i, token in enumerate(positions) if token == -1 and positions[i - 1 : i] != [-1]]
    head = Head(tok.pack(positions), tuple(at), legacy=False, end=0)
    assert tok.unpack(tokens_of(head, media)) == found


# The rest talks to real servers.
