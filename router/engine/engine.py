"""The only writer of core state: tells the scheduler facts and carries out its effects.

Every method runs on one event loop and the scheduler is synchronous, so no lock is needed. A fact
that comes while the effects of another are carried out waits for their end: no two facts overlap.
Effects that take time run as tasks and report back (`slot_work.py`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from math import inf

import structlog
from msgspec import Struct

from router.base.errors import BackendError
from router.base.ports import Clock, Preparing, ServerRunner, SlotServer, SnapshotStore, Telemetry
from router.base.tasks import Tasks, catch
from router.base.tokens import Tokens
from router.base.types import (
    BackendId,
    BackendInfo,
    Cost,
    Lease,
    MemoryKind,
    Outcome,
    OwnPrefill,
    Reported,
    Request,
    RequestId,
    RequestRecord,
    SlotStatus,
    Snapshot,
    SnapshotId,
    Stats,
    Tenant,
    TierStatus,
)
from router.core.admission import admission, backend_attach, backend_drain, server_swaps
from router.core.admission.backend_attach import probe_name
from router.core.execution import (
    idle_saves,
    job_ends,
    prefill_queue,
    preparation,
    resident_updates,
    state,
)
from router.core.hosts.handout import once_fetched
from router.core.hosts.quote import is_surely_cheap
from router.core.hosts.quote import quote as make_quote
from router.core.inventory.inventory import Inventory
from router.core.model import effects as ef
from router.core.model.effects import AnswerEnd
from router.core.model.plan import Offered, Plan, Quote
from router.core.model.policy import Policy, SnapshotLimits
from router.core.model.request_queue import QueueLimits
from router.core.model.servers import ServerLimit, ServerSpec
from router.core.planning.planner import plan as make_plan
from router.core.planning.pricing import keeps_snapshots
from router.core.reporting.miss_reasons import record_of
from router.core.scheduler import Scheduler, tick
from router.core.stats import stats_of
from router.engine.held_prefixes import HeldPrefixes
from router.engine.host_saves import HostSaves
from router.engine.loop_throttle import LoopThrottle
from router.engine.server_placement import LaunchWatch
from router.engine.slot_work import SlotWork
from router.engine.transfers import Transferred, Transfers

log = structlog.get_logger(__name__)

Then = Callable[[], None] | None

_PURGED_AT_ONCE = 10
_FOUND_AT_ONCE = 100  # about 5 ms


class Grant(Struct, frozen=True):
    """The right to send one request now. Its holder calls `Engine.finish` once."""

    lease: Lease
    plan: Plan
    pin: bool
    waited_s: float
    prefilled: OwnPrefill | None = None  # None: the router computed nothing for it


class Timing(Struct, frozen=True):
    """Times that only the web layer can measure, in seconds."""

    ttft_s: float | None
    total_s: float


class EngineListener:
    """Who is told of ends; this one does nothing."""

    def over(self, record: RequestRecord, plan: Plan) -> None:
        """Note the end of a request that reached a backend."""

    def spent(self, request: Request, backend: BackendId, cost: Cost) -> None:
        """Add a cost to that of a request that is over."""

    def abandoned(self, request: Request) -> None:
        """Note that a request was abandoned before its grant."""

    def detached(self, backend: BackendId) -> None:
        """Note that a backend is drained."""

    def prove(self, backend: BackendId) -> None:
        """Probe a backend in the slots that are lent."""


class Engine:
    """The only writer of core state; see the module docstring."""

    def __init__(
        self,
        scheduler: Scheduler,
        backends: Mapping[BackendId, SlotServer],
        store: SnapshotStore | None,
        clock: Clock,
        telemetry: Telemetry,
        throttle: LoopThrottle,
        servers: ServerRunner | None = None,
    ) -> None:
        """Connect the scheduler to its surroundings. `backends` may change.

        `servers` starts and stops the servers on demand, if there are any. Set `listener` before
        the first event.
        """
        self.listener: EngineListener = EngineListener()
        self._servers = servers
        self._scheduler = scheduler
        self.state = scheduler.state  # to be read: only the core changes it
        self._backends = backends
        self._transfers = Transfers(backends, store, clock, telemetry)
        self._clock = clock
        self._telemetry = telemetry
        self._throttle = throttle
        self._tasks = Tasks()
        self._grants: dict[RequestId, asyncio.Future[Grant]] = {}
        self._loads: dict[RequestId, asyncio.Future[None]] = {}  # requests that wait for a model
        self._timings: dict[RequestId, Timing] = {}
        self._launches = LaunchWatch(scheduler, backends)
        self._work = SlotWork(scheduler, backends, self._feed, self._send_elsewhere, throttle)
        self.prefilled_tokens = self._work.prefilled_tokens
        self.host_saves = HostSaves(
            partial(self._feed, idle_saves.save_for_host),
            partial(self._feed, admission.save_unasked),
            scheduler.state.inventory,
        )
        self._facts: deque[tuple[Callable[..., None], tuple[object, ...], Then]] = deque()
        self._carries_out = False
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakes_at = inf  # in clock seconds, or a little later
        self._alarm_due = False
        self._closed = False
        self._calm: asyncio.Event | None = None  # made by `stop`; set when no job is under way

    # -- for the web layer ---------------------------------------------------------------------

    async def submit(self, request: Request, preparing: Preparing | None = None) -> Grant:
        """Wait for a slot. Raises RouterError. `preparing` takes part in its preparation.

        If cancelled before the grant, the request is withdrawn. After the grant, the caller must
        call `finish`.
        """
        future: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._grants[request.id] = future
        if preparing is not None:
            self._work.preparing[request.id] = preparing
        try:
            await self._throttle.do(partial(self._feed, admission.arrived, request))
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.finish(request.id, Outcome.CLIENT_GONE, Reported(), Timing(None, 0.0))
            else:
                # Abandoned at the loop throttle, `future` is not cancelled yet: a dispatch under
                # way would grant it, and the lease would never be released.
                future.cancel()
                self._feed(admission.cancelled, request.id)
                self.listener.abandoned(request)
            raise
        finally:
            self._grants.pop(request.id, None)
            self._work.preparing.pop(request.id, None)

    def finish(
        self,
        request: RequestId,
        outcome: Outcome,
        reported: Reported,
        timing: Timing,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """End a granted request. Call once for each grant, on every path; never blocks.

        A request that was not yet seen at work ends a moment later, when its slot is known. `then`
        is called at the end.
        """

        def end(index: int | None = None) -> None:
            self._timings[request] = timing
            begun = timing.ttft_s is not None
            ended = AnswerEnd(outcome, reported, begun)
            self._feed(job_ends.finished, request, ended, index, then=accounted)

        def accounted() -> None:
            self._timings.pop(request, None)
            then()

        if outcome is not Outcome.OK or not self._launches.keeps(request, end):
            end()

    async def until_loaded(self, request: RequestId, model: str | None) -> None:
        """Wait until a server of the model is up. Raises RouterError.

        The request counts as one for that server until it is submitted, or `unwant_model`.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads[request] = future
        try:
            self._feed(server_swaps.wanted, request, model)
            await future
        finally:
            del self._loads[request]

    def unwant_model(self, request: RequestId) -> None:
        """Note that a request that waited for a model was answered or abandoned."""
        self._feed(server_swaps.unwanted, request)

    def begun(self, request: RequestId) -> None:
        """Note the first token of a request that had a prefill before it."""
        self._feed(prefill_queue.begun, request)

    def misread(self, backend: BackendId, *, always: bool) -> None:
        """Note that the last prompt on a backend is rendered otherwise there than it was read.

        `always`: the backend differs from the one that reads; else what read it is mended.
        """
        self._feed(resident_updates.misread, backend, always)

    def answer_read(self, lease: Lease, prompt: Tokens, answer: Tokens) -> None:
        """Note the token ids of an answer, which are known a little after its end."""
        self._feed(job_ends.answer_read, lease, prompt, answer)

    def plan(self, request: Request) -> Plan | None:
        """Return the plan of a request now. None: it would wait. No side effects."""
        return make_plan(request, self.state.inventory, self._clock.now())

    def quote(self, request: Request) -> Quote | None:
        """Return the quote of a request here. None: nothing here can serve it. No side effects.

        Unlike `plan`, it has an answer while every slot is busy.
        """
        known = self.state
        if known.stopping:
            return None
        return make_quote(request, known.inventory, known.queue, self._clock.now())

    def once_fetched(
        self, request: Request, own: Quote, offered: Offered, seconds: Callable[[int], float]
    ) -> Quote | None:
        """Return the quote of a request that fetches `offered` first; see `handout.py`."""
        return once_fetched(request, self.state.inventory, own, offered, seconds)

    def is_surely_cheap(self, request: Request, limit_s: float) -> bool:
        """Return whether a request costs less than `limit_s` here, whatever is held."""
        known = self.state
        return not known.stopping and is_surely_cheap(
            request, known.inventory, known.queue, self._clock.now(), limit_s
        )

    def held_prefixes(self, make: Callable[[Inventory], HeldPrefixes]) -> HeldPrefixes:
        """Return the index of what this host holds that `make` makes; there may be only one."""
        return make(self.state.inventory)

    # -- for the monitors and the store --------------------------------------------------------

    def backend_up(self, info: BackendInfo, slots: tuple[SlotStatus, ...]) -> None:
        """Take a backend into use."""
        self._tasks.spawn(self._transfers.tidy(info.id), name=f"tidy {info.id}")
        self._feed(backend_attach.backend_up, info, slots)

    def borrow(self, backend: BackendId) -> set[int]:
        """Borrow idle slots for a probe, until its end or the backend's; return their indices."""
        self._feed(backend_attach.probe_due, backend)
        ours = probe_name(backend)
        slots = self.state.inventory.slots.of(backend)
        return {slot.id.index for slot in slots if slot.holder == ours}

    def backend_down(self, backend: BackendId) -> None:
        """Take a backend out of use: the content of its slots is lost."""
        self._feed(backend_attach.backend_down, backend)

    def probed(self, info: BackendInfo, kept: Set[int]) -> None:
        """Take what a probe found out; the slots of `kept` hold what they held."""
        self._feed(backend_attach.probed, info, kept)

    def probe_put_off(self, backend: BackendId, kept: Set[int]) -> None:
        """Take back the slots of a probe that made way for a request."""
        self._feed(backend_attach.put_off, backend, kept)

    def drain(self, backend: BackendId) -> None:
        """Give a backend nothing new; `EngineListener.detached` tells when its jobs are over."""
        self._feed(backend_drain.begin, backend)

    def undrain(self, backend: BackendId) -> None:
        """Keep a backend that is still draining."""
        self._feed(backend_drain.undrained, backend)

    def remove(self, backend: BackendId) -> None:
        """Forget a detached backend: its name may be used for another one."""
        self._feed(backend_drain.removed, backend)

    def configure(self, policy: Policy, limits: SnapshotLimits, queue: QueueLimits) -> None:
        """Put a configuration that was read again in force."""
        self._feed(backend_drain.configured, policy, limits, queue)

    def poll_for_strangers(self, backend: BackendId) -> None:
        """Check in the background whether an unknown client uses slots that should be idle."""
        self._tasks.spawn(self._work.poll_for_strangers(backend), name=f"look around {backend}")

    def configure_servers(
        self, servers: Sequence[ServerSpec], limits: Sequence[ServerLimit]
    ) -> None:
        """Take the servers that may be started, and what of them may be loaded together."""
        self._feed(server_swaps.configured, servers, limits)

    def ask_server(self, name: BackendId, *, start: bool = False, stop: bool = False) -> None:
        """Start or stop a server because an operator wants it; both: restart it."""
        self._feed(server_swaps.asked, name, start, stop)

    def server_ready(self, name: BackendId) -> None:
        """Note that a server's process answers; its backend is to be attached soon."""
        self._feed(server_swaps.ready, name)

    def server_ended(self, name: BackendId, problem: str = "", *, hopeless: bool = False) -> None:
        """Note that a server's process has ended, as ordered or by itself, or did not start.

        `hopeless`: the next one would end in the same way.
        """
        self._feed(server_swaps.ended, name, problem, hopeless)

    def room_found(self, spare_bytes: int | None) -> None:
        """Note what the disk of the snapshots has to spare; None: nothing is known of it."""
        self._feed(state.room_found, spare_bytes)

    def snapshot_lost(self, snapshot: SnapshotId) -> None:
        """Offer a snapshot no more: it turned out to be unusable."""
        self._feed(state.snapshot_lost, snapshot)

    def snapshot_stored(self, snapshot: Snapshot) -> None:
        """Take a snapshot as it is now: it has blobs, or no whole file any more."""
        self._feed(state.snapshot_stored, snapshot)

    def snapshot_made(self, snapshot: Snapshot, kind: MemoryKind) -> None:
        """Offer a snapshot of this kind that was made just now."""
        self._feed(backend_attach.snapshots_found, (snapshot,), kind, True)

    async def snapshots_found(self, snapshots: Sequence[Snapshot]) -> None:
        """Offer the snapshots that the store found in opened directories.

        Takes a few at a time, as `purge` does.
        """
        for start in range(0, len(snapshots), _FOUND_AT_ONCE):
            some = snapshots[start : start + _FOUND_AT_ONCE]
            self._feed(backend_attach.snapshots_found, some, MemoryKind.UNKNOWN, False)
            await asyncio.sleep(0)

    async def cut(self, snapshot: Snapshot, n_tokens: int, kind: MemoryKind) -> Snapshot:
        """Return a new snapshot of the first tokens of one of this kind. Raises KvError."""
        made = await self._transfers.cut_off(snapshot, n_tokens)
        self.snapshot_made(made, kind)
        return made

    def handed_out(self, snapshot: SnapshotId) -> None:
        """Note that another host gets a snapshot: it was not saved in vain."""
        self.state.inventory.returns.restored(snapshot)

    async def purge(self, snapshots: Sequence[SnapshotId]) -> None:
        """Take snapshots out of use, a few at a time.

        Finding ten thousand in the index at once would block the event loop. Each file is deleted
        in the background, when no request reads it.
        """
        for start in range(0, len(snapshots), _PURGED_AT_ONCE):
            self._feed(state.purged, snapshots[start : start + _PURGED_AT_ONCE])
            await asyncio.sleep(0)

    async def purge_tenant(self, tenant: Tenant) -> int:
        """Delete the snapshots of a tenant, with any salt; return their number.

        Those in use are deleted after their last use. What slots have of it is not saved.
        """
        self._feed(idle_saves.forget_tenant, tenant)
        held = self.state.inventory.catalog.of(tenant)
        await self.purge(held)
        return len(held)

    @property
    def infos(self) -> Mapping[BackendId, BackendInfo]:
        """Return the backends that are up."""
        return {name: one.info for name, one in self.state.inventory.up.items()}

    def keeps_snapshots(self, backend: BackendId) -> bool:
        """Return whether saving and restoring this backend's slots has any effect."""
        inventory = self.state.inventory
        there = inventory.up.get(backend)
        return there is not None and keeps_snapshots(inventory, there)

    def tier_status(self) -> TierStatus | None:
        """Return the state of the tier of blobs; None: there is none."""
        store = self._transfers.store
        return None if store is None else store.tier_status()

    async def stop(self, *, save: bool) -> None:
        """Admit no more requests, let running ones end; `save`: save slots where that pays."""
        self._calm = self._calm or asyncio.Event()
        self._feed(admission.stop, save)
        await self._calm.wait()

    async def aclose(self) -> None:
        """Cancel all tasks that are still under way."""
        self._closed = self._work.closed = True
        if self._wakeup is not None:
            self._wakeup.cancel()
        await self._tasks.aclose()

    def stats(self) -> Stats:
        """Return the numbers for gauges."""
        return stats_of(self.state, self._backends)

    # -- facts in, effects out ----------------------------------------------------------------

    def _feed(
        self, take: Callable[..., None], *facts: object, then: Callable[[], None] | None = None
    ) -> None:
        """Have the scheduler take in facts, now or after those under way.

        `take`: the function of the core that does. `then` is called after its effects.
        """
        self._facts.append((take, facts, then))
        if self._carries_out:
            return
        self._carries_out = True
        failures: list[Exception] = []
        try:
            while self._facts:
                take, facts, then = self._facts.popleft()
                try:
                    self._scheduler.do(self._clock.now(), take, *facts)
                except Exception as error:  # noqa: BLE001 - raised below
                    catch(failures, error)
                for effect in self.state.out:
                    try:
                        self._carry_out(effect)
                    except Exception as error:  # noqa: BLE001 - raised below
                        catch(failures, error)
                if then is not None:
                    then()
        finally:
            self._carries_out = False
        jobs = self.state.inventory.jobs
        if len(self.state.queue):
            self._launches.hurry()
        if self._calm is not None and not any(job.is_ours for job in jobs.values()):
            self._calm.set()
        if not self._alarm_due and self._scheduler.is_due_before(self._wakes_at):
            # Two iterations later: first the granted requests, then the ids that follow an answer.
            self._alarm_due = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._set_alarm)
        if failures:  # a bug; all else that was ordered has been carried out
            raise failures[0]

    def _set_alarm(self) -> None:
        self._alarm_due = False
        self._scheduler.explain_admitted()
        if not self._scheduler.is_due_before(self._wakes_at):
            return
        now = self._clock.now()
        at = None if self._closed else self._scheduler.next_wakeup(now)
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        self._wakes_at = inf if at is None else at
        if at is not None:
            # 1 ms late rather than early: an early tick would find nothing to do.
            delay_s = max(at - now, 0.0) + 0.001
            self._wakeup = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        """Tell the scheduler that time has passed, unless nothing is due any more."""
        self._wakes_at, now = inf, self._clock.now()
        if (at := self._scheduler.next_wakeup(now)) is not None and at <= now:
            self._feed(tick)
        else:
            self._set_alarm()

    def _carry_out(self, effect: ef.Effect) -> None:  # noqa: C901 - an arm for each effect
        match effect:
            case ef.Dispatch():
                self._dispatch(effect)
            case ef.Reject():
                self._reject(effect)
            case ef.Account():
                self._account(effect)
            case ef.Spent():
                self.listener.spent(effect.request, effect.backend, effect.cost)
            case ef.Save() | ef.Cut() | ef.Restore() | ef.Erase():
                self._work.note_step(effect.request)
                self._tasks.spawn(self._transfer(effect), name=f"transfer for {effect.request}")
            case ef.Prefill():
                self._work.note_step(effect.request)
                self._work.begin_prefill(effect.request)
                self._tasks.spawn(self._work.prefill(effect), name=f"prefill {effect.slot}")
            case ef.StopWork():
                self._work.stop_prefill(effect.request)
            case ef.WatchSlot():
                self._tasks.spawn(self._work.watch(effect), name=f"watch {effect.slot}")
            case ef.Delete():
                self._tasks.spawn(self._transfers.delete(effect.snapshot), name="delete")
            case ef.Quarantine():
                self._tasks.spawn(self._transfers.quarantine(effect), name="quarantine")
            case ef.Detach():
                self.listener.detached(effect.backend)
            case ef.Prove():
                self.listener.prove(effect.backend)
            case ef.StartServer():
                assert self._servers is not None
                self._servers.start(effect.server)
            case ef.StopServer():
                assert self._servers is not None
                self._servers.stop(effect.server, hangs=effect.hangs)
            case ef.Limited():
                log.warning("backend_limited", backend=effect.backend, reason=effect.reason)
            case ef.ModelReady():
                if (waiting := self._loads.get(effect.request)) and not waiting.done():
                    waiting.set_result(None)

    def _dispatch(self, effect: ef.Dispatch) -> None:
        future = self._grants.get(effect.request)
        if future is None or not effect.confirm:
            self._grant(effect, future)
        else:
            at_once = self._launches.can_send_now(effect)
            if at_once:  # sent before the search for its slot begins
                self._grant(effect, future)
            grant = (lambda: None) if at_once else partial(self._grant, effect, future)
            self._tasks.spawn(self._launch(effect, grant), name=f"launch {effect.lease.slot}")

    def _grant(self, effect: ef.Dispatch, future: asyncio.Future[Grant] | None) -> None:
        if future is None or future.done():  # the client has just disconnected
            self.finish(effect.request, Outcome.CLIENT_GONE, Reported(), Timing(None, 0.0))
        else:
            future.set_result(
                Grant(effect.lease, effect.plan, effect.pin, effect.waited_s, effect.prefilled)
            )

    def _reject(self, effect: ef.Reject) -> None:
        waiting = self._grants.get(effect.request) or self._loads.get(effect.request)
        if waiting is not None and not waiting.done():
            waiting.set_exception(effect.error)

    def _account(self, effect: ef.Account) -> None:
        timing = self._timings.get(effect.request.id, Timing(None, 0.0))
        record = record_of(effect, timing.ttft_s, timing.total_s)
        self._telemetry.request(record)
        self.listener.over(record, effect.plan)

    async def _transfer(self, order: Transferred) -> None:
        result = await self._transfers.carry_out(order, self.infos)
        self._feed(preparation.resume, order, result)
        if isinstance(order, ef.Save):
            self.host_saves.saved(order.slot)

    def _send_elsewhere(self, request: RequestId, failure: BackendError) -> None:
        """Fail a request if its client still waits, so that another backend can serve it.

        Its slot stays reserved until it is idle.
        """
        if request in self._grants:
            self._reject(ef.Reject(request, failure))
            self._feed(admission.cancelled, request)

    async def _launch(self, effect: ef.Dispatch, grant: Callable[[], object]) -> None:
        """Send a request, find out in which slots it runs, then open the placement gate."""
        found, end = await self._launches.launch(effect, grant)
        if len(found) > 1 or (found and end is None):
            self._feed(job_ends.launched, effect.request, found[0], frozenset(found[1:]))
        if end is not None:
            end(found[0] if len(found) == 1 else None)
