"""Drivers of server processes, by a clock of the test's own."""

from router.base.types import BackendId
from router.llama.attach.drivers import Drivers

A, B, THERE = BackendId("a"), BackendId("b"), BackendId("one that the host h drives")
ONE, TWO = ("marker", "one.gguf", "b1"), ("marker", "two.gguf", "b1")


def test_the_first_backend_keeps_a_process_until_it_releases_it() -> None:
    drivers = Drivers(lambda: 0.0)
    assert drivers.take(ONE, A) == A
    assert drivers.take(ONE, B) == A
    assert drivers.take(TWO, B) == B
    drivers.release(A)
    assert list(drivers.held_s()) == [TWO]
    assert drivers.take(ONE, B) == B


def test_a_process_ages_from_its_first_sight() -> None:
    now = 5.0
    drivers = Drivers(lambda: now)
    drivers.take(ONE, A)
    now = 7.0
    drivers.take(ONE, A)
    assert drivers.held_s() == {ONE: 2.0}


def test_a_process_left_to_another_host_can_be_taken_back() -> None:
    now = 0.0
    drivers = Drivers(lambda: now)
    drivers.take(ONE, A)
    drivers.leave(ONE, THERE)
    now = 3.0
    assert (drivers.held_s(), drivers.left_s()) == ({}, {ONE: 3.0})
    drivers.leave(ONE, THERE)
    assert drivers.left_s() == {ONE: 0.0}
    assert drivers.take(ONE, A) == THERE
    drivers.release(A)  # its monitor gives up: the process stays with the other host
    assert drivers.take(ONE, A) == THERE
    drivers.take_back(ONE)
    assert drivers.take(ONE, A) == A
