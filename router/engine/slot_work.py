"""Orders that take time and move no files: prefills, watches of slots, looks for strangers.

`SlotWork` carries them out, and tells the scheduler what became of them.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs

from router.base.errors import BackendError, BackendRefusedError
from router.base.ports import Preparing, SlotServer
from router.base.types import BackendId, PrefillProgress, RequestId, RequestProgress, SlotId
from router.core.execution import job_ends, preparation
from router.core.model.effects import Prefill, Prefilled, PrefillFailed, Quiet, WatchSlot
from router.core.model.jobs import RequestJob
from router.core.scheduler import Scheduler
from router.engine import slot_watch
from router.engine.loop_throttle import LoopThrottle


class SlotWork:
    """Carries out orders that take time; reads the state of the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        backends: Mapping[BackendId, SlotServer],
        tell: Callable[..., None],
        send_elsewhere: Callable[[RequestId, BackendError], None],
        throttle: LoopThrottle,
    ) -> None:
        """`tell`: as `Engine._feed`. `send_elsewhere` fails a request for another backend's sake.

        `backends` may change.
        """
        self.prefilled_tokens: dict[RequestId, int] = {}  # of prefills under way
        self.preparing: dict[RequestId, Preparing] = {}  # of requests that wait for their grant
        self.closed = False
        self._state, self._backends = scheduler.state, backends
        self._tell, self._send_elsewhere, self._throttle = tell, send_elsewhere, throttle
        self._prefills: dict[RequestId, asyncio.Task[None] | None] = {}  # None: not started
        self._pollers = slot_watch.SlotPollers(backends)

    def note_step(self, request: RequestId) -> None:
        """Tell who takes part in the preparation of a request that it goes on."""
        job = self._state.inventory.jobs.get(request)
        if (preparing := self.preparing.get(request)) and isinstance(job, RequestJob):
            chosen = job.plan.chosen
            preparing.begins(job.slot, chosen.source, chosen.reused_tokens)

    # -- prefills ------------------------------------------------------------------------------

    async def prefill(self, order: Prefill) -> None:
        """Compute tokens in a leased slot."""
        result: Prefilled | PrefillFailed = PrefillFailed("the client disconnected")
        if order.request in self._prefills:
            self._prefills[order.request] = asyncio.current_task()
            result = await self._prefilled(order)
        self._prefills.pop(order.request, None)  # before another prefill of the request begins
        self.prefilled_tokens.pop(order.request, None)
        self._tell(preparation.resume, order, result)

    def begin_prefill(self, request: RequestId) -> None:
        """Note that a prefill is ordered: `stop_prefill` can prevent it from now on."""
        self._prefills[request] = None

    def stop_prefill(self, request: RequestId) -> None:
        """Cancel a prefill, or prevent its start."""
        if task := self._prefills.get(request):
            task.cancel()
        else:
            self._prefills.pop(request, None)

    async def _prefilled(self, order: Prefill) -> Prefilled | PrefillFailed:
        backend, request = self._backends.get(order.slot.backend), order.request
        if backend is None:  # a server on demand, which has ended
            return PrefillFailed("the backend went down")
        began, cached, told = True, None, None
        try:
            if (preparing := self.preparing.get(request)) is not None:
                began = False
                cached = await preparing.judge(order.slot)
                told = preparing.on_progress
            began = True

            def progressed(progress: PrefillProgress) -> None:
                self.prefilled_tokens[request] = progress.n_done
                if told is not None:
                    told(progress)

            reported = await backend.prefill(order.slot.index, order.tokens, told=progressed)
            if cached is not None and reported.cached_tokens is not None:
                # What the trial computed is not cached, and how long it took is not known.
                least = min(cached, reported.cached_tokens)
                reported = structs.replace(reported, cached_tokens=least, prompt_s=None)
            return Prefilled(reported)
        except BackendRefusedError as error:
            return PrefillFailed(str(error), began=began)
        except BackendError as error:
            failure = error
        except asyncio.CancelledError:
            if self.closed:
                raise
            failure = BackendError("the client disconnected")
        # The connection is closed. Until the server notices, the slot may be at work and nothing
        # may be sent to it. No task is left to cancel.
        self._prefills.pop(request, None)
        self._tell(preparation.prefill_broke, request)
        failure.backend = order.slot.backend
        on_overdue = partial(self._send_elsewhere, request, failure)
        at, worked = WatchSlot(request, order.slot, RequestProgress.SENT), asyncio.Event()
        n_tokens = await self._until_quiet(at, worked, on_overdue)
        return PrefillFailed(str(failure), n_tokens, ran=worked.is_set())

    # -- watches -------------------------------------------------------------------------------

    async def watch(self, effect: WatchSlot) -> None:
        """Wait until a slot is idle, and empty it if it has to be."""
        worked = asyncio.Event()
        n_tokens = await self._until_quiet(effect, worked)
        backend, index = self._backends.get(effect.slot.backend), effect.slot.index
        if effect.wipe and backend is not None:  # else a server on demand, which has ended
            jobs = self._state.inventory.jobs
            is_watched = partial(jobs.__contains__, effect.request)
            await slot_watch.wipe(backend, index, is_watched, flush=effect.flush)
        seen = Quiet(n_tokens, effect.wipe, worked.is_set())
        self._throttle.call(partial(self._tell, job_ends.quiet, effect.request, seen))

    async def _until_quiet(
        self, at: WatchSlot, worked: asyncio.Event, on_overdue: Callable[[], None] = lambda: None
    ) -> int | None:
        if at.slot.backend not in self._backends:
            return None
        jobs, poller = self._state.inventory.jobs, self._pollers.at(at.slot.backend)
        return await slot_watch.wait_quiet(
            poller, at.slot.index, lambda: at.request in jobs, at.progress, on_overdue, worked.set
        )

    async def poll_for_strangers(self, backend: BackendId) -> None:
        """Look once whether an unknown client uses slots that should be idle."""
        if backend not in self._backends:
            return
        slots = self._state.inventory.slots.of(backend)
        idle = {slot.id: slot.generation for slot in slots if slot.is_idle}
        statuses = await slot_watch.poll_idle(self._pollers.at(backend), idle)
        busy = {SlotId(backend, status.index) for status in statuses if status.is_processing}
        if busy:
            found = {slot: idle[slot] for slot in busy}
            self._throttle.call(partial(self._tell, job_ends.found_busy, found))
