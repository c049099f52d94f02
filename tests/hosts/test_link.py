"""What a fetch is expected to take, learned from those before."""

import pytest

from router.hosts.breaker import Breaker
from router.hosts.link import Link

MB = 1_000_000


@pytest.fixture
def link() -> Link:
    return Link(Breaker(30.0, lambda: 0.0))


def test_it_begins_as_a_link_of_one_gigabit(link: Link) -> None:
    assert 0.9 < link.seconds(110 * MB) < 1.1


def test_it_learns_what_asking_takes_and_what_bytes_take(link: Link) -> None:
    for size in (1, 50, 10, 100) * 3:
        link.fetched(size * MB, 0.020 + size / 1000)
    assert link.seconds(0) == pytest.approx(0.020, rel=0.1)
    assert link.seconds(500 * MB) == pytest.approx(0.520, rel=0.1)


def test_a_fetch_that_was_too_slow_is_learned_from(link: Link) -> None:
    link.gave_up(MB, 5.0)
    assert link.seconds(MB) > 1.0


def test_a_fetch_that_broke_at_once_tells_nothing_of_the_link(link: Link) -> None:
    before = link.seconds(100 * MB)
    for _ in range(3):
        link.gave_up(0, 0.001)
    assert link.seconds(100 * MB) == before
    assert link.breaker.is_open


def test_a_fetch_is_given_time(link: Link) -> None:
    assert link.limit_s(0.01) == 2.0
    assert link.limit_s(4.0) == 12.0
