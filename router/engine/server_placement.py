"""Requests that llama-server puts in a slot of its own choice: when they may go, and where they
went.

Reads the scheduler's state, and changes nothing of it: what is found out is the engine's to tell.
"""

import asyncio
from collections.abc import Callable, Mapping

from router.base.ports import Backend
from router.base.types import BackendId, RequestId
from router.core.model.effects import Dispatch
from router.core.model.jobs import AtGate
from router.core.model.slots import Phase
from router.core.scheduler import Scheduler
from router.engine.slot_watch import find_start, wait_started

End = Callable[[int | None], None]
"""Tells of the end of a request, and in which slot it turned out to have run; None: not known."""


class Placing:
    """Those that are on their way, and the ends of those that were over before they were seen."""

    def __init__(self, scheduler: Scheduler, backends: Mapping[BackendId, Backend]) -> None:
        self._scheduler = scheduler
        self._backends = backends
        self._unseen: dict[RequestId, asyncio.Future[End]] = {}
        # While nobody waits for the answer; done when somebody does, or nobody will.
        self._leisurely: dict[RequestId, asyncio.Future[None]] = {}

    def keeps(self, request: RequestId, end: End) -> bool:
        """A request was answered well. True: where is not known yet; `place` returns `end`."""
        over = self._unseen.get(request)
        if over is not None:
            over.set_result(end)
        elif awaited := self._leisurely.pop(request, None):
            awaited.set_result(None)
        return over is not None

    def hurry(self) -> None:
        """Somebody waits, perhaps for one of them to be found."""
        while self._leisurely:
            self._leisurely.popitem()[1].set_result(None)

    def may_go(self, effect: Dispatch) -> bool:
        """Nothing was sent before that is not over: there is nothing to wait for."""
        return not self._at_work(effect, Phase.RUNNING)

    async def place(
        self, effect: Dispatch, grant: Callable[[], object]
    ) -> tuple[int | None, End | None]:
        """Let a request go when all before it are seen at work, and look where it runs.

        Returns the index of its slot, None if that is not to be found out, and the end that is to
        be told with it; None: that is still to come.
        """
        slot, request = effect.lease.slot, effect.request
        backend = self._backends[slot.backend]

        def taken() -> set[int]:
            return beside | self._at_work(effect, Phase.RUNNING, Phase.DRAINING)

        def gated() -> bool:
            job = self._scheduler.state.jobs.get(request)
            return job is not None and job.gated

        await wait_started(backend, lambda: self._at_work(effect, Phase.RUNNING), gated)
        loop = asyncio.get_running_loop()
        over: asyncio.Future[End] = loop.create_future()
        awaited: asyncio.Future[None] = loop.create_future()
        if len(self._scheduler.state.queue) or not self._is_no_matter(effect):
            awaited.set_result(None)
        else:
            self._leisurely[request] = awaited
        if self._would_be_forgotten(effect):
            self._unseen[request] = over
        # What is prepared at this moment goes on, and nothing else begins.
        beside = self._at_work(effect, Phase.PREPARING) - self._at_gate(slot.backend)
        grant()
        try:
            index = await find_start(backend, slot.index, taken, gated, awaited, over)
        finally:
            self._unseen.pop(request, None)
            self._leisurely.pop(request, None)
        return index, over.result() if over.done() else None

    def _at_work(self, effect: Dispatch, *phases: Phase) -> set[int]:
        """Slots of others, in one of these phases."""
        slots = self._scheduler.state.fleet.slots.of(effect.lease.slot.backend)
        return {s.id.index for s in slots if s.phase in phases and s.holder != effect.request}

    def _at_gate(self, backend: BackendId) -> set[int]:
        """Slots of requests that wait until they may be sent: nothing is under way in these."""
        jobs = self._scheduler.state.jobs.values()
        waiting = (job.slot for job in jobs if isinstance(job.doing, AtGate))
        return {slot.index for slot in waiting if slot.backend == backend}

    def _is_no_matter(self, effect: Dispatch) -> bool:
        """Where a request runs makes no difference until somebody else comes: its own tokens are
        not known, nothing is known of any slot, and nobody is at work who would leave something.
        Embeddings, as a rule."""
        job = self._scheduler.state.jobs.get(effect.request)
        if effect.pin or job is None or job.request is None or not job.request.prompt.unknown:
            return False
        slots = self._scheduler.state.fleet.slots.of(effect.lease.slot.backend)
        others = (slot for slot in slots if slot.holder != effect.request)
        return all(slot.is_idle for slot in others) and not self._would_be_forgotten(effect)

    def _would_be_forgotten(self, effect: Dispatch) -> bool:
        """Something is known of a slot where the server may put the request, and would not be, if
        nobody saw where it did."""
        state, lease = self._scheduler.state, effect.lease
        job = state.jobs.get(effect.request)
        if effect.pin or job is None or job.others:
            return False
        slots = state.fleet.slots.of(lease.slot.backend)
        return any(len(slot.resident) > 0 for slot in slots if slot.is_idle or slot.holds(lease))
