"""What follows when something happens: to a backend, to a state file, to a request.

Each class answers "who reacts when ...?" for one part of the router; the part knows no other.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from router.assembly.backends import Backends
from router.assembly.servers_on_demand import ServersOnDemand
from router.assembly.tokenizer_registry import TokenizerRegistry
from router.base.clock import wall_now
from router.base.ports import Telemetry
from router.base.tasks import Tasks
from router.base.types import (
    BackendId,
    Cost,
    KvSettings,
    Namespace,
    Outcome,
    Request,
    RequestRecord,
    Snapshot,
    SnapshotId,
)
from router.core.model.plan import Plan
from router.engine.engine import Engine, EngineListener
from router.llama.attach.learning import Attached
from router.llama.attach.probe_result import ProbeResult
from router.llama.client import LlamaClient
from router.llama.replies import InfillAnswer, ModelsInfo, Props
from router.store.listener import StoreListener
from router.telemetry.decision_log import DecisionLog
from router.telemetry.usage import UsageBook
from router.web.api.backend_selection import BackendSelection

_CLOCK_MARGIN_S = 1.0  # clocks of files and of this process may differ by so much


@dataclass(frozen=True, slots=True)
class BackendReactions:
    """Reacts to the monitors of backends; implements `attached.BackendListener`."""

    engine: Engine
    selection: BackendSelection
    tokenizers: TokenizerRegistry
    on_demand: ServersOnDemand
    tasks: Tasks

    def up(self, attached: Attached) -> None:
        """Take a backend into use."""
        self.on_demand.remember(attached)
        self.engine.backend_up(attached.info, attached.slots)
        self.selection.backend_came()

    def down(self, backend: BackendId) -> None:
        """Take a backend out of use."""
        self.engine.backend_down(backend)
        self.tokenizers.leave(backend, keep=self.on_demand.keeps(backend))

    def no_llama_server(self, backend: BackendId, reason: str) -> None:
        """End a server on demand that is none."""
        self.on_demand.supervisor.fail(backend, reason)

    def probed(self, attached: Attached, kept: frozenset[int]) -> None:
        """Take the result of a probe, or its slots back if it made way for a request."""
        self.on_demand.remember(attached)
        if attached.probe.untried:
            self.engine.probe_put_off(attached.info.id, kept)
        else:
            self.engine.probed(attached.info, kept)

    def misnamed(self, name: Namespace, ago_s: float) -> None:
        """Purge the states that were saved under a name within `ago_s`."""
        since = wall_now() - ago_s - _CLOCK_MARGIN_S
        doomed = [
            snapshot.id
            for snapshot, _, _ in self.engine.state.inventory.catalog.snapshots()
            if snapshot.namespace == name and snapshot.saved_at >= since
        ]
        self.tasks.spawn(self.engine.purge(doomed), name="purge misnamed states")

    def borrow(self, backend: BackendId) -> Collection[int]:
        """Return the idle slots that a probe may use."""
        return self.engine.borrow(backend)

    def poll_for_strangers(self, backend: BackendId) -> None:
        """Look in the background for unknown clients of a backend."""
        self.engine.poll_for_strangers(backend)

    def is_in_the_way(self, backend: BackendId) -> bool:
        """Return whether a probe of the backend would delay a request.

        Other servers may share its processor or its card, so one that runs anywhere counts.
        """
        return self.engine.state.inventory.is_serving() or self.selection.is_waited_for(backend)

    def known_namespaces(self) -> set[Namespace]:
        """Return all namespaces that a backend could belong to."""
        return self.engine.state.inventory.known_namespaces()

    async def prepare(
        self,
        client: LlamaClient,
        props: Props,
        namespace: Namespace,
        infill: tuple[InfillAnswer, ...],
        recalled: bool,
    ) -> None:
        """Learn how a backend tokenizes. Raises BackendError."""
        await self.tokenizers.prepare(client, props, namespace, infill, recalled)

    def recall(self, backend: BackendId, props: Props, models: ModelsInfo) -> ProbeResult | None:
        """Return the probe's result for an equal process; None: there is none."""
        return self.on_demand.recall(backend, props, models)

    def settings_of(self, backend: BackendId) -> KvSettings:
        """Return the settings of a server's command line that decide KV; of others none."""
        return self.on_demand.settings_of(backend)


@dataclass(frozen=True, slots=True)
class StoreReactions(StoreListener):
    """Reacts to what the store finds out about files."""

    engine: Engine

    def lost(self, snapshot: Snapshot, reason: str) -> None:
        """Offer a snapshot no more."""
        self.engine.snapshot_lost(snapshot.id)

    def stored(self, snapshot: Snapshot) -> None:
        """Count its blobs once, and price what it takes to make a file of it."""
        self.engine.snapshot_stored(snapshot)

    def is_worth_writing(self, snapshot: SnapshotId) -> bool:
        """Return whether a snapshot would be kept, and not evicted next."""
        return not self.engine.state.inventory.catalog.is_evicted_next(snapshot)

    def alike(self, snapshot: Snapshot) -> Sequence[tuple[SnapshotId, int]]:
        """Return the snapshots that begin like one, each with the tokens that they share."""
        found = self.engine.state.inventory.catalog.alike(snapshot.namespace, snapshot.tokens)
        return [(one.item, one.common) for one in found if one.item != snapshot.id]

    async def found(self, snapshots: list[Snapshot]) -> None:
        """Offer snapshots again."""
        await self.engine.snapshots_found(snapshots)


@dataclass(frozen=True, slots=True)
class EngineReactions(EngineListener):
    """Reacts to ends of requests and of backends."""

    telemetry: Telemetry
    decision_log: DecisionLog
    usage: UsageBook
    backends: Backends
    tokenizers: TokenizerRegistry
    on_demand: ServersOnDemand

    def over(self, record: RequestRecord, plan: Plan) -> None:
        """Keep what is known of a request that reached a backend."""
        self.decision_log.over(record, plan)
        self.usage.over(record)

    def spent(self, request: Request, backend: BackendId, cost: Cost) -> None:
        """Keep what a request cost after its end, or without having been sent."""
        self.usage.late(request, backend, cost)

    def abandoned(self, request: Request) -> None:
        """Report a request whose client left in the queue or during its preparation."""
        outcome, why = Outcome.CLIENT_GONE, "the client disconnected before its request was sent"
        self.telemetry.rejected(request.id, outcome, why, request.clients_id, request.caller)
        self.decision_log.rejected(request.id, outcome, why, request.caller)

    def prove(self, backend: BackendId) -> None:
        """Have a backend probed before it ends."""
        self.backends.prove(backend)

    def detached(self, backend: BackendId) -> None:
        """Let go of a drained backend."""
        self.backends.detached(backend)
        self.tokenizers.leave(backend, keep=self.on_demand.keeps(backend))
