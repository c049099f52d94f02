"""Eviction policies, on sequences small enough to be worked out by hand."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.tokens import Tokens, pack
from router.core.model.policy import UNLIMITED
from router.tools.simulate.accounting import reusable
from router.tools.simulate.eviction import compare, served_by
from router.tools.simulate.machines.hardware import PRESETS

HARDWARE = dataclasses.replace(PRESETS["gpu-8b"], bytes_per_token=1)


def prompt(which: int, n: int = 10) -> tuple[Tokens, Tokens]:
    """Return a prompt of `n` tokens unlike any other `which`, and it with a one-token answer."""
    ids = [which] * n
    return pack(ids), pack([*ids, 99])


def reused(sequence: list[tuple[Tokens, Tokens]], budget: int) -> dict[str, int]:
    return {e.policy: e.reused_tokens for e in compare(sequence, [budget], HARDWARE)}


def test_scan() -> None:
    """1 2 3 1 2 3 with room for two: LRU evicts the next one needed, Belady keeps 1 and 2."""
    sequence = [prompt(n) for n in (1, 2, 3, 1, 2, 3)]
    found = reused(sequence, 22)
    assert found["lru"] == 0
    assert found["belady"] == 18


def test_room_for_all() -> None:
    """Without a limit all policies are equal, and equal to the oracle."""
    sequence = [prompt(n, 5 + n) for n in (1, 2, 3, 1, 1, 2, 3)]
    assert set(reused(sequence, UNLIMITED).values()) == {reusable(sequence)}


def test_no_room_for_any() -> None:
    sequence = [prompt(n) for n in (1, 1, 1)]
    assert set(reused(sequence, 5).values()) == {0}


def test_budget_of_nothing_is_left_out() -> None:
    assert compare([prompt(1)], [0], HARDWARE) == []


def test_recently_used_stays() -> None:
    sequence = [prompt(n) for n in (1, 2, 1, 3, 1)]
    assert reused(sequence, 22)["lru"] == 18


def test_served_by_the_longest() -> None:
    one, two = prompt(1, 5), prompt(1, 9)
    assert served_by([one, two, prompt(1, 7), prompt(2)]) == [None, 0, 1, None]


def test_a_longer_state_takes_the_shorter_ones_place() -> None:
    """A conversation of three turns needs room for one state."""
    turns = [(pack([1] * n), pack([1] * (n + 1))) for n in (5, 8, 11)]
    found = compare(turns, [12], HARDWARE)
    assert {e.policy: (e.reused_tokens, e.evictions) for e in found} == {
        "kvferry": (15, 0),
        "lru": (15, 0),
        "belady": (15, 0),
    }


states = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6)


@pytest.mark.parametrize("policy", ["kvferry", "lru", "belady"])
@given(sequence=st.lists(states, max_size=14), budget=st.integers(1, 30))
def test_never_more_than_an_unlimited_cache(
    policy: str, sequence: list[list[int]], budget: int
) -> None:
    held = [(pack(ids), pack([*ids, 3])) for ids in sequence]
    assert reused(held, budget)[policy] <= reusable(held)
    assert reused(held, UNLIMITED)[policy] == reusable(held)
