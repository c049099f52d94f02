"""Suspects: who is to blame for the end of a server, and for how long."""

import pytest

from router.base.errors import SuspectError
from router.base.types import BackendId, RequestId
from router.web.api import suspects
from router.web.api.suspects import Suspects

A, B = BackendId("a"), BackendId("b")
ONE, TWO = RequestId("1"), RequestId("2")


class Time:
    now_s = 0.0

    def now(self) -> float:
        return self.now_s


def test_the_one_that_was_sent_last_takes_the_blame() -> None:
    made = Suspects(Time().now)
    made.sent(ONE, A)
    made.sent(TWO, A)
    assert made.blame(ONE, A, b"1", None, 0) is None
    assert made.blame(TWO, A, b"2", None, 0) == 1
    made.over(TWO)
    assert made.blame(ONE, A, b"1", None, 0) is None  # that end is explained
    assert made.check(b"1", None) == made.check(b"2", None) == 0


def test_requests_that_are_over_are_forgotten() -> None:
    made = Suspects(Time().now)
    for number in range(10):
        name = RequestId(str(number))
        made.sent(name, A if number % 2 else B)
        made.over(name)
        made.over(name)
    assert not any(made._at.values())
    assert made.blame(ONE, A, b"1", None, 0) is None


def test_after_two_ends_it_is_refused_longer_each_time() -> None:
    time = Time()
    made = Suspects(time.now)

    def end(raw: bytes, before: int = 0) -> None:
        made.sent(ONE, A)
        assert made.blame(ONE, A, raw, None, before)
        made.over(ONE)

    end(b"x")
    assert made.check(b"x", None) == 0
    end(b"x")
    for refused_s in (60, 120, 240):
        with pytest.raises(SuspectError, match=r"ended \d times"):
            made.check(b"x", None)
        time.now_s += refused_s - 1
        with pytest.raises(SuspectError):
            made.check(b"x", None)
        time.now_s += 2
        assert made.check(b"x", None) == 1  # alone
        end(b"x")
    end(b"y", before=1)  # once on another host
    with pytest.raises(SuspectError):
        made.check(b"y", None)
    assert made.check(b"z", None) == 0


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "_MOST", 2)
    made = Suspects(Time().now)
    for raw in (b"1", b"2", b"3"):
        made.sent(ONE, A)
        made.blame(ONE, A, raw, None, 1)
    assert made.check(b"1", None) == 0
    for raw in (b"2", b"3"):
        with pytest.raises(SuspectError):
            made.check(raw, None)
