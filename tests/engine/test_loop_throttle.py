"""Loop throttle: a few calls run per event-loop iteration, in order; the rest run later."""

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from router.engine.loop_throttle import LONG_S, MOST, MOST_BACK, LoopThrottle


class Hands:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at


async def turns_until(reached: Callable[[], bool]) -> int:
    for turn in range(1000):
        if reached():
            return turn
        await asyncio.sleep(0)
    raise AssertionError("never")


async def test_so_many_pass_in_one_turn_and_the_rest_in_order() -> None:
    throttle, passed = LoopThrottle(Hands()), list[int]()
    at_once = [throttle.call(partial(passed.append, n)) for n in range(3 * MOST)]
    counts = []
    while len(throttle):
        counts.append(len(passed))
        await asyncio.sleep(0)
    assert at_once == [True] * MOST + [False] * 2 * MOST
    assert counts == [MOST, 2 * MOST]
    assert passed == list(range(3 * MOST))


async def test_what_takes_long_has_a_turn_to_itself() -> None:
    clock = Hands()
    throttle, passed = LoopThrottle(clock), list[int]()

    def work(number: int) -> None:
        passed.append(number)
        clock.at += LONG_S

    for number in range(3):
        throttle.call(partial(work, number))
    counts = []
    while len(throttle):
        counts.append(len(passed))
        await asyncio.sleep(0)
    assert counts == [1, 2]
    assert passed == [0, 1, 2]


async def test_whoever_comes_later_does_not_overtake() -> None:
    throttle, passed = LoopThrottle(Hands()), list[int]()
    for number in range(MOST + 1):
        throttle.call(partial(passed.append, number))

    def late() -> None:
        # a new iteration by now, but the calls that wait go first
        throttle.call(lambda: passed.append(-1))

    throttle.call(late)
    throttle.call(lambda: passed.append(MOST + 1))
    await turns_until(lambda: -1 in passed)
    assert passed == [*range(MOST + 2), -1]


async def test_there_is_room_again_in_the_next_turn() -> None:
    throttle, passed = LoopThrottle(Hands()), list[int]()
    for _ in range(5):
        assert all(throttle.call(lambda: passed.append(0)) for _ in range(MOST))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert len(passed) == 5 * MOST


@pytest.mark.parametrize("crowd", [0, MOST], ids=["at once", "later"])
async def test_a_caller_gets_the_result_or_the_error(crowd: int) -> None:
    throttle = LoopThrottle(Hands())
    for _ in range(crowd):
        throttle.call(lambda: None)
    assert await throttle.do(lambda: 7) == 7
    for _ in range(crowd):
        throttle.call(lambda: None)
    with pytest.raises(ZeroDivisionError):
        await throttle.do(lambda: 1 // 0)


async def test_nothing_is_done_for_a_caller_who_left() -> None:
    throttle, passed = LoopThrottle(Hands()), list[str]()
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(throttle.do(lambda: passed.append("left")))
        group.create_task(throttle.do(lambda: passed.append("stayed")))
        for _ in range(2 * MOST):
            throttle.call(lambda: None)
        await asyncio.sleep(0)
        waiting = len(throttle)
        leaving.cancel()
    assert waiting >= 2
    assert passed == ["stayed"]


async def test_one_that_fails_does_not_keep_the_others_waiting() -> None:
    throttle, passed, errors = LoopThrottle(Hands()), list[int](), list[object]()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: errors.append(type(context["exception"]))
    )
    for _ in range(MOST):
        throttle.call(lambda: None)
    throttle.call(lambda: 1 // 0)
    throttle.call(lambda: passed.append(1))
    await turns_until(lambda: passed == [1])
    assert errors == [ZeroDivisionError]


async def test_at_the_end_all_pass_at_once() -> None:
    throttle, passed = LoopThrottle(Hands()), list[int]()
    for number in range(5 * MOST):
        throttle.call(partial(passed.append, number))
    throttle.open()
    assert passed == list(range(5 * MOST))


async def test_what_is_under_way_stands_aside_once_a_turn_is_long() -> None:
    """Chunks that step aside continue in order, some of them in each iteration."""
    clock = Hands()
    throttle, done, n = LoopThrottle(clock), list[int](), 3 * MOST_BACK

    async def piece(number: int) -> None:
        await throttle.pass_by()
        done.append(number)
        clock.at += LONG_S / 4

    pieces = [asyncio.create_task(piece(number)) for number in range(n)]  # noqa: TID251
    counts = []
    while len(done) < n:
        await asyncio.sleep(0)
        counts.append(len(done))
    await asyncio.gather(*pieces)
    assert done == list(range(n))
    assert counts[0] == 4
    assert max(after - before for before, after in pairwise([0, *counts])) == MOST_BACK


async def test_who_stood_aside_and_left_holds_nobody_up() -> None:
    clock = Hands()
    throttle = LoopThrottle(clock)

    async def takes_long() -> None:
        await throttle.pass_by()
        clock.at += LONG_S

    async with asyncio.TaskGroup() as group:
        group.create_task(takes_long())
        left, stays = [group.create_task(throttle.pass_by()) for _ in range(2)]
        await asyncio.sleep(0)
        assert not stays.done()
        left.cancel()
    assert left.cancelled()
    assert stays.done()
