"""Reusable tokens by memory kind, row by row (llama-server.md section 4.3)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.types import MemoryKind
from router.core.model.memory_kinds import reusable_tokens

FULL, SWA, HYBRID = MemoryKind.FULL, MemoryKind.SLIDING_WINDOW, MemoryKind.HYBRID
RECURRENT, UNKNOWN = MemoryKind.RECURRENT, MemoryKind.UNKNOWN
OPAQUE = MemoryKind.OPAQUE


@pytest.mark.parametrize(
    ("kind", "extension", "identical", "diverging"),
    [
        (FULL, 200, 199, 100),
        (SWA, 200, 0, 0),
        (HYBRID, 200, 0, 0),
        (RECURRENT, 200, 0, 0),
        (OPAQUE, 200, 0, 0),
        (UNKNOWN, 200, 0, 0),
    ],
)
def test_a_state_of_200_tokens(
    kind: MemoryKind, extension: int, identical: int, diverging: int
) -> None:
    assert reusable_tokens(kind, 300, 200, 200) == extension
    assert reusable_tokens(kind, 200, 200, 200) == identical
    assert reusable_tokens(kind, 300, 100, 200) == diverging


def test_a_live_slot_falls_back_to_the_last_checkpoint() -> None:
    assert reusable_tokens(HYBRID, 200, 150, 200, checkpoints=(50, 120, 196)) == 120
    assert reusable_tokens(HYBRID, 200, 200, 200, checkpoints=(196,)) == 196
    assert reusable_tokens(HYBRID, 200, 10, 200, checkpoints=(50,)) == 0
    assert reusable_tokens(SWA, 200, 10, 200, checkpoints=(0,)) == 0


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    assert reusable_tokens(FULL, 1, 1, 1) == 0
    assert reusable_tokens(FULL, 0, 0, 9) == 0


@given(
    st.sampled_from(MemoryKind),
    st.integers(0, 20),
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.integers(0, 20), max_size=3).map(tuple),
)
def test_never_more_than_is_shared(
    kind: MemoryKind, prompt: int, common: int, held: int, checkpoints: tuple[int, ...]
) -> None:
    common = min(common, prompt, held)

    reused = reusable_tokens(kind, prompt, common, held, checkpoints=checkpoints)

    assert 0 <= reused <= common
    assert reused < max(prompt, 1)


def test_what_can_be_restored_at_all() -> None:
    assert [kind for kind in MemoryKind if kind.can_restore] == [
        *(FULL, SWA, HYBRID),
        *(RECURRENT, OPAQUE),
    ]
    assert [kind for kind in MemoryKind if kind.goes_back] == [FULL]


def test_unextendable_state_gives_its_checkpoints() -> None:
    assert reusable_tokens(SWA, 300, 200, 200, extendable=False) == 0
    assert reusable_tokens(SWA, 300, 200, 200, checkpoints=(96, 196), extendable=False) == 195
    assert reusable_tokens(SWA, 300, 120, 200, checkpoints=(96, 196), extendable=False) == 95
