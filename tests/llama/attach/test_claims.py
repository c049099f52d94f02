"""Claims of server processes, by a clock of the test's own."""

from router.base.types import BackendId
from router.llama.attach.claims import Claims

A, B, THERE = BackendId("a"), BackendId("b"), BackendId("one that the host h drives")
ONE, TWO = ("marker", "one.gguf", "b1"), ("marker", "two.gguf", "b1")


def test_the_first_backend_keeps_a_process_until_it_releases_it() -> None:
    claims = Claims(lambda: 0.0)
    assert claims.take(ONE, A) == A
    assert claims.take(ONE, B) == A
    assert claims.take(TWO, B) == B
    claims.release(A)
    assert list(claims.held_s()) == [TWO]
    assert claims.take(ONE, B) == B


def test_a_claim_ages_from_its_first_sight() -> None:
    now = 5.0
    claims = Claims(lambda: now)
    claims.take(ONE, A)
    now = 7.0
    claims.take(ONE, A)
    assert claims.held_s() == {ONE: 2.0}


def test_a_process_left_to_another_host_can_be_taken_back() -> None:
    now = 0.0
    claims = Claims(lambda: now)
    claims.take(ONE, A)
    claims.leave(ONE, THERE)
    now = 3.0
    assert (claims.held_s(), claims.left_s()) == ({}, {ONE: 3.0})
    claims.leave(ONE, THERE)
    assert claims.left_s() == {ONE: 0.0}
    assert claims.take(ONE, A) == THERE
    claims.release(A)  # its monitor gives up: the process stays with the other host
    assert claims.take(ONE, A) == THERE
    claims.take_back(ONE)
    assert claims.take(ONE, A) == A
