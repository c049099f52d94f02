"""Seeds, and inputs that fuzzing found, replayed. `make fuzz` looks for more."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import ENTRIES

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for name in ENTRIES for path in (CORPUS / name).glob("*"))


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name[:12]}")
def test_an_input_of_the_corpus(path: Path) -> None:
    ENTRIES[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", ENTRIES)
@given(raw=st.binary())
def test_any_bytes(name: str, raw: bytes) -> None:
    ENTRIES[name](raw)


def test_each_entry_has_inputs() -> None:
    assert {path.parent.name for path in INPUTS} == set(ENTRIES)
