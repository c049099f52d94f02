"""Simulated hosts, and the doors by which requests come: each at the next host in turn.

The choice of a host, and of a state to fetch, is the one of production (`router.hosts.choice`),
with the quotes of the schedulers. What the directory knows is computed from what the hosts hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.base.prefix_hash import STEP, PrefixHasher
from router.base.tokens import head
from router.base.types import Request
from router.core.hosts.handout import handouts
from router.core.hosts.quote import quote
from router.core.model.plan import Handout, Quote
from router.core.model.tenancy import namespace_of
from router.core.scheduler import Scheduler
from router.engine.scheduler_view import SchedulerView
from router.hosts.breaker import Breaker
from router.hosts.choice import (
    Offer,
    best_held,
    in_order,
    is_worth_asking,
    may_fetch_elsewhere,
    to_ask,
    twice_s,
)
from router.hosts.link import Link
from router.hosts.messages import MEASURED
from router.tools.simulate.machines.blobs import SimulatedBlobs
from router.tools.simulate.machines.server import SimulatedServer

# What a quote and a forwarded request take, as measured with mutual TLS (bench.latency).
ASK_S, _WAY_S = 0.001, 0.002


@dataclass(slots=True)
class SimulatedHost:
    """A scheduler and its servers. `tick`: when its next tick is due.

    `links`: to the hosts that it fetches from, by their names, of `link_bytes_per_s`; 0: no state
    is fetched. `sends_until`, `receives_until`: when its network is free.
    """

    name: str
    scheduler: Scheduler
    servers: list[SimulatedServer]
    blobs: SimulatedBlobs | None = None
    view: SchedulerView = field(init=False)
    tick: float | None = None
    link_bytes_per_s: float = 0.0
    links: dict[str, Link] = field(default_factory=dict)
    sends_until: float = 0.0
    receives_until: float = 0.0
    n_sending: int = 0

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

    def quote(self, request: Request, now: float) -> Quote | None:
        """Return what serving a request takes here."""
        state = self.scheduler.state
        return quote(request, state.inventory, state.queue, now)

    def handout(self, request: Request, now: float, *, saved: bool = False) -> Handout | None:
        """Return what of this host spares most of a request. None: nothing does."""
        inventory, tokens = self.scheduler.state.inventory, request.prompt.tokens
        models = {info.namespace: None for info in inventory.infos()}
        found = handouts(inventory, models, request.tenant, tokens, len(tokens), now, saved=saved)
        return next(iter(found), None)

    def link(self, holder: str) -> Link:
        """Return the link by which this host fetches from another one."""
        if holder not in self.links:
            never = Breaker(0.0, lambda: 0.0)  # simulated links do not fail
            link = self.links[holder] = Link(never, lambda: 0.0)
            link.measured(MEASURED, MEASURED / self.link_bytes_per_s)
        return self.links[holder]


@dataclass(frozen=True, slots=True)
class Fetch:
    """A state to fetch: what another host hands out."""

    holder: SimulatedHost
    handout: Handout


@dataclass(frozen=True, slots=True)
class ChosenHost:
    """Where a request is served: it is there in `way_s`, and then something is fetched for it."""

    host: SimulatedHost
    way_s: float = 0.0
    fetch: Fetch | None = None
    is_forwarded: bool = False


class Doors:
    """The doors of all hosts, taken in turn as behind a load balancer."""

    def __init__(self, hosts: list[SimulatedHost]) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._order = hosts
        self._hasher = PrefixHasher(b"simulated", "", "")
        self._arrived = 0

    def choose(self, request: Request, now: float) -> ChosenHost:
        """Return the way to serve a request."""
        here = self._order[self._arrived % len(self._order)]
        self._arrived += 1
        if len(self._order) == 1:
            return ChosenHost(here)
        own, cost_s = here.quote(request, now), ASK_S + _WAY_S
        if not is_worth_asking(own, len(request.prompt), cost_s):
            return ChosenHost(here)
        others = [name for name in self._hosts if name != here.name]
        holders = {name: n for name in others if (n := self._hosts[name].holds(request)) >= STEP}
        busy = {name: self._hosts[name].busy() for name in others}
        (first,) = self._hasher.hashes(head(request.prompt.tokens, STEP)) or [b""]
        asked = to_ask(others, holders, busy, first)
        held = self._held([here.name, *asked], request, now)
        best = self._best(held)
        is_mine = best is not None and best.holder is here
        quotes = self._quotes(asked, request, best if is_mine else None, now)
        fetched = None if is_mine else _once_fetched(here, request, own, best)
        if best is not None and not is_mine:
            prices_s = [told.price_s for told in quotes.values()]
            again = [name for name in asked if name != best.holder.name]
            if may_fetch_elsewhere(fetched or own, prices_s, cost_s):
                quotes |= self._quotes(again, request, best, now)
        n_prompt = len(request.prompt)
        offered = [one.offered for one in held.values()]
        computing = max((one.reused for one in offered if one.computing), default=0)
        mine = fetched or own
        if mine is not None:
            mine = replace(mine, price_s=mine.price_s + twice_s(mine, computing, n_prompt))
        offers = [
            Offer(name, told, told.price_s + twice_s(told, computing, n_prompt))
            for name, told in quotes.items()
        ]
        order = in_order(mine, offers, _WAY_S, here.name, first)
        if not order:
            return ChosenHost(here, ASK_S, best) if fetched is not None else ChosenHost(here)
        there = order[0]
        fetch = best if there.quote.fetched else None
        return ChosenHost(self._hosts[there.peer], cost_s, fetch, is_forwarded=True)

    def _held(self, names: list[str], request: Request, now: float) -> dict[str, Handout]:
        """Return what hosts hand out for a request."""
        found = {name: self._hosts[name].handout(request, now) for name in names}
        return {name: one for name, one in found.items() if one is not None}

    def _best(self, held: Mapping[str, Handout]) -> Fetch | None:
        offers = {
            name: replace(one.offered, sharers=self._hosts[name].n_sending)
            for name, one in held.items()
        }
        best = best_held(offers)
        if best is None or not self._hosts[best[0]].link_bytes_per_s:
            return None
        name, offered = best
        return Fetch(self._hosts[name], replace(held[name], offered=offered))

    def _quotes(
        self, names: list[str], request: Request, fetch: Fetch | None, now: float
    ) -> dict[str, Quote]:
        """Return the quotes of hosts, each with the state fetched where that pays."""
        found = dict[str, Quote]()
        for name in names:
            host = self._hosts[name]
            own = host.quote(request, now)
            told = _once_fetched(host, request, own, fetch) or own
            if told is not None:
                found[name] = told
        return found


def _once_fetched(
    host: SimulatedHost, request: Request, own: Quote | None, fetch: Fetch | None
) -> Quote | None:
    """Return the quote of a host with a state fetched. None: that does not pay."""
    if own is None or fetch is None or fetch.holder is host:
        return None
    seconds = host.link(fetch.holder.name).seconds
    return host.view.once_fetched(request, own, fetch.handout.offered, seconds)
