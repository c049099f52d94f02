"""Simulated hosts, and the doors by which requests come: each at the next host in turn.

The choice of a host is the one of production (`router.hosts.choice`), with the quotes of the
schedulers. What the directory knows is computed from what the hosts hold.
"""

from dataclasses import dataclass, field

from router.base.prefix_hash import STEP, PrefixHasher
from router.base.tokens import head
from router.base.types import Request
from router.core.hosts.quote import quote
from router.core.model.tenancy import namespace_of
from router.core.scheduler import Scheduler
from router.engine.scheduler_view import SchedulerView
from router.hosts.choice import Offer, in_order, is_worth_asking, to_ask
from router.tools.simulate.server import SimulatedServer

# What a quote and a forwarded request take, as measured with mutual TLS (bench.latency).
_ASK_S, _WAY_S = 0.001, 0.002


@dataclass(slots=True)
class SimulatedHost:
    """A scheduler and its servers. `tick`: when its next tick is due."""

    name: str
    scheduler: Scheduler
    servers: list[SimulatedServer]
    view: SchedulerView = field(init=False)
    tick: float | None = None

    def __post_init__(self) -> None:
        self.view = SchedulerView(self.scheduler.state)

    def holds(self, request: Request) -> int:
        """Return how many tokens of a prompt a slot or a snapshot of this host holds."""
        inventory, tokens = self.scheduler.state.inventory, request.prompt.tokens
        most = max(inventory.holdings.shared(inventory.slots, tokens).values(), default=0)
        namespaces = {namespace_of(info, request.tenant) for info in inventory.infos()}
        return max([most, *(inventory.catalog.covered(name, tokens) for name in namespaces)])

    def busy(self) -> float:
        """Return the requests for each slot."""
        slots = list(self.scheduler.state.inventory.slots)
        busy = sum(not slot.is_idle for slot in slots) + len(self.scheduler.state.queue)
        return busy / max(len(slots), 1)


class Doors:
    """The doors of all hosts, taken in turn as behind a load balancer."""

    def __init__(self, hosts: list[SimulatedHost]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._order = hosts
        self._hasher = PrefixHasher(b"simulated", "", "")
        self._arrived = 0

    def choose(self, request: Request, now: float) -> tuple[SimulatedHost, float]:
        """Return the host for a request, and the seconds until the request is there."""
        here = self._order[self._arrived % len(self._order)]
        self._arrived += 1
        if len(self._order) == 1:
            return here, 0.0
        state = here.scheduler.state
        own = quote(request, state.inventory, state.queue, now)
        if not is_worth_asking(own, len(request.prompt), _ASK_S + _WAY_S):
            return here, 0.0
        others = [name for name in self._hosts if name != here.name]
        holders = {name: n for name in others if (n := self._hosts[name].holds(request)) >= STEP}
        busy = {name: self._hosts[name].busy() for name in others}
        (first,) = self._hasher.hashes(head(request.prompt.tokens, STEP)) or [b""]
        offers = []
        for name in to_ask(others, holders, busy, first):
            theirs = self._hosts[name].scheduler.state
            told = quote(request, theirs.inventory, theirs.queue, now)
            if told is not None:
                offers.append(Offer(name, told, told.price_s))
        order = in_order(own, offers, _WAY_S, here.name, first)
        if not order:
            return here, 0.0
        return self._hosts[order[0].peer], _ASK_S + _WAY_S
