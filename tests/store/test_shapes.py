"""`router.store.shapes`: facts read from a state file, and files made from it."""

import os
from pathlib import Path

import pytest

from router.base import tokens as tok
from router.base.errors import KvFileError
from router.base.types import StateShape
from router.store import files, shapes
from router.store.format import rewrite
from tests.support.files.state_files import appendix, attention, full, head, recurrent, stream
from tests.support.files.stores import enospc

TOKENS = range(5, 15)
WINDOW = head(TOKENS) + attention(stream(range(10)))
WINDOWED = WINDOW + attention(stream(range(6, 10)))
CHECKPOINTS = appendix(
    (9, attention(stream(range(5, 9)))), (4, attention(stream(range(4)))), window=True
)
LONG_WINDOW = WINDOW + attention(stream(range(10)))
TWO = head(TOKENS) + attention(stream([]), stream(range(10)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state"


def look(path: Path, raw: bytes) -> shapes.Inspected:
    path.write_bytes(raw)
    return shapes.inspect(path, len(raw))


@pytest.mark.parametrize(
    ("raw", "shape"),
    [
        (full(TOKENS), StateShape(1)),
        (TWO, StateShape(2)),
        (WINDOWED, StateShape(1, extendable=False)),
        (WINDOWED + CHECKPOINTS, StateShape(1, (4, 9), extendable=False)),
        (WINDOW + recurrent(9) + appendix((6, recurrent(5))), StateShape(1, (6,))),
        (head(TOKENS) + recurrent(9), StateShape(0)),
    ],
)
def test_shape(path: Path, raw: bytes, shape: StateShape) -> None:
    assert look(path, raw).shape == shape


def test_cache_types(path: Path) -> None:
    for raw, types in (
        (full(TOKENS), ("f16", "f16")),
        (TWO, ("f16", "f16")),
        (full(TOKENS, has_v=False), ("f16", "none")),
        (head(TOKENS) + recurrent(9), ("none", "none")),
    ):
        assert shapes.cache_types(look(path, raw).layout) == types


@pytest.mark.parametrize("behind", [b"", CHECKPOINTS])
def test_padding(path: Path, behind: bytes) -> None:
    """Padding adds one cell in front of the window, in place; the result describes the new file."""
    before = look(path, WINDOWED + behind)
    after = shapes.pad(path, before)
    again = shapes.inspect(path, path.stat().st_size)

    assert after.shape.extendable
    assert after.shape.checkpoints == before.shape.checkpoints
    assert (after.identity, after.layout) == (files.identity(path), again.layout)
    assert after.identity.inode == before.identity.inode
    assert after.identity.size_bytes > before.identity.size_bytes
    assert [block.pos_min for block in after.layout.attention] == [0, 5]


@pytest.mark.parametrize("raw", [full(TOKENS), WINDOW + recurrent(9), LONG_WINDOW])
def test_nothing_to_pad(path: Path, raw: bytes) -> None:
    """A state without a window, or shorter than its window, lacks nothing."""
    before = look(path, raw)

    assert shapes.pad(path, before) == before
    assert path.read_bytes() == raw
    assert before.shape.extendable != before.has_window


def test_what_cannot_be_padded_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KvFileError("not a window that is known")

    monkeypatch.setattr(rewrite, "pad", refuse)
    before = look(path, WINDOWED)

    assert shapes.pad(path, before) == before
    assert not before.shape.extendable
    assert path.read_bytes() == WINDOWED


def test_padding_that_breaks_off(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the file is new and half old then: the error keeps it from use."""
    before = look(path, WINDOWED)
    monkeypatch.setattr(os, "pwrite", enospc)
    with pytest.raises(OSError, match="No space"):
        shapes.pad(path, before)


def test_padding_is_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file is read again, as if the server had written it."""
    before = look(path, WINDOWED)
    real = rewrite.pad(before.layout, None, len(WINDOWED))
    assert real is not None
    wrong = rewrite.Rewrite(
        real.start, (b"\xff" * (real.size_bytes - real.start),), real.size_bytes
    )
    monkeypatch.setattr(rewrite, "pad", lambda *_: wrong)
    with pytest.raises(KvFileError):
        shapes.pad(path, before)


@pytest.mark.parametrize("raw", [full(TOKENS), TWO])
def test_cut(path: Path, raw: bytes) -> None:
    before, target = look(path, raw), path.with_name("cut")
    made = shapes.cut(path, target, before.identity, 4)

    assert made == shapes.inspect(target, target.stat().st_size)
    assert made.head.tokens == tok.pack(TOKENS[:4])
    assert made.shape == before.shape
    assert path.read_bytes() == raw


@pytest.mark.parametrize(("raw", "n"), [(full(TOKENS), 10), (full(TOKENS), 0), (WINDOWED, 4)])
def test_what_cannot_be_cut(path: Path, raw: bytes, n: int) -> None:
    before, target = look(path, raw), path.with_name("cut")
    with pytest.raises(KvFileError):
        shapes.cut(path, target, before.identity, n)
    assert not target.exists()


def test_cut_of_another_file(path: Path) -> None:
    """The file was replaced by one of the same size after its inspection."""
    before, target = look(path, full(TOKENS)), path.with_name("cut")
    other = path.with_name("other")
    other.write_bytes(full(TOKENS))
    other.rename(path)
    for make in (
        lambda: shapes.cut(path, target, before.identity, 4),
        lambda: shapes.restream(path, target, before.identity, 2),
    ):
        with pytest.raises(KvFileError, match="was replaced"):
            make()
    assert not target.exists()


def test_cut_is_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong result is neither returned nor left behind."""
    before, target = look(path, full(TOKENS)), path.with_name("cut")
    size = before.identity.size_bytes
    whole = rewrite.Rewrite(size, (), size)
    for plan in (rewrite.Rewrite(0, (b"?" * 99,), 99), whole):
        monkeypatch.setattr(rewrite, "cut", lambda *_, plan=plan: plan)
        with pytest.raises(KvFileError):
            shapes.cut(path, target, before.identity, 4)
        assert not target.exists()


@pytest.mark.parametrize(("raw", "n"), [(full(TOKENS), 3), (TWO, 1), (WINDOWED, 2)])
def test_restream(path: Path, raw: bytes, n: int) -> None:
    before, target = look(path, raw), path.with_name("other")
    shapes.restream(path, target, before.identity, n)
    made = shapes.inspect(target, target.stat().st_size)

    assert made.head == before.head
    assert made.shape.n_stream == n
    assert made.layout.fingerprint() == before.layout.fingerprint()
