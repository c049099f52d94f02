"""The only writer of core state: tells the scheduler facts and carries out its effects.

Every method runs on one event loop and the scheduler is synchronous, so no lock is needed. A fact
that comes while the effects of another are carried out waits for their end: no two facts overlap.
Effects that take time run as tasks and report back (`slot_work.py`).
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Concatenate, ParamSpec

import structlog

from router.base.errors import BackendError
from router.base.ports import Clock, Preparing, ServerRunner, SlotServer, SnapshotStore, Telemetry
from router.base.tasks import Tasks, catch
from router.base.types import (
    BackendId,
    BackendInfo,
    Cost,
    MemoryKind,
    Outcome,
    Request,
    RequestId,
    RequestRecord,
    SlotStatus,
    Snapshot,
    SnapshotId,
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
from router.core.execution.state import State
from router.core.hosts.handout import once_fetched
from router.core.hosts.quote import is_surely_cheap
from router.core.hosts.quote import quote as make_quote
from router.core.model import effects as ef
from router.core.model.effects import AnswerEnd
from router.core.model.plan import Offered, Plan, Quote
from router.core.planning.planner import plan as make_plan
from router.core.planning.pricing import keeps_snapshots
from router.core.reporting.miss_reasons import record_of
from router.core.scheduler import Scheduler, tick
from router.engine.host_saves import HostSaves
from router.engine.loop_throttle import LoopThrottle
from router.engine.server_placement import LaunchWatch
from router.engine.slot_work import SlotWork
from router.engine.transfers import Transferred, Transfers

log = structlog.get_logger(__name__)

P = ParamSpec("P")
Then = Callable[[], None] | None
Fact = tuple[Callable[..., None], tuple[object, ...], Mapping[str, object], Then]

_PURGED_AT_ONCE = 10
_FOUND_AT_ONCE = 100  # about 5 ms


Grant = ef.Dispatch
"""The right to send one request now. Its holder calls `Engine.finish` once."""


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineListener:
    """Who is told of ends; by default nobody.

    `over`: a request that reached a backend. `spent`: a cost after its end. `abandoned`: a request,
    before its grant. `detached`: a backend, drained. `prove`: probe it in the slots that are lent.
    """

    over: Callable[[RequestRecord, Plan], None] = _nothing
    spent: Callable[[Request, BackendId, Cost], None] = _nothing
    abandoned: Callable[[Request], None] = _nothing
    detached: Callable[[BackendId], None] = _nothing
    prove: Callable[[BackendId], None] = _nothing


def _fact(take: Callable[Concatenate[State, P], None]) -> Callable[Concatenate["Engine", P], None]:
    """Return the method that has the scheduler take in this fact; `take` says what it is."""

    def told(engine: "Engine", /, *facts: P.args, **named: P.kwargs) -> None:
        engine._tell(take, facts, named)  # noqa: SLF001 - a method of it

    return told


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
        self.listener = EngineListener()
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
        self._launches = LaunchWatch(scheduler, backends)
        self._work = SlotWork(scheduler, backends, self._feed, self._send_elsewhere, throttle)
        self.prefilled_tokens = self._work.prefilled_tokens
        self.host_saves = HostSaves(
            partial(self._feed, idle_saves.save_for_host),
            partial(self._feed, admission.save_unasked),
            scheduler.state.inventory,
        )
        self._facts: deque[Fact] = deque()
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
                self.finish(request.id, AnswerEnd(Outcome.CLIENT_GONE))
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
        self, request: RequestId, ended: AnswerEnd, then: Callable[[], None] | None = None
    ) -> None:
        """End a granted request. Call once for each grant, on every path; never blocks.

        A request that was not yet seen at work ends a moment later, when its slot is known. `then`
        is called at the end.
        """

        def end(index: int | None = None) -> None:
            self._tell(job_ends.finished, (request, ended, index), then=then)

        if ended.outcome is not Outcome.OK or not self._launches.keeps(request, end):
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

    unwant_model = _fact(server_swaps.unwanted)
    begun = _fact(prefill_queue.begun)
    misread = _fact(resident_updates.misread)
    answer_read = _fact(job_ends.answer_read)

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

    backend_down = _fact(backend_attach.backend_down)
    probed = _fact(backend_attach.probed)
    probe_put_off = _fact(backend_attach.put_off)
    drain = _fact(backend_drain.begin)
    undrain = _fact(backend_drain.undrained)
    remove = _fact(backend_drain.removed)
    configure = _fact(backend_drain.configured)

    def poll_for_strangers(self, backend: BackendId) -> None:
        """Check in the background whether an unknown client uses slots that should be idle."""
        self._tasks.spawn(self._work.poll_for_strangers(backend), name=f"look around {backend}")

    configure_servers = _fact(server_swaps.configured)
    ask_server = _fact(server_swaps.asked)
    server_ready = _fact(server_swaps.ready)
    server_ended = _fact(server_swaps.ended)
    room_found = _fact(state.room_found)
    snapshot_lost = _fact(state.snapshot_lost)
    snapshot_stored = _fact(state.snapshot_stored)

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

    # -- facts in, effects out ----------------------------------------------------------------

    def _feed(self, take: Callable[..., None], *facts: object) -> None:
        """Have the scheduler take in facts with `take`, a function of the core."""
        self._tell(take, facts)

    def _tell(
        self,
        take: Callable[..., None],
        facts: tuple[object, ...],
        named: Mapping[str, object] = MappingProxyType({}),
        then: Then = None,
    ) -> None:
        """Have the scheduler take in facts, now or after those under way.

        `take`: the function of the core that does. `then` is called after its effects.
        """
        self._facts.append((take, facts, named, then))
        if self._carries_out:
            return
        self._carries_out = True
        failures: list[Exception] = []
        try:
            while self._facts:
                take, facts, named, then = self._facts.popleft()
                try:
                    self._scheduler.do(self._clock.now(), take, *facts, **named)
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
                self._tasks.spawn(
                    self._transfers.delete(effect.snapshot, effect.reason), name="quarantine"
                )
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
            self.finish(effect.request, AnswerEnd(Outcome.CLIENT_GONE))
        else:
            future.set_result(effect)

    def _reject(self, effect: ef.Reject) -> None:
        waiting = self._grants.get(effect.request) or self._loads.get(effect.request)
        if waiting is not None and not waiting.done():
            waiting.set_exception(effect.error)

    def _account(self, effect: ef.Account) -> None:
        record = record_of(effect)
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
