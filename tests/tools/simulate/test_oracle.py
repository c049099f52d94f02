"""The upper bound of reuse against a version too simple to be wrong."""

from hypothesis import given
from hypothesis import strategies as st

from router.base.tokens import join, pack
from router.tools.simulate.accounting import reusable

short = st.lists(st.sampled_from([1, 2]), min_size=1, max_size=6).map(tuple)


def naive(sequence: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """Return the reusable tokens: each prompt against all before it, token by token."""
    total = 0
    seen: list[tuple[int, ...]] = []
    for prompt, answer in sequence:
        best = 0
        for held in seen:
            n = 0
            while n < min(len(prompt), len(held)) and prompt[n] == held[n]:
                n += 1
            best = max(best, n)
        total += min(best, len(prompt) - 1)
        seen.append(prompt + answer)
    return total


@given(st.lists(st.tuples(short, short), max_size=12))
def test_equals_naive(sequence: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    packed = [(pack(p), join([pack(p), pack(a)])) for p, a in sequence]
    assert reusable(packed) == naive(sequence)
