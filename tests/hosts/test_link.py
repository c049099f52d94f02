"""What a fetch is expected to take, learned from those before."""

from dataclasses import dataclass

import pytest

from router.hosts.breaker import Breaker
from router.hosts.link import Link

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


def test_it_begins_as_a_link_of_one_gigabit(link: Link) -> None:
    assert 0.9 < link.seconds(110 * MB) < 1.1


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
    assert link.seconds(100 * MB) == pytest.approx(before, rel=0.02)


def test_a_fetch_is_given_time(link: Link) -> None:
    assert link.limit_s(0.01) == 2.0
    assert link.limit_s(4.0) == 12.0


def test_a_fast_link_is_measured_before_anything_is_fetched(link: Link, clock: Clock) -> None:
    """At 1 Gbit/s no fetch pays for a GPU, so nothing would ever be learned of a faster link."""
    assert link.is_to_be_measured()
    link.not_measured()
    assert not link.is_to_be_measured(), "not at once again"
    clock.at += 6
    assert link.is_to_be_measured()
    link.measured(8 * MB, 0.008)
    assert link.seconds(1000 * MB) == pytest.approx(1.0, abs=0.02)
    clock.at += 599
    assert not link.is_to_be_measured()
    link.fetched(2 * MB, 0.002, 0.005)
    clock.at += 599
    assert not link.is_to_be_measured(), "the fetch has told"
    clock.at += 2
    assert link.is_to_be_measured()


def test_few_bytes_measure_nothing(link: Link) -> None:
    before = link.seconds(100 * MB)
    link.measured(1000, 0.5)
    assert link.seconds(100 * MB) == before
    assert link.is_to_be_measured()
