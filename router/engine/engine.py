"""The only writer of core state: tells the scheduler what happened, carries out what it answers.

Every method runs on one event loop and the scheduler is synchronous, so no lock is needed and no
two events overlap. Effects that take time run as tasks and report back as events.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial

import structlog

from router.base.errors import BackendError, BackendRefusedError
from router.base.frozen import dataclass
from router.base.ports import Backend, Clock, SnapshotStore, Telemetry
from router.base.tasks import Tasks
from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    BackendInfo,
    Lease,
    Left,
    Outcome,
    Reported,
    Request,
    RequestId,
    RequestRecord,
    SlotStatus,
    Snapshot,
    SnapshotId,
    Stats,
)
from router.core.admission.backend_attach import probe_name
from router.core.model import effects as ef
from router.core.model import events as ev
from router.core.model.plan import Plan
from router.core.model.policy import Policy
from router.core.model.request_queue import QueueLimits
from router.core.model.slots import Slot
from router.core.model.snapshot_limits import SnapshotLimits
from router.core.planning.displacement import keeps_snapshots
from router.core.planning.planner import plan as make_plan
from router.core.reporting.request_records import record_of
from router.core.scheduler import Scheduler
from router.core.stats import stats_of
from router.engine.loop_throttle import Turnstile
from router.engine.server_placement import Placing
from router.engine.slot_watch import Lookout, find_busy, wait_quiet, wipe
from router.engine.transfers import Transferred, Transfers

log = structlog.get_logger(__name__)

_PURGED_AT_ONCE = 10
_FOUND_AT_ONCE = 100  # about 5 ms


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to send one request now. Whoever holds it calls `Engine.finish` once."""

    lease: Lease
    plan: Plan
    pin: bool
    waited_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """What only the web layer can measure, in seconds."""

    ttft_s: float | None
    total_s: float


