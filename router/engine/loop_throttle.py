"""Loop throttle: only a few requests begin, are decided or end per event-loop iteration.

uvloop runs all that is ready in one iteration. The actions of a thousand clients in one moment are
ready in one iteration. The running streams continue after each iteration; if there are too many
chunks, the rest of them waits for a later iteration.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from router.base.ports import Clock

T = TypeVar("T")

# Per iteration. A decision may take long with many slots. A quick one still causes work in the
# next iteration, about 0.3 ms of CPU each.
MOST = 16
LONG_S = 0.005
# Waiting chunks per iteration; a chunk of a stream takes about 0.1 ms.
MOST_BACK = 32


class LoopThrottle:
    """A throttle for one event loop: first come, first served. `clock`: the machine's."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: deque[Callable[[], object]] = deque()
        self._passed = 0  # in this iteration
        self._since = 0.0  # when the first of them started, in clock seconds
        self._aside: deque[asyncio.Future[None]] = deque()
        self._under_way_since: float | None = None  # in this iteration; in clock seconds

    def __len__(self) -> int:
        """Return the number of waiting calls."""
        return len(self._waiting)

    def call(self, work: Callable[[], object]) -> bool:
        """Run `work` now, or in order in a later iteration; return whether it has run.

        In a later iteration, the event loop handles its exception.
        """
        if self._waiting or not self._has_room():
            self._waiting.append(work)
            return False
        self._passed += 1
        work()
        return True

    async def do(self, work: Callable[[], T]) -> T:
        """Run `work` as `call` does; return its result or raise its exception.

        `work` does not run if the caller was cancelled before.
        """
        if not self._waiting and self._has_room():
            self._passed += 1
            return work()
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def for_caller() -> None:
            if done.done():
                return
            try:
                done.set_result(work())
            except Exception as error:  # noqa: BLE001 - the caller's
                done.set_exception(error)

        self._waiting.append(for_caller)
        return await done

    async def pass_by(self) -> None:
        """Wait for a later iteration if this one has been long; else return at once.

        To be called before each chunk of a stream. Waiting callers continue in order.
        """
        if self._is_crowded():
            back: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._aside.append(back)
            await back

    def open(self) -> None:
        """Run all waiting calls, at shutdown; raise an exception only after the last."""
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
