"""What is simulated in one run: servers and the production scheduler."""

from dataclasses import dataclass, field

from router.base.types import BackendId, BackendInfo, MemoryKind, Namespace
from router.core.execution.state import State
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.policy import UNLIMITED, Policy, SnapshotLimits
from router.core.model.request_queue import Queue, QueueLimits
from router.core.scheduler import Scheduler
from router.tools.simulate.machines.blobs import SimulatedBlobs, SplitSettings
from router.tools.simulate.machines.hardware import Hardware
from router.tools.simulate.machines.hosts import SimulatedHost
from router.tools.simulate.machines.on_demand import OnDemand
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
    hosts: int = 1  # each with so many servers, and with the whole budget
    link_bytes_per_s: float = 0.0  # between two hosts; 0: no states go from one to another
    blobs: SplitSettings | None = None  # of each host; None: snapshots are whole files

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of the models; none if all servers have the same one."""
        return () if self.on_demand is None else tuple(self._names())

    def _names(self) -> list[BackendId]:
        width = len(str(self.servers))
        what = "server" if self.on_demand is None else "model"
        return [BackendId(f"{what}-{number:0{width}}") for number in range(1, self.servers + 1)]

    def hosts_of(self) -> list[SimulatedHost]:
        """Return the hosts, each with servers with empty slots and no backend yet."""
        width = len(str(self.hosts))
        names = [f"host-{number:0{width}}" for number in range(1, self.hosts + 1)]
        return [self._host(name) for name in names]

    def _host(self, name: str) -> SimulatedHost:
        scheduler = self.scheduler_of()
        servers = self.servers_of("" if self.hosts == 1 else f"{name}/")
        blobs = None
        if self.blobs is not None:
            blobs = SimulatedBlobs(
                self.blobs,
                self.hardware.scaled(self.scale).bytes_per_token,
                self.scale,
                self.memory_kind,
                lambda snapshot: not scheduler.state.inventory.catalog.is_evicted_next(snapshot),
            )
        return SimulatedHost(
            name, scheduler, servers, blobs, link_bytes_per_s=self.link_bytes_per_s
        )

    def servers_of(self, host: str = "") -> list[SimulatedServer]:
        """Return the servers, with empty slots; their names begin with `host`."""
        hardware = self.hardware.scaled(self.scale)
        return [
            SimulatedServer(
                BackendInfo(
                    id=BackendId(f"{host}{name}"),
                    models=frozenset({name}) if self.on_demand is not None else frozenset(),
                    n_slots=self.slots,
                    n_ctx=max(self.n_ctx // self.scale, 2),
                    namespace=Namespace(name if self.on_demand is not None else "simulated"),
                    # As in production: no KV directory without a store and a policy that moves KV.
                    kv_dir=KV_DIR if self.budget_bytes and self.policy.moves_kv else None,
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