class Engine:
    """See the module."""

    def __init__(
        self,
        scheduler: Scheduler,
        backends: Mapping[BackendId, Backend],
        store: SnapshotStore | None,
        clock: Clock,
        telemetry: Telemetry,
        turnstile: Turnstile,
        on_release: Callable[[BackendId], None] = lambda _: None,
        on_over: Callable[[RequestRecord, Plan], None] = lambda *_: None,
        on_left: Callable[[Request], None] = lambda _: None,
    ) -> None:
        """`backends` may change; `on_release` is told of each that was drained, when that is so,
        `on_over` of each request that reached a backend, when it is over, `on_left` of each whose
        client left before."""
        self._on_over, self._on_left, self._on_release = on_over, on_left, on_release
        self._scheduler = scheduler
        self._backends = backends
        self._transfers = Transfers(backends, store, clock, telemetry)
        self._clock = clock
        self._telemetry = telemetry
        self._turnstile = turnstile
        self._tasks = Tasks()
        self._prefills: dict[RequestId, asyncio.Task[None] | None] = {}  # None: about to begin
        self._grants: dict[RequestId, asyncio.Future[Grant]] = {}
        self._timings: dict[RequestId, Timing] = {}
        self._placing = Placing(scheduler, backends)
        self._wakeup: asyncio.TimerHandle | None = None
        self._alarm_due = False
        self._closed = False
        self._lookout = Lookout(backends)
        self._calm: asyncio.Event | None = None  # set when no job is under way, if one waits

    # -- for the web layer ---------------------------------------------------------------------

    async def submit(self, request: Request) -> Grant:
        """Wait for a slot. Raises RouterError. Cancelled before the grant, nothing happens for the
        request; afterwards the grant is the caller's, who must call `finish`."""
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._grants[request.id] = future
        try:
            await self._turnstile.do(partial(self._feed, ev.Arrived(request)))
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.finish(request.id, Outcome.CLIENT_GONE, Reported(), Timing(None, 0.0))
            else:
                # Or one who left at the turnstile would be granted what is under way, and keep it.
                future.cancel()
                self._feed(ev.Cancelled(request.id))
                self._on_left(request)
            raise
        finally:
            self._grants.pop(request.id, None)

    def finish(
        self,
        request: RequestId,
        outcome: Outcome,
        reported: Reported,
        timing: Timing,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """The response is over. Called once for each grant, on every path; never blocks.

        One that nobody has seen at work yet is over a moment later: when it is known where it ran.
        `then` is called when it is.
        """

        def end(index: int | None = None) -> None:
            self._timings[request] = timing
            begun = timing.ttft_s is not None
            self._feed(ev.Finished(request, outcome, reported, index, begun))
            self._timings.pop(request, None)
            then()

        if outcome is not Outcome.OK or not self._placing.keeps(request, end):
            end()

    def begun(self, request: RequestId) -> None:
        """The first token of a granted request is there."""
        self._feed(ev.Begun(request))

    def answer_read(self, lease: Lease, prompt: Tokens, answer: Tokens) -> None:
        """The ids of an answer that `lease` produced."""
        self._feed(ev.AnswerRead(lease.slot, lease.generation, prompt, answer))

    def plan(self, request: Request) -> Plan | None:
        """What would be done with a request now; nothing is done."""
        return make_plan(request, self._scheduler.state.fleet, self._clock.now())

    # -- for the monitors and the store --------------------------------------------------------

    def backend_up(self, info: BackendInfo, slots: tuple[SlotStatus, ...]) -> None:
        """A backend can be used from now on."""
        self._tasks.spawn(self._transfers.tidy(info.id), name=f"tidy {info.id}")
        self._feed(ev.BackendUp(info, slots))

    def borrow(self, backend: BackendId) -> set[int]:
        """Idle slots to try a backend in, nobody else's until `probed` or `backend_down`."""
        self._feed(ev.ProbeDue(backend))
        ours = probe_name(backend)
        return {slot.id.index for slot in self._slots_of(backend) if slot.holder == ours}

    def look_around(self, backend: BackendId) -> None:
        """See in the background whether somebody else uses slots that are idle to us."""
        self._tasks.spawn(self._look_around(backend), name=f"look around {backend}")

    def probed(self, info: BackendInfo) -> None:
        """A backend was tried out in the slots that were borrowed; they come back."""
        self._feed(ev.Probed(info))

    def backend_down(self, backend: BackendId) -> None:
        """A backend cannot be used from now on."""
        self._feed(ev.BackendDown(backend))

    def drain(self, backend: BackendId) -> None:
        """Nothing new for a backend; `on_release` follows, perhaps before this returns."""
        self._feed(ev.Draining(backend))

    def undrain(self, backend: BackendId) -> None:
        """A backend that is draining is to be kept."""
        self._feed(ev.Undrained(backend))

    def removed(self, backend: BackendId) -> None:
        """A backend that was released does not come back."""
        self._feed(ev.Removed(backend))

    def configure(self, policy: Policy, limits: SnapshotLimits, queue: QueueLimits) -> None:
        """Decide by these from now on; snapshots over the limits go."""
        self._feed(ev.Configured(policy, limits, queue))

    async def snapshots_found(self, snapshots: Sequence[Snapshot]) -> None:
        """What the store had in directories that it has opened; some at a time, as in `purge`."""
        for start in range(0, len(snapshots), _FOUND_AT_ONCE):
            self._feed(ev.SnapshotsFound(tuple(snapshots[start : start + _FOUND_AT_ONCE])))
            await asyncio.sleep(0)

    def snapshot_lost(self, snapshot: SnapshotId) -> None:
        """A committed snapshot turned out to be unusable."""
        self._feed(ev.SnapshotLost(snapshot))

    async def purge(self, snapshots: Sequence[SnapshotId]) -> None:
        """Take snapshots out of use, a few at a time: finding ten thousand in the index would hold
        everybody else up. Their files go in the background, each when nobody reads it."""
        for start in range(0, len(snapshots), _PURGED_AT_ONCE):
            self._feed(ev.Purged(tuple(snapshots[start : start + _PURGED_AT_ONCE])))
            await asyncio.sleep(0)

    @property
    def infos(self) -> Mapping[BackendId, BackendInfo]:
        """The backends that are up."""
        return self._scheduler.state.fleet.infos

    @property
    def draining(self) -> Set[BackendId]:
        """The backends that get nothing new and are not done."""
        return self._scheduler.state.fleet.draining

    def keeps_snapshots(self, backend: BackendId) -> bool:
        """What this backend's slots hold can be saved and restored with effect."""
        return keeps_snapshots(self._scheduler.state.fleet, backend)

    @property
    def scheduler(self) -> Scheduler:
        """For showing; whoever changes it breaks the one-writer rule."""
        return self._scheduler

    async def stop(self, *, save: bool) -> None:
        """Admit nobody, let running requests end, save what is worth it if asked to."""
        self._calm = self._calm or asyncio.Event()
        self._feed(ev.Stopping(save))
        await self._calm.wait()

    async def aclose(self) -> None:
        """Cancel everything that is still under way."""
        self._closed = True
        if self._wakeup is not None:
            self._wakeup.cancel()
        await self._tasks.aclose()

    def stats(self) -> Stats:
        """For gauges."""
        return stats_of(self._scheduler.state, self._backends)

    # -- events in, effects out ----------------------------------------------------------------

    def _feed(self, event: ev.Event) -> None:
        for effect in self._scheduler.handle(event, self._clock.now()):
            self._carry_out(effect)
        jobs = self._scheduler.state.jobs
        if len(self._scheduler.state.queue):
            self._placing.hurry()
        if self._calm is not None and not any(job.is_ours for job in jobs.values()):
            self._calm.set()
        if not self._alarm_due:
            # Whoever was granted something goes first, then the ids that follow an answer.
            self._alarm_due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._set_alarm)

    def _set_alarm(self) -> None:
        self._alarm_due = False
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        self._scheduler.look_back()
        now = self._clock.now()
        at = None if self._closed else self._scheduler.next_wakeup(now)
        if at is not None:
            # A moment late rather than early: an early tick would find nothing to do.
            delay_s = max(at - now, 0.0) + 0.001
            self._wakeup = asyncio.get_running_loop().call_later(delay_s, self._feed, ev.Tick())

    def _carry_out(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Dispatch():
                self._dispatch(effect)
            case ef.Reject():
                self._reject(effect)
            case ef.Account():
                self._account(effect)
            case ef.Save() | ef.Cut() | ef.Restore() | ef.Erase():
                self._tasks.spawn(self._transfer(effect), name=f"transfer for {effect.request}")
            case ef.Prefill():
                self._prefills[effect.request] = None
                self._tasks.spawn(self._prefill(effect), name=f"prefill {effect.slot}")
            case ef.StopWork():
                self._stop_prefill(effect.request)
            case ef.Watch():
                self._tasks.spawn(self._watch(effect), name=f"watch {effect.slot}")
            case ef.Delete():
                self._tasks.spawn(self._transfers.delete(effect.snapshot), name="delete")
            case ef.Quarantine():
                self._tasks.spawn(self._transfers.quarantine(effect), name="quarantine")
            case ef.Release():
                self._on_release(effect.backend)

    def _dispatch(self, effect: ef.Dispatch) -> None:
        future = self._grants.get(effect.request)
        if future is None or not effect.confirm:
            self._grant(effect, future)
        else:
            at_once = self._placing.may_go(effect)
            if at_once:  # on its way before anything else is done about it
                self._grant(effect, future)
            grant = (lambda: None) if at_once else partial(self._grant, effect, future)
            self._tasks.spawn(self._place(effect, grant), name=f"place {effect.lease.slot}")

    def _grant(self, effect: ef.Dispatch, future: asyncio.Future[Grant] | None) -> None:
        if future is None or future.done():  # the client left in this very moment
            self.finish(effect.request, Outcome.CLIENT_GONE, Reported(), Timing(None, 0.0))
        else:
            future.set_result(Grant(effect.lease, effect.plan, effect.pin, effect.waited_s))

    def _reject(self, effect: ef.Reject) -> None:
        if (future := self._grants.get(effect.request)) is not None and not future.done():
            future.set_exception(effect.error)

    def _account(self, effect: ef.Account) -> None:
        timing = self._timings.get(effect.request.id, Timing(None, 0.0))
        record = record_of(effect, timing.ttft_s, timing.total_s)
        self._telemetry.request(record)
        self._on_over(record, effect.plan)

    # -- effects that take time ----------------------------------------------------------------

    async def _transfer(self, effect: Transferred) -> None:
        self._feed(await self._transfers.carry_out(effect, self.infos))

    async def _prefill(self, effect: ef.Prefill) -> None:
        event: ev.Event = ev.PrefillFailed(effect.request, "the client left")
        if effect.request in self._prefills:
            self._prefills[effect.request] = asyncio.current_task()
            event = await self._prefilled(effect)
        self._prefills.pop(effect.request, None)  # before another for the same request begins
        self._feed(event)

    async def _prefilled(self, effect: ef.Prefill) -> ev.Event:
        backend, request = self._backends[effect.slot.backend], effect.request
        try:
            return ev.Prefilled(request, await backend.prefill(effect.slot.index, effect.tokens))
        except BackendRefusedError as error:
            return ev.PrefillFailed(request, str(error))
        except BackendError as error:
            failure = error
        except asyncio.CancelledError:
            if self._closed:
                raise
            failure = BackendError("the client left")
        # The connection is closed, and the slot free once the server knows: until then it may be at
        # work, and nothing may be sent to it. There is nothing left to stop.
        self._prefills.pop(request, None)
        self._feed(ev.PrefillBroke(request))
        failure.backend = effect.slot.backend
        late = partial(self._send_elsewhere, request, failure)
        n_tokens = await self._quiet(ef.Watch(request, effect.slot, Left.SENT), late)
        return ev.PrefillFailed(request, str(failure), n_tokens)

    def _send_elsewhere(self, request: RequestId, failure: BackendError) -> None:
        """The slot is nobody's until it is idle; a client who is still there need not wait."""
        if request in self._grants:
            self._reject(ef.Reject(request, failure))
            self._feed(ev.Cancelled(request))

    def _stop_prefill(self, request: RequestId) -> None:
        """One that has not begun does not begin."""
        if task := self._prefills.get(request):
            task.cancel()
        else:
            self._prefills.pop(request, None)

    async def _watch(self, effect: ef.Watch) -> None:
        n_tokens = await self._quiet(effect)
        if effect.wipe:
            backend, index = self._backends[effect.slot.backend], effect.slot.index
            jobs = self._scheduler.state.jobs
            await wipe(backend, index, lambda: effect.request in jobs, flush=effect.flush)
            n_tokens = None
        self._turnstile.call(partial(self._feed, ev.Quiet(effect.request, n_tokens)))

    async def _quiet(self, at: ef.Watch, late: Callable[[], None] = lambda: None) -> int | None:
        jobs, looks = self._scheduler.state.jobs, self._lookout.at(at.slot.backend)
        return await wait_quiet(looks, at.slot.index, lambda: at.request in jobs, at.left, late)

    async def _look_around(self, backend: BackendId) -> None:
        idle = {s.id: s.generation for s in self._slots_of(backend) if s.is_idle}
        if found := await find_busy(self._lookout.at(backend), idle):
            self._turnstile.call(partial(self._feed, ev.FoundBusy(found)))

    def _slots_of(self, backend: BackendId) -> tuple[Slot, ...]:
        return tuple(self._scheduler.state.fleet.slots.of(backend))

    async def _place(self, effect: ef.Dispatch, grant: Callable[[], object]) -> None:
        """Send a request that the server may place, find out where it runs, open the gate."""
        index, end = await self._placing.place(effect, grant)
        if end is not None:
            end(index)
        elif index is not None:
            self._feed(ev.Launched(effect.request, index))
