"""Ghost list: token sequences that were held once are remembered, within bounds."""

from router.base.types import Namespace
from router.core.model.prefix_index import GhostList
from tests.support.scheduler.build import NS, OTHER_NS, run_of, tokens


def test_what_was_held_is_found_by_its_beginning() -> None:
    ghosts = GhostList()
    ghosts.add(NS, tokens(1, 2, 3))

    assert ghosts.nearest(NS, tokens(1, 2, 4)) == (2, True)
    assert ghosts.nearest(NS, tokens(1, 2, 3, 4)) == (3, False)
    assert ghosts.nearest(NS, tokens(9)) == (0, False)
    assert ghosts.nearest(OTHER_NS, tokens(1, 2, 3)) == (0, False)


def test_the_longer_takes_the_place_of_its_beginnings() -> None:
    ghosts = GhostList()
    for n in (5, 9, 9):
        ghosts.add(NS, run_of(n))
    ghosts.add(NS, run_of(0))

    assert len(ghosts) == 1
    assert ghosts.nearest(NS, run_of(20)) == (9, False)


def test_all_its_beginnings_go_however_many_and_nothing_else() -> None:
    ghosts = GhostList()
    for n in range(9, 0, -1):
        ghosts.add(NS, run_of(n))
    ghosts.add(NS, tokens(1, 1, 2))
    assert len(ghosts) == 8  # all but the two prefixes of the last one
    ghosts.add(NS, run_of(8))

    assert len(ghosts) == 3
    assert ghosts.nearest(NS, run_of(20)) == (9, False)
    assert ghosts.nearest(NS, tokens(1, 1, 2)) == (3, False)


def test_of_too_many_the_oldest_are_forgotten() -> None:
    ghosts = GhostList(max_tokens=1000)
    for token in range(20):
        ghosts.add(NS, run_of(100, token))

    assert len(ghosts) == 6  # each counts as a little more than its tokens
    assert ghosts.nearest(NS, run_of(100, 13)) == (0, False)
    assert ghosts.nearest(NS, run_of(100, 14)) == (100, False)


def test_one_that_is_too_long_leaves_nothing() -> None:
    ghosts = GhostList(max_tokens=10)
    ghosts.add(NS, run_of(100))

    assert len(ghosts) == 0


def test_a_namespace_without_a_sequence_is_forgotten() -> None:
    """Clients may make a namespace of each request by `cache_salt`."""
    ghosts = GhostList(max_tokens=1000)
    for number in range(200):
        ghosts.add(Namespace(f"m@alice+{number}"), tokens(1, 2, 3))
    assert len(ghosts._index) == len(ghosts) < 20
