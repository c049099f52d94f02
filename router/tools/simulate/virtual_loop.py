"""An event loop whose clock is virtual: where it would wait, time passes at once.

What runs in it must wait for nothing but that clock: no sockets, no threads, no processes.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Given = TypeVarTuple("Given")

_APART_S = 1e-12


class _NothingToSelect(selectors.BaseSelector):
    """A selector without files: to wait is to move the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._files: dict[Any, selectors.SelectorKey] = {}  # the loop's own socket

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._files[fileobj] = selectors.SelectorKey(fileobj, -1, events, data)
        return self._files[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulation waits for something that never comes")
        self.now += max(timeout, 0.0)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Its time begins at 0.

    Of timers that end at the same time the one set first runs first: asyncio's heap would let the
    number of other timers decide.
    """

    def __init__(self) -> None:
        self._virtual = _NothingToSelect()
        self._n_timers = 0
        super().__init__(self._virtual)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Given], object],
        *args: *Given,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at a time, later by a picosecond for each timer that was set before."""
        self._n_timers += 1
        at = when + self._n_timers * _APART_S
        return super().call_at(at, callback, *args, context=context)

    def time(self) -> float:
        """Return the seconds that have passed."""
        return self._virtual.now


class VirtualClock:
    """The clock of the running loop (`ports.Clock`)."""

    def now(self) -> float:
        """Return seconds that only go forward."""
        return asyncio.get_running_loop().time()


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in a new loop with a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
