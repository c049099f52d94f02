"""Every architecture through kvferry: what is reused, and whether the answers are right.

`KVFERRY_ARCHS_PART=1/4` plays a fourth of them. Rows go to the file of KVFERRY_ARCHS_ROWS, of which
`python -m tests.archs.table` makes docs/architectures.md.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.archs.conftest import SEEDS
from tests.archs.expected import MOVES, NAMES, REASONS
from tests.archs.play import Played, play

pytestmark = [pytest.mark.archs, pytest.mark.timeout(600)]


def _part() -> list[str]:
    number, _, of = os.environ.get("KVFERRY_ARCHS_PART", "1/1").partition("/")
    return NAMES[int(number) % int(of) :: int(of)]


@pytest.mark.parametrize("name", _part())
async def test_an_architecture(
    name: str, model_of: Callable[[str, int], Path], server_argv: Sequence[str], tmp_path: Path
) -> None:
    for seed in SEEDS:
        folder = tmp_path / str(seed) / "kv"
        folder.parent.mkdir()
        played = await play(model_of(name, seed), folder, server_argv)
        if played.can_tell or name in REASONS:
            break
    else:
        pytest.fail("no seed gives a model with answers that depend on the context")
    _record(name, played)
    excused, _ = REASONS.get(name, ((), ""))
    low = {move: cell for move in MOVES if (cell := played.cells[move]).share < 0.95}
    assert {cell.wrong for cell in played.cells.values()} == {""}, played
    assert set(low) <= set(excused), low
    first = played.cells["first turn"]
    assert first.computed <= 1.05 * first.tokens, "computed twice"


def _record(name: str, played: Played) -> None:
    if path := os.environ.get("KVFERRY_ARCHS_ROWS"):
        with Path(path).open("a") as file:
            file.write(json.dumps({"name": name, **asdict(played)}) + "\n")
