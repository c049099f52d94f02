"""Server-placed requests: when one may be sent, and in which slot it runs.

Reads the scheduler's state without changing it; the engine reports the findings.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from router.base.ports import SlotServer
from router.base.types import BackendId, Request, RequestId
from router.core.model.effects import Dispatch
from router.core.model.server_placement import SlotClaim
from router.core.model.slots import Phase
from router.core.scheduler import Scheduler
from router.engine.slot_watch import find_start, find_tasks, newest_task, wait_started

End = Callable[[int | None], None]
"""Reports the end of a request, with the slot in which it ran; None: not known."""


class LaunchWatch:
    """Server-placed requests on their way, and the ends of those not seen at work."""

    def __init__(self, scheduler: Scheduler, backends: Mapping[BackendId, SlotServer]) -> None:
        self._scheduler = scheduler
        self._backends = backends
        self._unseen: dict[RequestId, asyncio.Future[End]] = {}
        # The newest task as of the last request of several, when the slots had so many leases.
        self._newest: dict[BackendId, tuple[int, int | None]] = {}
        # For each slot that no request waits to know; done once one waits, or none will.
        self._leisurely: dict[RequestId, asyncio.Future[None]] = {}

    def keeps(self, request: RequestId, end: End) -> bool:
        """Keep the `end` of an answered request if its slot is not known yet.

        Return whether it is kept; `launch` returns it then.
        """
        over = self._unseen.get(request)
        if over is not None:
            over.set_result(end)
        elif awaited := self._leisurely.pop(request, None):
            awaited.set_result(None)
        return over is not None

    def hurry(self) -> None:
        """Speed up the polls: a request waits, perhaps for one of these slots to be known."""
        while self._leisurely:
            self._leisurely.popitem()[1].set_result(None)

    def can_send_now(self, effect: Dispatch) -> bool:
        """Return whether a request need not wait: all that were sent before have ended."""
        return self._several(effect) is None and not self._at_work(effect, Phase.RUNNING)

    def _several(self, effect: Dispatch) -> Request | None:
        """Return a request that makes several tasks; None: it is one."""
        job = self._scheduler.state.request_job(effect.request)
        return job.request if job is not None and job.claim is SlotClaim.SEVERAL else None

    async def launch(
        self, effect: Dispatch, grant: Callable[[], object]
    ) -> tuple[Sequence[int], End | None]:
        """Send a request when all before it are seen at work, and find out where it runs.

        Return the indices of its slots (none: unknown) and the end to report with them (None: the
        request has not ended).
        """
        slot, request = effect.lease.slot, effect.request
        backend = self._backends.get(slot.backend)
        if backend is None:  # a server on demand that has ended since
            grant()
            return (), None
        if (several := self._several(effect)) is not None:
            return await self._launch_several(effect, several, backend, grant)

        def taken() -> set[int]:
            return beside | self._at_work(effect, Phase.RUNNING, Phase.ABANDONED)

        def gated() -> bool:
            there = self._scheduler.state.inventory.up.get(slot.backend)
            return there is not None and there.gate.holder == request

        earlier = await wait_started(backend, lambda: self._at_work(effect, Phase.RUNNING), gated)
        loop = asyncio.get_running_loop()
        over: asyncio.Future[End] = loop.create_future()
        awaited: asyncio.Future[None] = loop.create_future()
        if len(self._scheduler.state.queue) or not self._slot_is_irrelevant(effect):
            awaited.set_result(None)
        else:
            self._leisurely[request] = awaited
        if self._would_be_forgotten(effect):
            self._unseen[request] = over
        # Jobs that prepare a slot now continue; no other job begins.
        beside = self._at_work(effect, Phase.PREPARING) - self._at_gate(slot.backend)
        grant()
        try:
            index = await find_start(backend, slot.index, taken, gated, awaited, over, earlier)
        finally:
            self._unseen.pop(request, None)
            self._leisurely.pop(request, None)
        return () if index is None else (index,), over.result() if over.done() else None

    async def _launch_several(
        self, effect: Dispatch, wanted: Request, backend: SlotServer, grant: Callable[[], object]
    ) -> tuple[Sequence[int], End | None]:
        """Send a request that makes several tasks, and find out where they run."""
        slot, request = effect.lease.slot, effect.request

        def gated() -> bool:
            there = self._scheduler.state.inventory.up.get(slot.backend)
            return there is not None and there.gate.holder == request

        slots = self._scheduler.state.inventory.slots.of(slot.backend)
        leases, before = self._newest.pop(slot.backend, (-1, None))
        if leases != sum(s.generation - (s.holder == request) for s in slots):  # others were sent
            await wait_started(backend, lambda: self._at_work(effect, Phase.RUNNING), gated)
            before = await newest_task(backend)
        over: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._unseen[request] = over
        grant()
        try:
            found = await find_tasks(backend, wanted.n_slots(len(slots)), before, gated, over)
        finally:
            self._unseen.pop(request, None)
        # Else tasks are still to begin, or slots were emptied by tasks of the router's own.
        all_begun = wanted.tasks <= len(slots) and not (wanted.whole_backend or wanted.tenant)
        if found and all_begun and not over.done():
            leases = sum(s.generation for s in slots)
            self._newest[slot.backend] = leases, max(found.values())
        return sorted(found), over.result() if over.done() else None

    def _at_work(self, effect: Dispatch, *phases: Phase) -> set[int]:
        """Return the slots of other requests in one of these phases."""
        slots = self._scheduler.state.inventory.slots.of(effect.lease.slot.backend)
        return {s.id.index for s in slots if s.phase in phases and s.holder != effect.request}

    def _at_gate(self, backend: BackendId) -> set[int]:
        """Return the slots of requests at the placement gate: nothing is under way in them."""
        there = self._scheduler.state.inventory.up.get(backend)
        return {job.slot.index for job in there.gate.waiting} if there is not None else set()

    def _slot_is_irrelevant(self, effect: Dispatch) -> bool:
        """Return whether nobody needs to know yet which slot the request got.

        True if its tokens are unknown, nothing is known of any slot, and no other slot is in use.
        Embeddings, as a rule.
        """
        job = self._scheduler.state.request_job(effect.request)
        if effect.pin or job is None or not job.request.prompt.unknown:
            return False
        slots = self._scheduler.state.inventory.slots.of(effect.lease.slot.backend)
        others = (slot for slot in slots if slot.holder != effect.request)
        return all(slot.is_idle for slot in others) and not self._would_be_forgotten(effect)

    def _would_be_forgotten(self, effect: Dispatch) -> bool:
        """Return whether knowledge of a slot is lost if the request's slot stays unknown.

        True if the server may choose a slot that is known to hold tokens.
        """
        state, lease = self._scheduler.state, effect.lease
        job = state.request_job(effect.request)
        if effect.pin or job is None or job.others:
            return False
        slots = state.inventory.slots.of(lease.slot.backend)
        return any(
            len(slot.content.resident) > 0 for slot in slots if slot.is_idle or slot.job is job
        )
