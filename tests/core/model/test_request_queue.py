"""Request queue: ordered, and limited in length and in waiting time."""

from itertools import islice
from math import inf

import pytest
from msgspec.structs import replace

from router.core.model import request_queue
from router.core.model.request_queue import Queue, QueueLimits, Waiting
from router.core.model.tuning import TUNING
from tests.support.scheduler.build import R2, R, request


def waiting(limits: QueueLimits) -> Queue:
    queue = Queue(limits)
    queue.add(request("r"), 10.0)
    queue.add(request("r2"), 11.0)
    return queue


def test_first_come_first_looked_at() -> None:
    queue = waiting(QueueLimits())

    assert list(queue) == [Waiting(request("r"), 10.0), Waiting(request("r2"), 11.0)]
    assert len(queue) == 2


def test_one_may_leave_while_the_queue_is_walked() -> None:
    queue = waiting(QueueLimits())
    for one in queue:
        queue.remove(one.request.id)

    assert len(queue) == 0


def test_who_does_not_wait_cannot_leave() -> None:
    queue = waiting(QueueLimits())

    assert queue.remove(R) == Waiting(request("r"), 10.0)
    assert queue.remove(R) is None


def test_the_ends_of_the_queue() -> None:
    queue = waiting(QueueLimits())

    assert next(queue.in_turn()) == Waiting(request("r"), 10.0)
    assert list(queue.in_turn()) == list(queue)
    assert queue.last() == R2


def test_the_deadline_counts_from_the_arrival() -> None:
    queue = waiting(QueueLimits(deadline_s=5.0))

    assert queue.overdue(14.9) == []
    assert [w.request.id for w in queue.overdue(15.0)] == [R]
    assert [w.request.id for w in queue.overdue(16.0)] == [R, R2]
    assert queue.next_deadline() == 15.0


def test_without_a_deadline_nobody_is_overdue() -> None:
    queue = waiting(QueueLimits(deadline_s=None))

    assert queue.overdue(1e9) == []
    assert queue.next_deadline() == inf


def test_an_empty_queue_has_no_deadline() -> None:
    assert Queue().next_deadline() == inf


def ids(queue: Queue, n: int = 9) -> list[str]:
    return [w.request.id for w in islice(queue.in_turn(), n)]


def test_clients_take_turns() -> None:
    queue = Queue()
    for name in ("a1", "a2", "a3", "b1", "c1", "c2"):
        queue.add(request(name, client=name[0]), 1.0)

    assert ids(queue) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert ids(queue, 2) == ["a1", "b1"]


def test_who_had_the_least_of_the_servers_time_comes_first() -> None:
    queue = Queue()
    for name in ("a1", "a2", "a3", "b1", "b2", "b3"):
        queue.add(request(name, client=name[0]), 1.0)
    queue.serve(request("a1", client="a"), 10.0)
    assert ids(queue) == ["b1", "a2", "b2", "a3", "b3"]
    queue.serve(request("b1", client="b"), 4.0)
    queue.serve(request("b2", client="b"), 4.0)
    assert ids(queue) == ["b3", "a2", "a3"]
    queue.serve(request("b3", client="b"), 4.0)
    queue.add(request("b4", client="b"), 2.0)
    assert ids(queue) == ["a2", "b4", "a3"]


def test_client_share_is_remembered_while_idle() -> None:
    """Client a sends long prompts, each when the previous one is answered."""
    queue = Queue()
    queue.add(request("b1", client="b"), 1.0)
    queue.add(request("a1", client="a"), 1.0)
    queue.serve(request("a1", client="a"), 10.0)
    queue.add(request("a2", client="a"), 2.0)

    assert ids(queue) == ["b1", "a2"]


def test_a_newcomer_has_no_claim_on_the_past() -> None:
    """New clients gain at most the one request that is under way."""
    queue = Queue()
    for _ in range(9):
        queue.add(request("a", client="a"), 1.0)
        queue.serve(request("a", client="a"), 10.0)
    queue.add(request("a", client="a"), 2.0)
    queue.add(request("b", client="b"), 3.0)
    assert ids(queue) == ["b", "a"]

    queue.serve(request("b", client="b"), 11.0)
    queue.add(request("b", client="b"), 4.0)
    assert ids(queue) == ["a", "b"]


def test_request_that_never_waited_counts_as_one_that_did() -> None:
    at_once, queued = Queue(), Queue()
    for number in range(9):
        asked = request(f"r{number}", client="ab"[number % 2])
        at_once.serve(asked, 10.0)
        queued.add(asked, 1.0)
        queued.serve(asked, 10.0)
    assert at_once == queued


def test_when_it_is_full_who_sent_the_most_loses_the_last() -> None:
    queue = Queue()
    for name in ("a1", "a2", "b1"):
        queue.add(request(name, client=name[0]), 1.0)

    assert queue.last() == "a2"


def test_of_too_many_clients_some_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that use a new key for each request neither fill the memory nor gain priority."""
    monkeypatch.setattr(request_queue, "TUNING", replace(TUNING, clients=3))
    queue = Queue()
    for number in range(20):
        queue.add(request("r", client=f"{number}"), 1.0)
        queue.serve(request("r", client=f"{number}"), 1.0)

    assert len(queue._served_s) <= 4


def test_background_requests_come_after_all_others() -> None:
    """They are fair among themselves; a client may have both kinds."""
    queue = Queue()
    for name, client, background in (
        ("b1", "x", True),
        ("b2", "x", True),
        ("b3", "y", True),
        ("i1", "x", False),
        ("i2", "z", False),
    ):
        queue.add(request(name, client=client, background=background), 0.0)

    assert [w.request.id for w in queue.in_turn()] == ["i1", "i2", "b1", "b3", "b2"]
