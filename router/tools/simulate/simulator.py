"""The production scheduler over simulated servers and a workload, in simulated time.

`Simulator` replaces `router.engine.engine`: it carries out each effect, and feeds the resulting
event to the scheduler at its simulated time. All pending actions are in one heap.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from time import perf_counter

from msgspec.structs import replace

from router.base.tokens import Tokens, count, head, join, pack
from router.base.types import (
    BackendId,
    KvDir,
    Namespace,
    Outcome,
    Reported,
    Request,
    RequestId,
    Session,
    SlotId,
    Snapshot,
    SnapshotId,
)
from router.core.model import effects as ef
from router.core.model import events as ev
from router.core.reporting.request_records import record_of
from router.core.scheduler import Scheduler
from router.engine.scheduler_view import SchedulerView
from router.tools.simulate.accounting import Losses, Meter, Oracle
from router.tools.simulate.machines.on_demand import OnDemand
from router.tools.simulate.machines.server import Run, SimulatedServer, TransferRun
from router.tools.simulate.requests import RequestSource, SimulatedRequest

KV_DIR = KvDir("simulated")
# Ticks are a little late rather than early, as in `router.engine.engine`.
_TICK_S = 0.001
# Until a server notices that a client disconnected (about 1 s, llama-server.md section 5.6), and
# until two polls of its slots agree (`router.engine.slot_watch`).
_NOTICE_S = 1.0
_QUIET_S = 0.12
_REPORT_EVERY_S = 0.2  # of real time
_ONE_TOKEN = pack([0])


@dataclass(slots=True)
class _Client:
    """An unfinished request."""

    ask: SimulatedRequest
    oracle: int  # prompt tokens that an unlimited cache would reuse
    dispatch: ef.Dispatch | None = None
    ttft_s: float | None = None


class Simulator:
    """One simulation, from the first request to the last answer."""

    def __init__(
        self,
        scheduler: Scheduler,
        servers: Sequence[SimulatedServer],
        source: RequestSource,
        *,
        losses: Losses | None = None,
        on_demand: OnDemand | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.scheduler = scheduler
        self.view = SchedulerView(scheduler.state)
        self.servers = {server.info.id: server for server in servers}
        self._hardware = servers[0].hardware
        self.source = source
        self.meter = Meter()
        self.now = 0.0
        self._oracle = Oracle()
        self._losses = losses
        self._on_demand = on_demand
        self._progress = progress
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._moments = 0
        self._versions = dict.fromkeys(self.servers, 0)
        self._changed: dict[BackendId, None] = {}  # ordered, so that runs are reproducible
        self._clients: dict[RequestId, _Client] = {}
        self._prefills: dict[RequestId, Run] = {}
        self._given_up: set[RequestId] = set()  # cancelled prefills of `_prefills`
        self._watching: dict[SlotId, RequestId] = {}
        self._tick: float | None = None  # when the scheduler's next tick is due
        self._arrivals = source.arrivals()
        self._to_come = 0  # scheduled requests that have not arrived
        self._files = 0

    # -- time ----------------------------------------------------------------------------------

    def run(self) -> Meter:
        """Run until no request and no work is left. Returns the counters."""
        if self._on_demand is not None:
            self._feed(self._on_demand.configured([*self.servers]))
        else:
            for server in self.servers.values():
                self._feed(ev.BackendUp(server.info))
        self._next_arrival()
        told = perf_counter()
        while self._heap and (self._to_come or self._clients or self.view.has_jobs):
            self.now, _, action = heappop(self._heap)
            action()
            self._settle()
            if perf_counter() - told > _REPORT_EVERY_S:
                told = perf_counter()
                self._progress(self.meter.arrived)
        assert not self._clients, "a request was never answered"
        return self.meter

    def _at(self, time: float, action: Callable[[], None]) -> None:
        self._moments += 1  # FIFO at equal times
        heappush(self._heap, (max(time, self.now), self._moments, action))

    def _settle(self) -> None:
        """Schedule the next change of each changed server and the scheduler's next tick."""
        for name in self._changed:
            server = self.servers[name]
            self._versions[name] += 1
            at = server.next_change()
            if at is not None:
                self._at(at, partial(self._due, server, self._versions[name]))
        self._changed.clear()
        wakeup = self.scheduler.next_wakeup(self.now)
        # After an earlier tick, `next_wakeup` is called again anyway.
        if wakeup is not None and (self._tick is None or wakeup + _TICK_S < self._tick):
            self._tick = wakeup + _TICK_S
            self._at(self._tick, partial(self._ticks, self._tick))

    def _ticks(self, at: float) -> None:
        if self._tick == at:
            self._tick = None
            self._feed(ev.Tick())

    def _server(self, name: BackendId) -> SimulatedServer:
        """Return a server with progress up to now, and mark it as changed."""
        server = self.servers[name]
        server.move_to(self.now)
        self._changed[name] = None
        return server

    def _due(self, server: SimulatedServer, version: int) -> None:
        if version != self._versions[server.info.id]:
            return  # outdated: the server changed in between
        ended = self._server(server.info.id).done()
        self._begins(server)
        for done in ended:
            if isinstance(done, Run):
                self._ran(server, done)
            else:
                done.then()

    # -- clients -------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        """Schedule the next request of the workload; read one ahead."""
        ask = next(self._arrivals, None)
        if ask is not None:
            self._to_come += 1
            self._at(ask.at, partial(self._arrives, ask, by_itself=True))

    def _arrives(self, ask: SimulatedRequest, *, by_itself: bool = False) -> None:
        meter, prompt = self.meter, ask.prompt.tokens
        meter.arrived += 1
        self._to_come -= 1
        held = join([prompt, ask.answer])
        self._clients[ask.id] = _Client(ask, self._oracle.ask(prompt, held))
        if ask.leaves_after_s is not None:
            self._at(self.now + ask.leaves_after_s, partial(self._leaves, ask.id))
        session = None if ask.session is None else Session(ask.session, "trace")
        request = Request(ask.id, ask.prompt, ask.model, session=session)
        self._feed(ev.Arrived(request))
        if by_itself:
            self._next_arrival()

    def _leaves(self, name: RequestId) -> None:
        client = self._clients.get(name)
        if client is None:
            return  # already answered or refused
        self.meter.abandoned += 1
        if client.dispatch is None:
            self._over(client, answered=False)
            self._feed(ev.Cancelled(name))
            return
        slot = client.dispatch.lease.slot
        run = self.servers[slot.backend].runs[slot.index]
        self._at(self.now + _NOTICE_S, partial(self._notices, slot, run))
        self._feed(ev.Finished(name, Outcome.CLIENT_GONE, Reported()))
        self._over(client, answered=False)

    def _notices(self, slot: SlotId, run: Run) -> None:
        """Stop a run on the server that notices an abandoned request."""
        server = self._server(slot.backend)
        if server.runs.get(slot.index) is run:
            server.stop(run)
            self._quiet(slot)

    def _over(self, client: _Client, *, answered: bool) -> None:
        """Remove an ended request, and schedule the requests that follow it."""
        del self._clients[client.ask.id]
        for ask in self.source.then(client.ask, self.now, answered=answered):
            self._to_come += 1
            self._at(ask.at, partial(self._arrives, ask))

    # -- finished work of servers --------------------------------------------------------------

    def _ran(self, server: SimulatedServer, run: Run) -> None:
        slot = SlotId(server.info.id, run.index)
        if self._prefills.get(run.request) is run:
            del self._prefills[run.request]
            if run.request in self._given_up:
                self._at(self.now + _QUIET_S, partial(self._prefill_failed, run.request))
            else:
                self._feed(ev.Prefilled(run.request, _reported(run, answer=False)))
            return
        client = self._clients.get(run.request)
        if client is None:  # abandoned, and the server had not noticed
            self._quiet(slot)
            return
        assert run.first_at is not None
        client.ttft_s = run.first_at - client.ask.at
        self._feed(ev.Finished(run.request, Outcome.OK, _reported(run, answer=True)))
        self._over(client, answered=True)

    def _begins(self, server: SimulatedServer) -> None:
        for run in list(server.runs.values()):
            client = self._clients.get(run.request)
            sent = client.dispatch if client is not None else None
            if run.first_at == self.now and sent is not None and sent.plan.prefill_first:
                self._feed(ev.Begun(run.request))

    def _quiet(self, slot: SlotId) -> None:
        """Report a slot idle after an abandoned request, if the scheduler watches the slot."""
        request = self._watching.pop(slot, None)
        if request is not None:
            self._at(self.now + _QUIET_S, partial(self._tells_quiet, slot, request))

    def _tells_quiet(self, slot: SlotId, request: RequestId) -> None:
        n_tokens = count(self.servers[slot.backend].slots[slot.index].tokens)
        self._feed(ev.Quiet(request, n_tokens))

    # -- effects of the scheduler --------------------------------------------------------------

    def _feed(self, event: ev.Event) -> None:
        for effect in self.scheduler.handle(event, self.now):
            self._carry_out(effect)

    def _carry_out(  # noqa: C901 - an arm for each effect
        self, effect: ef.Effect
    ) -> None:
        if self._losses is not None:
            self._losses.saw(effect, self.scheduler.state)
        match effect:
            case ef.Dispatch():
                self._dispatch(effect)
            case ef.Reject():
                client = self._clients[effect.request]
                self.meter.rejected[type(effect.error).__name__] += 1
                self._over(client, answered=False)
            case ef.Account():
                self._account(effect)
            case ef.Save():
                self._save(effect)
            case ef.Cut():
                self._cut(effect)
            case ef.Restore():
                self._restore(effect)
            case ef.Prefill():
                # The server samples one token even if none is wanted (llama-server.md section 2.3).
                self._prefills[effect.request] = self._server(effect.slot.backend).start(
                    effect.request, effect.slot.index, effect.tokens, _ONE_TOKEN
                )
            case ef.StopWork():
                if effect.request in self._prefills:
                    self._given_up.add(effect.request)
                    self._at(self.now + _NOTICE_S, partial(self._gives_up, effect.request))
            case ef.WatchSlot():
                self._watching[effect.slot] = effect.request
                if effect.slot.index not in self.servers[effect.slot.backend].runs:
                    self._quiet(effect.slot)
            case ef.Delete() | ef.Quarantine():  # no file exists: Python frees the tokens
                pass
            case ef.StartServer(server=name):
                assert self._on_demand is not None
                self._at(self.now + self._on_demand.load_s, partial(self._loaded, name))
            case ef.StopServer(server=name):
                assert self._on_demand is not None
                ended = partial(self._feed, ev.ServerEnded(name))
                self._at(self.now + self._on_demand.stop_s, ended)
            case ef.Detach():
                pass  # the server is idle; `StopServer` follows
            case ef.Spent():
                pass  # nobody has a limit
            case ef.Limited() | ef.Prove():  # pragma: no cover - they do what they promise
                pass
            case ef.Erase() | ef.ModelReady():  # pragma: no cover - no tenants, prompts are read
                pass

    def _loaded(self, name: BackendId) -> None:
        self._server(name).restart(self.now)
        self._feed(ev.BackendUp(self.servers[name].info))

    def _dispatch(self, effect: ef.Dispatch) -> None:
        assert effect.pin, "simulated clients use routes that keep id_slot"
        client = self._clients[effect.request]
        client.dispatch = effect
        slot, ask = effect.lease.slot, client.ask
        self._server(slot.backend).start(ask.id, slot.index, ask.prompt.tokens, ask.answer)

    def _account(self, effect: ef.Account) -> None:
        if effect.outcome is not Outcome.OK:
            return
        client = self._clients[effect.request.id]
        record = record_of(effect, client.ttft_s, self.now - client.ask.at)
        self.meter.oracle_tokens += client.oracle
        self.meter.finished(record)
        if self._losses is not None:
            self._losses.finished(record, client.oracle)

    # -- state files ---------------------------------------------------------------------------

    def _save(self, effect: ef.Save) -> None:
        server = self._server(effect.slot.backend)
        n = count(server.slots[effect.slot.index].tokens)
        seconds = server.hardware.save_of(n * server.hardware.bytes_per_token)
        self.meter.saves[effect.reason] += 1
        told = partial(self._saved, effect, seconds)
        server.transfer(TransferRun(effect.slot.index, seconds, None, told))

    def _saved(self, effect: ef.Save, seconds: float) -> None:
        server = self.servers[effect.slot.backend]
        held = server.slots[effect.slot.index].tokens
        if not held:
            self._feed(ev.SaveFailed(effect.request, effect.slot, "the slot is empty"))
            return
        made = self._file(effect.namespace, held)
        self.meter.saved_bytes += made.size_bytes
        self._feed(ev.Saved(effect.request, effect.slot, made, seconds))
        self._peak()

    def _restore(self, effect: ef.Restore) -> None:
        server, snapshot = self._server(effect.slot.backend), effect.snapshot
        self.meter.restores += 1
        self.meter.restored_bytes += snapshot.size_bytes
        seconds = server.hardware.restore_of(snapshot.size_bytes)
        restored = ev.Restored(effect.request, snapshot.id, len(snapshot), seconds)
        told = partial(self._feed, restored)
        assert len(snapshot) <= server.info.n_ctx, "a snapshot that the slot cannot hold"
        server.transfer(TransferRun(effect.slot.index, seconds, snapshot.tokens, told))

    def _cut(self, effect: ef.Cut) -> None:
        """Cut a prefix out of a snapshot: takes time, but stops no server."""
        held = head(effect.snapshot.tokens, effect.n_tokens)
        made = self._file(effect.snapshot.namespace, held)
        seconds = self._hardware.rewrite_of(made.size_bytes)
        self.meter.cuts += 1
        self.meter.cut_bytes += made.size_bytes
        self._at(self.now + seconds, partial(self._was_cut, effect, made, seconds))

    def _was_cut(self, effect: ef.Cut, made: Snapshot, seconds: float) -> None:
        self._feed(ev.WasCut(effect.request, made, seconds))
        self._peak()

    def _file(self, namespace: Namespace, tokens: Tokens) -> Snapshot:
        self._files += 1
        size_bytes = count(tokens) * self._hardware.bytes_per_token
        made = Snapshot(SnapshotId(f"s{self._files}"), namespace, KV_DIR, tokens, size_bytes)
        self._peak()
        return made

    def _peak(self) -> None:
        self.meter.peak_bytes = max(self.meter.peak_bytes, self.view.store.total_bytes)

    def _gives_up(self, request: RequestId) -> None:
        """Stop a cancelled prefill: the server notices the closed connection."""
        run = self._prefills.get(request)
        if run is None:
            return  # the prefill ended before
        self._server(self.view.slot_of(request).backend).stop(run)
        del self._prefills[request]
        self._at(self.now + _QUIET_S, partial(self._prefill_failed, request))

    def _prefill_failed(self, request: RequestId) -> None:
        self._given_up.discard(request)
        self._feed(ev.PrefillFailed(request, "the client disconnected"))


def _reported(run: Run, *, answer: bool) -> Reported:
    """Return the `timings` that llama-server reports: wall time, stalls included."""
    assert run.first_at is not None
    said = Reported(count(run.prompt), run.cached, run.first_at - run.started_at)
    if not answer:
        return said
    return replace(
        said,
        generated_tokens=count(run.answer),
        generated_s=run.ended_at - run.first_at,
        generated=run.answer,
    )
