"""Requests that llama-server puts in a slot of its own choice: when they may go, and where they
went.

Reads the scheduler's state, and changes nothing of it: what is found out is the engine's to tell.
"""

import asyncio
from collections.abc import Callable, Mapping

from router.core.effects import Dispatch
from router.core.events import Launched
from router.core.scheduler import Scheduler
from router.core.slots import Phase
from router.ports import Backend
from router.types import BackendId, RequestId
from router.watching import find_start, wait_started

_BUSY = (Phase.RUNNING, Phase.DRAINING)

End = Callable[[], None]
"""Tells of the end of a request."""


class Placing:
    """Those that are on their way, and the ends of those that were over before they were seen."""

    def __init__(self, scheduler: Scheduler, backends: Mapping[BackendId, Backend]) -> None:
        self._scheduler = scheduler
        self._backends = backends
        self._unseen: dict[RequestId, asyncio.Future[End]] = {}
        self._open: dict[BackendId, Dispatch] = {}  # the last that nobody looked for

    def leaves_open(self, effect: Dispatch) -> bool:
        """A request may go at once, and where it runs is of no interest until somebody else wants
        its backend: nothing is known of any slot, nor of its own prompt, and nothing is on its way
        to a slot."""
        job = self._scheduler.state.jobs.get(effect.request)
        known = job is None or job.request is None or not job.request.prompt.unknown
        if known or effect.pin or self._sent(effect, *_BUSY) or self._would_be_forgotten(effect):
            return False
        self._open[effect.lease.slot.backend] = effect
        return True

    def wanted(self) -> list[Dispatch]:
        """Those left open that may keep others waiting by now; each is to be found, once."""
        if not self._open or not len(self._scheduler.state.queue):
            return []
        found = [effect for effect in self._open.values() if self._is_gated(effect)]
        self._open.clear()
        return found

    def keeps(self, request: RequestId, end: End) -> bool:
        """A request was answered well. True: where is not known yet; `place` returns its end."""
        over = self._unseen.get(request)
        if over is not None:
            over.set_result(end)
        return over is not None

    async def place(
        self, effect: Dispatch, grant: Callable[[], None]
    ) -> tuple[Launched | None, End]:
        """Let a request go when all before it are seen at work, and look where it runs.

        Returns where, None if that is not to be found out, and what is to be told after it.
        """
        request, backend = effect.request, self._backends[effect.lease.slot.backend]
        await wait_started(
            backend, lambda: self._sent(effect, Phase.RUNNING), lambda: self._is_gated(effect)
        )
        over: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        if self._would_be_forgotten(effect):
            self._unseen[request] = over
        grant()
        try:
            launched = await self.find(effect, over)
        finally:
            self._unseen.pop(request, None)
        return launched, over.result() if over.done() else _nothing

    async def find(
        self, effect: Dispatch, over: asyncio.Future[End] | None = None
    ) -> Launched | None:
        """Where a request runs that was sent; None as of `place`."""
        slot = effect.lease.slot
        index = await find_start(
            self._backends[slot.backend],
            slot.index,
            lambda: self._sent(effect, *_BUSY),
            lambda: self._is_gated(effect),
            over or asyncio.get_running_loop().create_future(),
        )
        return None if index is None else Launched(effect.request, index)

    def _sent(self, effect: Dispatch, *phases: Phase) -> set[int]:
        """The slots of its backend that are in one of these phases for others."""
        slots = self._scheduler.state.fleet.slots.of(effect.lease.slot.backend)
        return {s.id.index for s in slots if s.phase in phases and s.holder != effect.request}

    def _is_gated(self, effect: Dispatch) -> bool:
        job = self._scheduler.state.jobs.get(effect.request)
        return job is not None and job.gated

    def _would_be_forgotten(self, effect: Dispatch) -> bool:
        """Something is known of a slot where the server may put the request, and would not be, if
        nobody saw where it did."""
        state, lease = self._scheduler.state, effect.lease
        job = state.jobs.get(effect.request)
        if effect.pin or job is None or job.others:
            return False
        slots = state.fleet.slots.of(lease.slot.backend)
        return any(len(slot.resident) > 0 for slot in slots if slot.is_idle or slot.holds(lease))


def _nothing() -> None:
    """Its end is still to come."""
