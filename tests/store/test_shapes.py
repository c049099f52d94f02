"""`router.store.shapes`: facts read from a state file, and files made from it."""

from io import BytesIO
from pathlib import Path

import pytest

from router.base.errors import KvFileError
from router.base.types import StateShape
from router.store import shapes
from router.store.format import rewrite
from tests.support.files.state_files import appendix, attention, full, head, recurrent, stream

TOKENS = range(5, 15)
WINDOW = head(TOKENS) + attention(stream(range(10)))
WINDOWED = WINDOW + attention(stream(range(6, 10)))
CHECKPOINTS = appendix(
    (9, attention(stream(range(5, 9)))), (4, attention(stream(range(4)))), window=True
)
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


def test_padding_is_checked(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The written file is read again, as if the server had written it."""
    before = look(path, WINDOWED)
    real = rewrite.pad(before.layout, BytesIO(WINDOWED), len(WINDOWED))
    assert real is not None
    wrong = rewrite.Rewrite(
        real.start, (b"\xff" * (real.size_bytes - real.start),), real.size_bytes
    )
    monkeypatch.setattr(rewrite, "pad", lambda *_: wrong)
    with pytest.raises(KvFileError):
        shapes.pad(path, before)


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
