from dataclasses import dataclass as pythons
from dataclasses import field, replace
from typing import Any

from router.base.frozen import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Ours:
    a: int
    b: tuple[int, ...] = field(default_factory=tuple)


@pythons(frozen=True, slots=True, order=True)
class Pythons:
    a: int
    b: tuple[int, ...] = field(default_factory=tuple)


def test_equal_hashed_ordered_and_replaced_like_pythons_own() -> None:
    kinds: list[Any] = [Ours, Pythons]
    for kind in kinds:
        one, same, other = kind(1), kind(1, ()), kind(2)
        assert one == same != other
        assert len({one, same, other}) == 2
        assert one < other
        assert replace(one, a=2) == other
        assert not hasattr(one, "__dict__")
    assert hash(Ours(1)) == hash(Pythons(1))


def test_one_that_may_change_has_no_hash() -> None:
    @dataclass(slots=True)
    class Plain:
        a: int

    assert Plain.__hash__ is None
