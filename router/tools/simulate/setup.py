"""What is simulated in one run: servers and the production scheduler."""

from dataclasses import dataclass, field

from router.base.types import BackendId, BackendInfo, MemoryKind, Namespace
from router.core.execution.state import State
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.policy import UNLIMITED, Policy, SnapshotLimits
from router.core.model.request_queue import Queue, QueueLimits
from router.core.scheduler import Scheduler
from router.tools.simulate.machines.hardware import Hardware, OnDemand
from router.tools.simulate.machines.server import SimulatedServer
from router.tools.simulate.simulator import KV_DIR


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a run, in tokens of the workload; one simulated token is `scale` of them."""

    hardware: Hardware
    servers: int = 4
    slots: int = 4
    n_ctx: int = 32_768
    memory_kind: MemoryKind = MemoryKind.FULL
    policy: Policy = field(default_factory=Policy)
    budget_bytes: int = UNLIMITED
    min_tokens: int = 128
    queue: QueueLimits = field(default_factory=QueueLimits)
    scale: int = 1
    on_demand: OnDemand | None = None  # None: all servers are up all the time

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the models; none if all servers have the same one."""
        return () if self.on_demand is None else tuple(self._names())

    def _names(self) -> list[BackendId]:
        width = len(str(self.servers))
        what = "server" if self.on_demand is None else "model"
        return [BackendId(f"{what}-{number:0{width}}") for number in range(1, self.servers + 1)]

    def servers_of(self) -> list[SimulatedServer]:
        """Return the servers, with empty slots."""
        hardware = self.hardware.scaled(self.scale)
        return [
            SimulatedServer(
                BackendInfo(
                    id=name,
                    models=frozenset({name}) if self.on_demand is not None else frozenset(),
                    n_slots=self.slots,
                    n_ctx=max(self.n_ctx // self.scale, 2),
                    namespace=Namespace(name if self.on_demand is not None else "simulated"),
                    # As in production: no KV directory without a store and a policy that moves KV.
                    kv_dir=KV_DIR if self.budget_bytes and self.policy.name.moves_kv else None,
                    memory_kind=self.memory_kind,
                    cuts=self.memory_kind is MemoryKind.FULL,
                    bytes_per_token=hardware.bytes_per_token,
                    # The probe would measure this; other rates are learned from traffic.
                    prefill_s_per_token=hardware.prefill_s,
                ),
                hardware,
            )
            for name in self._names()
        ]

    def scheduler_of(self) -> Scheduler:
        """Return the production scheduler, with no backend yet."""
        limits = SnapshotLimits(
            max_bytes=self.budget_bytes, min_tokens=max(self.min_tokens // self.scale, 1)
        )
        inventory = Inventory(policy=self.policy, catalog=Catalog(limits))
        return Scheduler(State(inventory=inventory, queue=Queue(self.queue)))
