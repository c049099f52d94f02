"""Packed tokens behave like the lists that they stand for."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.base.tokens import (
    EMPTY,
    TokenPieces,
    common_prefix,
    count,
    head,
    ints,
    join,
    media_of,
    pack,
    tail,
    unpack,
)
from tests.support.scheduler.build import run_of, tokens

# Few distinct values, so that common prefixes are long.
few = st.lists(st.integers(0, 1), max_size=12)
anything = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


def naive_common_prefix(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


@given(few, few)
@example([256], [1])  # differ in one byte only
@example([1], [1 << 24])
@example([], [1])
def test_common_prefix_equals_naive(a: list[int], b: list[int]) -> None:
    assert naive_common_prefix(a, b) == common_prefix(pack(a), pack(b))


@given(few, anything, anything)
def test_common_prefix_is_at_least_what_was_put_in_front(
    front: list[int], a: list[int], b: list[int]
) -> None:
    assert naive_common_prefix(front + a, front + b) == common_prefix(
        pack(front + a), pack(front + b)
    )


@given(anything)
def test_packing_loses_nothing(ids: list[int]) -> None:
    assert unpack(pack(ids)) == list(ints(pack(ids))) == ids
    assert count(pack(ids)) == len(ids)


@given(anything, st.integers(0, 25))
def test_head_and_tail_are_the_two_parts(ids: list[int], n: int) -> None:
    packed = pack(ids)

    assert unpack(head(packed, n)) == ids[:n]
    assert unpack(tail(packed, n)) == ids[n:]
    assert join([head(packed, n), tail(packed, n)]) == packed


def test_an_id_that_is_no_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack([2**31])


def test_nothing_is_empty() -> None:
    assert EMPTY == tokens() == run_of(0) == join([])
    assert count(EMPTY) == 0


def test_many_ids_are_packed_like_few() -> None:
    ids = list(range(200_000))
    assert unpack(pack(ids)) == ids
    with pytest.raises(OverflowError):
        pack([*ids, 2**31])


def test_ids_of_media_are_found() -> None:
    assert media_of(pack([1, -5, 2**31 - 1, -(2**31)])) == (-5, -(2**31))
    assert media_of(pack([1, 255, 2**31 - 1])) == ()


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_pieces(ids: list[int], data: st.DataObject) -> None:
    made, whole = TokenPieces(pack(ids)), pack(ids)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)))
    if cuts:
        bounds = [0, *cuts, len(ids)]
        made.share(tuple(whole[4 * a : 4 * b] for a, b in pairwise(bounds)))
    assert (made.tokens, made.n_tokens) == (whole, len(ids))
