"""Radix tree, checked against a linear search of a list."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.base.tokens import count, pack
from router.core.model.prefix_index import Match, PrefixIndex, _Node
from tests.base.test_tokens import naive_common_prefix
from tests.support.scheduler.build import run_of, tokens

Ids = list[int]
ids = st.lists(st.integers(0, 1), max_size=8)
sequences = st.lists(ids, max_size=12)


def filled(held: list[Ids]) -> PrefixIndex[int]:
    """Return an index with each sequence under its position in the list."""
    index: PrefixIndex[int] = PrefixIndex()
    for item, one in enumerate(held):
        index.insert(pack(one), item)
    return index


def nodes_of(index: PrefixIndex[int]) -> list[_Node[int]]:
    """Return all nodes but the root."""
    found: list[_Node[int]] = []
    todo = list(index._root.children.values())
    while todo:
        found.append(todo.pop())
        todo += found[-1].children.values()
    return found


@given(sequences, ids, st.integers(1, 4))
def test_match_tells_the_true_common_length_longest_first(
    held: list[Ids], prompt: Ids, limit: int
) -> None:
    shared = [naive_common_prefix(one, prompt) for one in held]

    found = filled(held).match(pack(prompt), limit)

    assert [m.common for m in found] == sorted((m.common for m in found), reverse=True)
    for match in found:
        assert match == Match(match.item, shared[match.item], len(held[match.item]))
        is_prefix = match.common == match.length
        assert is_prefix == (held[match.item] == prompt[: len(held[match.item])])
    assert len({m.item for m in found}) == len(found) == min(limit, sum(n > 0 for n in shared))
    assert (found[0].common if found else 0) == max(shared, default=0)


@given(sequences, ids)
def test_longest_is_the_longest_share(held: list[Ids], prompt: Ids) -> None:
    shared = [naive_common_prefix(one, prompt) for one in held]

    assert filled(held).nearest(pack(prompt))[0] == max(shared, default=0)


@given(sequences, ids)
def test_prefixes_are_all_strict_prefixes_shortest_first(held: list[Ids], prompt: Ids) -> None:
    found = list(filled(held).prefixes(pack(prompt)))

    expected = {
        item
        for item, one in enumerate(held)
        if one and one == prompt[: len(one)] and len(one) < len(prompt)
    }
    assert {m.item for m in found} == expected
    assert [m.length for m in found] == sorted(m.length for m in found)
    assert all(m.common == m.length and m.length == len(held[m.item]) for m in found)


@given(sequences, ids)
def test_beginnings_are_the_prefixes_and_the_same(held: list[Ids], prompt: Ids) -> None:
    found = list(filled(held).beginnings(pack(prompt)))

    expected = {item for item, one in enumerate(held) if one and one == prompt[: len(one)]}
    assert {m.item for m in found} == expected
    assert len(found) == len(expected)
    assert [m.length for m in found] == sorted(m.length for m in found)
    assert all(m.common == m.length and m.length == len(held[m.item]) for m in found)


@given(sequences, ids.filter(bool))
def test_branches_are_the_different_continuations(held: list[Ids], at: Ids) -> None:
    """Asked only for sequences in the index, because a point inside an edge is no node."""
    index = filled([*held, at])
    following = {one[len(at)] for one in held if one[: len(at)] == at and len(one) > len(at)}

    assert index.branches_at(pack(at)) == len(following)


@settings(max_examples=150)
@given(st.data())
def test_any_order_of_insert_and_remove_leaves_a_minimal_tree(data: Any) -> None:
    """Minimal: each leaf has items, and no node could be merged with its only child."""
    index: PrefixIndex[int] = PrefixIndex()
    held: dict[int, Ids] = {}
    for item in range(data.draw(st.integers(0, 20))):
        if held and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(held)))
            index.remove(pack(held.pop(gone)), gone)
        held[item] = data.draw(ids)
        index.insert(pack(held[item]), item)

        assert len(index) == len(held)
        for node in nodes_of(index):
            assert node.edge
            assert node.items or len(node.children) > 1
        for one in map(pack, held.values()):
            assert b"".join(index.edges(one)) == one
        shared = [one for one in held.values() if one]
        assert {m.item for m in index.match(pack([0]), 99)} <= set(held)
        assert all(index.nearest(pack(one))[0] == len(one) for one in shared)


def test_the_shorter_of_two_that_share_as_much_comes_first() -> None:
    index = filled([[1, 1, 2, 2], [1, 1, 2]])

    assert index.match(tokens(1, 1)) == [Match(1, 2, 3), Match(0, 2, 4)]


def test_shorter_means_fewer_tokens_and_not_fewer_branches() -> None:
    """Regression: four long sequences came before two short ones that diverge late."""
    base = [1] * 20
    longer = [[*base, *[10 + n] * 500] for n in range(4)]
    index = filled([*longer, [*base, 5, 6], [*base, 5, 7]])

    found = index.match(pack([*base, 99]), limit=4)
    assert [(m.item, m.common, m.length) for m in found] == [
        (4, 20, 22),
        (5, 20, 22),
        (0, 20, 520),
        (1, 20, 520),
    ]


def test_an_item_without_tokens_is_kept_but_never_matches() -> None:
    index = filled([[]])

    assert (len(index), index.match(tokens(1))) == (1, [])
    index.remove(tokens(), 0)
    assert len(index) == 0


@pytest.mark.parametrize(
    ("ids_", "item"),
    [(tokens(2), 0), (tokens(1), 0), (tokens(1, 1, 1), 0), (tokens(1, 1), 7)],
    ids=["unknown branch", "inside an edge", "too long", "another item"],
)
def test_what_is_not_there_cannot_be_removed(ids_: Any, item: int) -> None:
    index = filled([[1, 1]])

    with pytest.raises(KeyError):
        index.remove(ids_, item)
    assert len(index) == 1


def test_no_branch_where_nothing_ends_or_splits() -> None:
    index = filled([[1, 1, 1]])

    assert index.branches_at(tokens()) == 0  # all sequences share the root
    assert index.branches_at(tokens(1)) == 0
    assert index.branches_at(tokens(2)) == 0


def test_a_lookup_below_a_shared_root_is_bounded() -> None:
    """1,000 conversations share one system prompt; a lookup visits a few of them."""
    index: PrefixIndex[int] = PrefixIndex()
    for item in range(1000):
        index.insert(pack([1, 1, 1000 + item]), item)

    found = index.match(run_of(2), limit=2000)

    assert 0 < len(found) <= 32
    assert {m.common for m in found} == {2}
    assert count(run_of(2)) == index.nearest(run_of(2))[0]


def test_nearest_tells_whether_something_goes_on() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    for ids in ((1, 2, 3), (1, 2, 3, 4), (7, 8)):
        index.insert(pack(ids), str(ids))

    assert index.nearest(pack((1, 2, 9))) == (2, True)
    assert index.nearest(pack((1, 2, 3, 9))) == (3, True)
    assert index.nearest(pack((1, 2, 3, 4, 9))) == (4, False)
    assert index.nearest(pack((7, 8, 9))) == (2, False)
    assert index.nearest(pack((5,))) == (0, False)
