"""Where those who may come all at once pass a few at a time, so that no turn of the event loop is
long: requests that begin, decisions, ends.

uvloop runs whatever is ready in one turn, and what a thousand clients do in the same moment is
ready in the same turn. What is under way (the streams) has its chance after each; where there is
too much of that too, the rest of it stands aside until a later turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from router.base.ports import Clock

T = TypeVar("T")

# In one turn: what is decided may take long with many slots, and what is decided quickly still
# has consequences in the next turn, of some 0.3 ms of CPU each.
MOST = 16
LONG_S = 0.005
# Of those who stood aside; a piece of a stream takes about 0.1 ms.
MOST_BACK = 32


class Turnstile:
    """First come, first served. One event loop. `clock` is that of the machine."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], object]] = deque()
        self._passed = 0  # in this turn
        self._since = 0.0  # when the first of them did, in clock seconds
        self._aside: deque[asyncio.Future[None]] = deque()
        self._under_way_since: float | None = None  # in this turn; in clock seconds

    def __len__(self) -> int:
        """Those who wait."""
        return len(self._waiting)

    def call(self, work: Callable[[], object]) -> bool:
        """Do it now, or in a later turn when it is its turn; then an exception is the loop's.
        Returns whether it is done."""
        if self._waiting or not self._has_room():
            self._waiting.append(work)
            return False
        self._passed += 1
        work()
        return True

    async def do(self, work: Callable[[], T]) -> T:
        """The same; returns what `work` returns and raises what it raises. It is not done for a
        caller who was cancelled before."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def for_caller() -> None:
            if done.done():
                return
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller's
                done.set_exception(error)

        self.call(for_caller)
        return await done

    async def pass_by(self) -> None:
        """For each piece of what is under way. Returns at once, or if this turn has been long in a
        later one, in the order of those who ask."""
        if self._is_crowded():
            back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._aside.append(back)
            await back

    def open(self) -> None:
        """Let everybody through who waits: this is the end. One that fails is told at last."""
        with ExitStack() as stack:
            while self._waiting:
                stack.callback(self._waiting.pop())

    def _has_room(self) -> bool:
        now = self._clock.now()
        if not self._passed:
            self._since = now
            asyncio.get_running_loop().call_soon(self._next_turn)
            return True
        return self._passed < MOST and now - self._since < LONG_S

    def _next_turn(self) -> None:
        self._passed = 0
        while self._waiting and self._has_room():
            self._passed += 1
            self._waiting.popleft()()

    def _is_crowded(self) -> bool:
        if self._under_way_since is None:
            self._under_way_since = self._clock.now()
            asyncio.get_running_loop().call_soon(self._go_on)
            return bool(self._aside)
        return bool(self._aside) or self._clock.now() - self._under_way_since >= LONG_S

    def _go_on(self) -> None:
        self._under_way_since = None
        for _ in range(min(MOST_BACK, len(self._aside))):
            back = self._aside.popleft()
            if not back.done():  # else cancelled
                back.set_result(None)
        if self._aside:
            self._under_way_since = self._clock.now()
            asyncio.get_running_loop().call_soon(self._go_on)
