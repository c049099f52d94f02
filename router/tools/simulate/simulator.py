"""The production scheduler over simulated servers and a workload, in simulated time.

`Simulator` replaces `router.engine.engine`: it carries out each effect, and feeds the resulting
event to the scheduler at its simulated time. All pending actions are in one heap. There may be
several hosts, each with a scheduler and servers of its own.
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
from router.tools.simulate.accounting import Losses, Meter, Oracle
from router.tools.simulate.machines.blobs import SimulatedBlobs
from router.tools.simulate.machines.fetches import Fetches
from router.tools.simulate.machines.hosts import ChosenHost, Doors, SimulatedHost
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
    host: SimulatedHost | None = None  # that serves it
    sent: bool = False  # it has reached that host
    dispatch: ef.Dispatch | None = None
    ttft_s: float | None = None


class Simulator:
    """One simulation, from the first request to the last answer."""

    def __init__(
        self,
        hosts: Sequence[SimulatedHost],
        source: RequestSource,
        *,
        losses: Losses | None = None,
        on_demand: OnDemand | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.hosts = list(hosts)
        self.servers = {one.info.id: one for host in hosts for one in host.servers}
        self._host_of = {one.info.id: host for host in hosts for one in host.servers}
        self._doors = Doors(self.hosts)
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
        self._told: dict[str, SimulatedHost] = {}  # hosts that got an event at this moment
        self._arrivals = source.arrivals()
        self._to_come = 0  # scheduled requests that have not arrived
        self._files = 0
        self._fetches = Fetches(self.meter, lambda: self.now, self._at, self._feed, self._copy)

    # -- time ----------------------------------------------------------------------------------

    def run(self) -> Meter:
        """Run until no request and no work is left. Returns the counters."""
        for host in self.hosts:
            if self._on_demand is not None:
                self._feed(host, self._on_demand.configured([one.info.id for one in host.servers]))
            else:
                for server in host.servers:
                    self._feed(host, ev.BackendUp(server.info))
        self._next_arrival()
        told = perf_counter()
        while self._heap and (self._to_come or self._clients or self._busy()):
            self.now, _, action = heappop(self._heap)
            action()
            self._settle()
            if perf_counter() - told > _REPORT_EVERY_S:
                told = perf_counter()
                self._progress(self.meter.arrived)
        assert not self._clients, "a request was never answered"
        return self.meter

    def _busy(self) -> bool:
        return any(host.view.has_jobs for host in self.hosts)

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
        for host in self._told.values():
            wakeup = host.scheduler.next_wakeup(self.now)
            # After an earlier tick, `next_wakeup` is called again anyway.
            if wakeup is not None and (host.tick is None or wakeup + _TICK_S < host.tick):
                host.tick = wakeup + _TICK_S
                self._at(host.tick, partial(self._ticks, host, host.tick))
            blobs = host.blobs
            if blobs is not None and blobs.wakeup < blobs.due:
                blobs.due = blobs.wakeup
                self._at(blobs.due, partial(self._writes, host, blobs))
        self._told.clear()

    def _ticks(self, host: SimulatedHost, at: float) -> None:
        if host.tick == at:
            host.tick = None
            self._feed(host, ev.Tick())

    def _writes(self, host: SimulatedHost, blobs: SimulatedBlobs) -> None:
        """Write blobs that are due, beside all other work: that takes no time here."""
        for event in blobs.changes(self.now):
            self._feed(host, event)
        self._peak()

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
                assert callable(done.name)
                done.name()

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
        way = self._doors.choose(request, self.now)
        client = self._clients[ask.id]
        client.host, client.sent = way.host, not way.way_s
        self.meter.forwarded += way.is_forwarded
        if way.way_s:
            self._at(self.now + way.way_s, partial(self._comes, way, request))
        else:
            self._feed(way.host, ev.Arrived(request))
        if by_itself:
            self._next_arrival()

    def _comes(self, way: ChosenHost, request: Request) -> None:
        """Fetch a state for a request, if that is its way, and let it arrive."""
        arrive = partial(self._reaches, way.host, request)
        if way.fetch is not None and request.id in self._clients:
            self._fetches.begin(way.host, way.fetch, request, arrive)
        else:
            arrive()

    def _reaches(self, host: SimulatedHost, request: Request) -> None:
        """Let a request arrive at its host, unless its client has left."""
        if request.id in self._clients:
            self._clients[request.id].sent = True
            self._feed(host, ev.Arrived(request))

    def _leaves(self, name: RequestId) -> None:
        client = self._clients.get(name)
        if client is None:
            return  # already answered or refused
        self.meter.abandoned += 1
        host = client.host
        assert host is not None
        if client.dispatch is None:
            self._over(client, answered=False)
            if client.sent:
                self._feed(host, ev.Cancelled(name))
            return
        slot = client.dispatch.lease.slot
        run = self.servers[slot.backend].runs[slot.index]
        self._at(self.now + _NOTICE_S, partial(self._notices, slot, run))
        self._feed(host, ev.Finished(name, Outcome.CLIENT_GONE, Reported()))
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
        slot, host = SlotId(server.info.id, run.index), self._host_of[server.info.id]
        if self._prefills.get(run.request) is run:
            del self._prefills[run.request]
            if run.request in self._given_up:
                self._at(self.now + _QUIET_S, partial(self._prefill_failed, host, run.request))
            else:
                self._feed(host, ev.Prefilled(run.request, _reported(run, answer=False)))
            return
        client = self._clients.get(run.request)
        if client is None:  # abandoned, and the server had not noticed
            self._quiet(slot)
            return
        assert run.first_at is not None
        client.ttft_s = run.first_at - client.ask.at
        self._feed(host, ev.Finished(run.request, Outcome.OK, _reported(run, answer=True)))
        self._over(client, answered=True)

    def _begins(self, server: SimulatedServer) -> None:
        for run in list(server.runs.values()):
            client = self._clients.get(run.request)
            sent = client.dispatch if client is not None else None
            if run.first_at == self.now and sent is not None and sent.plan.prefill_first:
                self._feed(self._host_of[server.info.id], ev.Begun(run.request))

    def _quiet(self, slot: SlotId) -> None:
        """Report a slot idle after an abandoned request, if the scheduler watches the slot."""
        request = self._watching.pop(slot, None)
        if request is not None:
            self._at(self.now + _QUIET_S, partial(self._tells_quiet, slot, request))

    def _tells_quiet(self, slot: SlotId, request: RequestId) -> None:
        n_tokens = count(self.servers[slot.backend].slots[slot.index].tokens)
        self._feed(self._host_of[slot.backend], ev.Quiet(request, n_tokens))

    # -- effects of the scheduler --------------------------------------------------------------

    def _feed(self, host: SimulatedHost, event: ev.Event) -> None:
        self._told[host.name] = host
        for effect in host.scheduler.handle(event, self.now):
            self._carry_out(host, effect)

    def _carry_out(  # noqa: C901 - an arm for each effect
        self, host: SimulatedHost, effect: ef.Effect
    ) -> None:
        if self._losses is not None:
            self._losses.saw(effect, host.scheduler.state)
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
                self._save(host, effect)
            case ef.Cut():
                self._cut(host, effect)
            case ef.Restore():
                self._restore(host, effect)
            case ef.Prefill():
                # The server samples one token even if none is wanted (llama-server.md section 2.3).
                self._prefills[effect.request] = self._server(effect.slot.backend).start(
                    effect.request, effect.slot.index, effect.tokens, _ONE_TOKEN
                )
            case ef.StopWork():
                if effect.request in self._prefills:
                    self._given_up.add(effect.request)
                    self._at(self.now + _NOTICE_S, partial(self._gives_up, host, effect.request))
            case ef.WatchSlot():
                self._watching[effect.slot] = effect.request
                if effect.slot.index not in self.servers[effect.slot.backend].runs:
                    self._quiet(effect.slot)
            case ef.Delete() | ef.Quarantine():  # no file exists: Python frees the tokens
                if host.blobs is not None:
                    host.blobs.gone(effect.snapshot.id)
            case ef.StartServer(server=name):
                assert self._on_demand is not None
                self._at(self.now + self._on_demand.load_s, partial(self._loaded, name))
            case ef.StopServer(server=name):
                assert self._on_demand is not None
                ended = partial(self._feed, host, ev.ServerEnded(name))
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
        self._feed(self._host_of[name], ev.BackendUp(self.servers[name].info))

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

    def _save(self, host: SimulatedHost, effect: ef.Save) -> None:
        server = self._server(effect.slot.backend)
        n = count(server.slots[effect.slot.index].tokens)
        seconds = server.hardware.save_of(n * server.hardware.bytes_per_token)
        self.meter.saves[effect.reason] += 1
        told = partial(self._saved, host, effect, seconds)
        server.transfer(TransferRun(effect.slot.index, seconds, None, told))

    def _saved(self, host: SimulatedHost, effect: ef.Save, seconds: float) -> None:
        server = self.servers[effect.slot.backend]
        held = server.slots[effect.slot.index].tokens
        if not held:
            self._feed(host, ev.SaveFailed(effect.request, effect.slot, "the slot is empty"))
            self._fetches.saved(effect.slot)
            return
        made = self._file(host, effect.namespace, held)
        self.meter.saved_bytes += made.size_bytes
        self._feed(host, ev.Saved(effect.request, effect.slot, made, seconds))
        self._fetches.saved(effect.slot)
        self._peak()

    def _restore(self, host: SimulatedHost, effect: ef.Restore) -> None:
        """Restore a snapshot; its file is assembled before if there is none."""
        hardware, snapshot = self.servers[effect.slot.backend].hardware, effect.snapshot
        self.meter.restores += 1
        self.meter.restored_bytes += snapshot.size_bytes
        if host.blobs is not None:
            host.blobs.used(snapshot.id)
        rewrite_s = 0.0 if snapshot.whole else hardware.rewrite_of(snapshot.size_bytes)
        if snapshot.whole:
            self._read(host, effect, rewrite_s)
        else:
            self._at(self.now + rewrite_s, partial(self._read, host, effect, rewrite_s))

    def _read(self, host: SimulatedHost, effect: ef.Restore, rewrite_s: float) -> None:
        server, snapshot = self._server(effect.slot.backend), effect.snapshot
        seconds = server.hardware.restore_of(snapshot.size_bytes)
        restored = ev.Restored(effect.request, snapshot.id, len(snapshot), seconds, rewrite_s)
        told = partial(self._feed, host, restored)
        assert len(snapshot) <= server.info.n_ctx, "a snapshot that the slot cannot hold"
        server.transfer(TransferRun(effect.slot.index, seconds, snapshot.tokens, told))

    def _cut(self, host: SimulatedHost, effect: ef.Cut) -> None:
        """Cut a prefix out of a snapshot: takes time, but stops no server."""
        made = self._copy(host, effect.snapshot, effect.n_tokens)
        seconds = host.servers[0].hardware.rewrite_of(made.size_bytes)
        self.meter.cuts += 1
        self.meter.cut_bytes += made.size_bytes
        self._at(self.now + seconds, partial(self._was_cut, host, effect, made, seconds))

    def _was_cut(self, host: SimulatedHost, effect: ef.Cut, made: Snapshot, seconds: float) -> None:
        self._feed(host, ev.WasCut(effect.request, made, seconds))
        self._peak()

    def _copy(self, host: SimulatedHost, snapshot: Snapshot, n_tokens: int) -> Snapshot:
        """Return a new file with the first tokens of a snapshot, which another host may have."""
        return self._file(host, snapshot.namespace, head(snapshot.tokens, n_tokens))

    def _file(self, host: SimulatedHost, namespace: Namespace, tokens: Tokens) -> Snapshot:
        self._files += 1
        size_bytes = count(tokens) * host.servers[0].hardware.bytes_per_token
        made = Snapshot(SnapshotId(f"s{self._files}"), namespace, KV_DIR, tokens, size_bytes)
        if host.blobs is not None:
            host.blobs.add(made, self.now)
        self._peak()
        return made

    def _peak(self) -> None:
        total_bytes = sum(host.view.store.total_bytes for host in self.hosts)
        self.meter.peak_bytes = max(self.meter.peak_bytes, total_bytes)

    def _gives_up(self, host: SimulatedHost, request: RequestId) -> None:
        """Stop a cancelled prefill: the server notices the closed connection."""
        run = self._prefills.get(request)
        if run is None:
            return  # the prefill ended before
        self._server(host.view.slot_of(request).backend).stop(run)
        del self._prefills[request]
        self._at(self.now + _QUIET_S, partial(self._prefill_failed, host, request))

    def _prefill_failed(self, host: SimulatedHost, request: RequestId) -> None:
        self._given_up.discard(request)
        self._feed(host, ev.PrefillFailed(request, "the client disconnected"))


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
