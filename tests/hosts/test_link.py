"""What a fetch is expected to take, learned from those before."""

from dataclasses import dataclass

import pytest

from router.hosts.link import Breaker, Link

MB = 1_000_000


@dataclass
class Clock:
    at: float = 0.0

    def now(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> Link:
    return Link(Breaker(30.0, clock.now), clock.now)


def test_it_begins_as_a_link_of_ten_gigabits(link: Link) -> None:
    assert 0.9 < link.seconds(1100 * MB) < 1.1


def test_it_learns_what_asking_takes_and_what_bytes_take(link: Link) -> None:
    for size in (2, 50, 10, 100) * 3:
        link.fetched(size * MB, size / 1000, 0.020)
    assert link.seconds(0) == pytest.approx(0.020, rel=0.1)
    assert link.seconds(500 * MB) == pytest.approx(0.520, rel=0.1)


def test_few_bytes_say_nothing_of_the_rate(link: Link) -> None:
    before = link.seconds(100 * MB) - link.seconds(0)
    link.fetched(1000, 0.5, 0.005)
    assert link.seconds(100 * MB) - link.seconds(0) == pytest.approx(before)


def test_a_slow_fetch_that_was_given_up_is_learned_from(link: Link) -> None:
    link.gave_up(10 * MB, 5.0, 5.0)
    assert link.seconds(100 * MB) > 15.0


def test_a_failure_without_bytes_is_forgotten(link: Link, clock: Clock) -> None:
    """It was the other host, not the link: else it would never be tried again."""
    before = link.seconds(100 * MB)
    for _ in range(3):
        link.gave_up(0, 0.0, 4.0)
    assert link.breaker.is_open
    assert before < link.seconds(100 * MB) < before + 12
    clock.at += 600
    assert link.seconds(100 * MB) == pytest.approx(before, abs=0.05)


def test_a_fetch_is_given_time(link: Link) -> None:
    assert link.limit_s(0.01) == 2.0
    assert link.limit_s(4.0) == 12.0


def test_little_that_came_slowly_hardly_counts(link: Link) -> None:
    """The first byte comes late; a day of the cold tier must not hang on 1.5 MB."""
    link.fetched(int(1.5 * MB), 0.2, 0.1)
    assert link.seconds(500 * MB) < 8


def test_a_slow_link_is_given_up_once(link: Link, clock: Clock) -> None:
    """1 GB each twelve minutes at 1 Gbit/s: the first fetch tells, the others come."""
    came = []
    for _ in range(4):
        limit_s = link.limit_s(link.seconds(1000 * MB))
        came.append(limit_s > 9.1)
        if came[-1]:
            link.fetched(1000 * MB, 9.1, 0.005)
        else:
            link.gave_up(int(110 * MB * limit_s), limit_s, limit_s)
        clock.at += 720
    assert came == [False, True, True, True]


def test_a_slow_rate_may_have_doubled_after_ten_minutes(link: Link, clock: Clock) -> None:
    """Else one slow hour of a network would keep every later fetch from being tried."""
    guessed = link.seconds(1000 * MB)
    for _ in range(3):
        link.fetched(1000 * MB, 100.0, 0.005)
    assert link.seconds(1000 * MB) == pytest.approx(100, rel=0.05)
    clock.at += 599
    assert link.seconds(1000 * MB) == pytest.approx(100, rel=0.05)
    clock.at += 2
    assert link.seconds(1000 * MB) == pytest.approx(50, rel=0.05)
    clock.at += 86_400
    assert link.seconds(1000 * MB) == pytest.approx(guessed, rel=0.05)
