"""Eviction order, checked against a scan of all items; its bookkeeping stays small."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.inventory.eviction import EvictionOrder

ITEMS = "abcdefgh"


def ranks(*worths: float) -> EvictionOrder[str]:
    """Return an order with items a, b, ... of these values, used in that order."""
    made: EvictionOrder[str] = EvictionOrder()
    for item, worth in zip(ITEMS, worths, strict=False):
        made.use(item, worth)
    return made


def test_of_equals_the_one_that_was_used_longest_ago() -> None:
    made = ranks(1, 1, 1)
    assert made.least() == "a"
    made.use("a", 1)
    assert made.least() == "b"


def test_time_makes_up_for_worth() -> None:
    """b has four times the value of a, and goes first only after a long time without use."""
    made = ranks(1, 4)
    assert made.least() == "a"
    made.use("a", 1)
    made.use("c", 100)
    assert made.least() == "a"  # 1/2 for a, 4/3 for b
    for _ in range(20):
        made.use("a", 1)
    assert made.least() == "b"  # 4/23 for b, 1 for a


def test_who_is_worth_nothing_goes_first() -> None:
    made = ranks(1, 0, 0)
    made.use("a", 1)
    assert made.least() == "b"


def test_another_worth_is_no_use() -> None:
    made = ranks(1, 1)
    made.value("a", 1.5)
    made.value("a", 1)
    assert made.least() == "a"
    made.value("b", 0.1)
    assert made.least() == "b"


def test_who_is_gone() -> None:
    made = ranks(1)
    made.drop("a")
    made.drop("a")
    made.value("a", 3)
    assert len(made) == 0
    with pytest.raises(LookupError):
        made.least()


def test_many_uses_leave_few_rows() -> None:
    made = ranks(1, 2, 3)
    for turn in range(1000):
        made.use("a", 1 + turn % 2)
    assert sum(len(one.heap) for one in made._classes.values()) <= 3 * 3 + 2 * 65


def test_who_has_left_a_class_is_not_looked_at_one_by_one() -> None:
    """Regression: new values for all snapshots on disk at once delayed all requests."""
    made = ranks()
    for number in range(100):
        made.use(f"old{number}", 1.0)
    for number in range(100):
        made.value(f"old{number}", 100.0)
    assert len(made._classes) == 1
    assert made.least() == "old0"


def test_a_worth_that_goes_to_and_fro_leaves_few_rows() -> None:
    made = ranks(1, 1, 1)
    for turn in range(1000):
        made.value("a", 1 + turn % 2)
    assert sum(len(one.heap) for one in made._classes.values()) <= 2 * (3 * 3 + 65)


steps = st.tuples(
    st.sampled_from(["use", "value", "drop"]),
    st.sampled_from(ITEMS),
    st.sampled_from([0.0, 0.001, 0.5, 1.0, 1.1, 3.0, 1e9]),
)


@given(st.lists(steps, max_size=200))
def test_it_is_the_least_of_all_within_the_width_of_a_class(
    told: list[tuple[str, str, float]],
) -> None:
    made: EvictionOrder[str] = EvictionOrder()
    used: dict[str, int] = {}
    worths: dict[str, float] = {}
    now = 0
    for what, item, worth in told:
        match what:
            case "use":
                now += 1
                made.use(item, worth)
                used[item], worths[item] = now, worth
            case "value":
                made.value(item, worth)
                if item in worths:
                    worths[item] = worth
            case _:
                made.drop(item)
                used.pop(item, None)
                worths.pop(item, None)
        if worths:
            score = {i: worths[i] / (now - used[i] + 1) for i in worths}
            assert score[made.least()] <= 1.2001 * min(score.values())
    assert len(made) == len(worths)
