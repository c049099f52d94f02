"""Breakers by a clock of the test: breaks after failures in a row."""

from router.hosts.link import Breaker


def test_breaks_double_up_to_the_longest() -> None:
    now, breaks = 0.0, []
    breaker = Breaker(10.0, lambda: now)
    for _ in range(2):
        breaker.failure()
    for _ in range(6):
        breaker.failure()
        begun = now
        while breaker.is_open:
            now += 0.5
        breaks.append(now - begun)
    assert breaks == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def test_many_failures_overflow_nothing() -> None:
    breaker = Breaker(10.0, lambda: 0.0)
    for _ in range(2000):
        breaker.failure()
    assert breaker.is_open
