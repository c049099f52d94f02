"""The production engine over simulated servers and a workload, on a virtual clock."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from time import perf_counter

from router.base.errors import RouterError
from router.base.tasks import Tasks
from router.base.tokens import join
from router.base.types import (
    BackendId,
    KvDir,
    Outcome,
    Reported,
    Request,
    RequestId,
    RequestRecord,
    Session,
    SlotId,
    Transfer,
)
from router.core.model.effects import AnswerEnd
from router.core.model.plan import Plan
from router.core.scheduler import Scheduler
from router.engine.engine import Engine, EngineListener, Grant
from router.engine.loop_throttle import LoopThrottle
from router.tools.simulate.accounting import Oracle, Result
from router.tools.simulate.machines.hardware import OnDemand
from router.tools.simulate.machines.process import SimulatedProcess, SimulatedStore, reported
from router.tools.simulate.machines.server import SimulatedServer
from router.tools.simulate.requests import RequestSource, SimulatedRequest
from router.tools.simulate.virtual_loop import VirtualClock, run_virtually

KV_DIR = KvDir("simulated")
_REPORT_EVERY_S = 0.2 if sys.stderr.isatty() else 10.0  # of real time; else each is a new line
_LOOK_S = 1.0  # between two looks whether the work of the router is over

# Told of each request that a server answered, with its plan and the time of its end.
Told = Callable[[RequestRecord, Plan, float], None]


class Simulator:
    """One simulation, from the first request to the last answer."""

    def __init__(
        self,
        scheduler: Scheduler,
        servers: Sequence[SimulatedServer],
        source: RequestSource,
        *,
        on_demand: OnDemand | None = None,
        progress: Callable[[int], None] = lambda _: None,
        told: Told = lambda *_: None,
    ) -> None:
        self.scheduler = scheduler
        self.catalog = scheduler.state.inventory.catalog
        self.servers = {server.info.id: server for server in servers}
        self.source = source
        self.meter = Result()
        self._store = SimulatedStore(servers[0].hardware)
        self._oracle = Oracle()
        self._on_demand = on_demand
        self._progress, self._progress_at = progress, perf_counter()
        self._told = told
        self.ended_at = 0.0  # of the last request, in simulated seconds
        self._asks: dict[RequestId, tuple[SimulatedRequest, int]] = {}  # and what could be reused

    def run(self) -> Result:
        """Run until no request and no work is left. Returns the counters."""
        run_virtually(self._run())
        return self.meter

    async def _run(self) -> None:
        self._loop, self._clients = asyncio.get_running_loop(), Tasks()
        self._processes = {
            name: SimulatedProcess(server, self._store) for name, server in self.servers.items()
        }
        clock = VirtualClock()
        self.engine = Engine(
            self.scheduler, self._processes, self._store, clock, self, LoopThrottle(clock), self
        )
        self.engine.listener = EngineListener(self.over)
        if self._on_demand is not None:
            self.engine.configure_servers(*self._on_demand.configured([*self.servers]))
        else:
            for server in self.servers.values():
                self.engine.backend_up(server.info, ())
        for ask in self.source.arrivals():
            await asyncio.sleep(max(ask.at - self._loop.time(), 0.0))
            self._come(ask)
        while self._asks or self.scheduler.state.inventory.jobs:
            await self._clients.join()
            await asyncio.sleep(_LOOK_S)
        await self.engine.aclose()

    # -- clients ---------------------------------------------------------------------------------

    def _come(self, ask: SimulatedRequest) -> None:
        """Let a client ask, now or at its time."""
        self._asks[ask.id] = ask, 0
        self._clients.spawn(self._serve(ask), name=ask.id)

    async def _serve(self, ask: SimulatedRequest) -> None:
        await asyncio.sleep(max(ask.at - self._loop.time(), 0.0))
        self.meter.requests += 1
        if (now := perf_counter()) - self._progress_at > _REPORT_EVERY_S:
            self._progress_at = now
            self._progress(self.meter.requests)
        held = join([ask.prompt.tokens, ask.answer])
        self._asks[ask.id] = ask, self._oracle.ask(ask.prompt.tokens, held)
        answered = False
        try:
            async with asyncio.timeout(ask.leaves_after_s):
                answered = await self._answer(ask)
        except TimeoutError:
            self.meter.abandoned += 1
        except RouterError as error:
            self.meter.rejected[type(error).__name__] += 1
        del self._asks[ask.id]
        self.ended_at = self._loop.time()
        for following in self.source.then(ask, self._loop.time(), answered=answered):
            self._come(following)

    async def _answer(self, ask: SimulatedRequest) -> bool:
        """Send a request as the web layer does, and wait for its answer."""
        session = None if ask.session is None else Session(ask.session, "trace")
        request = Request(ask.id, ask.prompt, ask.model, session=session, background=ask.background)
        grant: Grant = await self.engine.submit(request)
        outcome, said, first_s = Outcome.CLIENT_GONE, Reported(), None
        slot = grant.lease.slot
        process = self._processes[slot.backend]

        def on_first() -> None:
            if grant.plan.prefill_first:
                self.engine.begun(ask.id)

        run = process.begin(ask.id, slot.index, ask.prompt.tokens, ask.answer, on_first)
        try:
            await process.until_over(run)
            assert run.first_at is not None
            outcome, said = Outcome.OK, reported(run, answer=True)
            first_s = run.first_at - ask.at
        finally:
            ended = AnswerEnd(outcome, said, first_s, self._loop.time() - ask.at)
            self.engine.finish(ask.id, ended)
        return True

    # -- what the engine tells -------------------------------------------------------------------

    def over(self, record: RequestRecord, plan: Plan) -> None:
        """Count a request that reached a server."""
        if record.outcome is Outcome.OK:
            self.meter.finished(record, self._asks[record.request][1])
            self._told(record, plan, self._loop.time())

    def start(self, server: BackendId) -> None:
        """Load a model."""
        assert self._on_demand is not None
        self._loop.call_later(self._on_demand.load_s, self._loaded, server)

    def stop(self, server: BackendId, *, hangs: bool) -> None:
        """End a server."""
        assert self._on_demand is not None
        self._loop.call_later(self._on_demand.stop_s, self.engine.server_ended, server)

    def _loaded(self, server: BackendId) -> None:
        self._processes[server].restart()
        self.engine.backend_up(self.servers[server].info, ())

    def saved(self, _: SlotId, reason: str, transfer: Transfer | None, __: str) -> None:
        self.meter.saves[reason] += 1
        self.meter.saved_bytes += 0 if transfer is None else transfer.size_bytes
        self.deleted()

    def restored(self, _: SlotId, transfer: Transfer | None, __: str) -> None:
        self.meter.restores += 1
        self.meter.restored_bytes += 0 if transfer is None else transfer.size_bytes

    def rewritten(self, _: str, size_bytes: int, *__: object) -> None:
        self.meter.cuts += 1
        self.meter.cut_bytes += size_bytes

    def deleted(self, *_: object) -> None:
        self.meter.peak_bytes = max(self.meter.peak_bytes, self.catalog.total_bytes)

    def request(self, *_: object) -> None: ...
    def rejected(self, *_: object) -> None: ...
    def refused_key(self, *_: object) -> None: ...
    def tenant_limited(self, *_: object) -> None: ...
    def erase_failed(self, *_: object) -> None: ...
