"""Waiting: in order, limited in number and in time."""

from router.core.queue import Queue, QueueLimits, Waiting
from tests.core.build import R2, R, request


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

    assert queue.oldest(1) == [Waiting(request("r"), 10.0)]
    assert queue.oldest(5) == list(queue)
    assert queue.youngest() == R2


def test_the_deadline_counts_from_the_arrival() -> None:
    queue = waiting(QueueLimits(deadline_s=5.0))

    assert queue.overdue(14.9) == []
    assert [w.request.id for w in queue.overdue(15.0)] == [R]
    assert [w.request.id for w in queue.overdue(16.0)] == [R, R2]
    assert queue.next_deadline() == 15.0


def test_without_a_deadline_nobody_is_overdue() -> None:
    queue = waiting(QueueLimits(deadline_s=None))

    assert queue.overdue(1e9) == []
    assert queue.next_deadline() is None


def test_an_empty_queue_has_no_deadline() -> None:
    assert Queue().next_deadline() is None
