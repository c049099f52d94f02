"""States on their way from one simulated host to another.

A slot is saved first, and a prefix is cut out of a longer state, as `router.web.fleet` does. A host
sends one state after the other, and receives one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from router.base.types import Request, SlotId, Snapshot, SnapshotId
from router.core.hosts.handout import missing_bytes
from router.core.model import events as ev
from router.core.model.plan import Handout
from router.tools.simulate.accounting import Meter
from router.tools.simulate.machines.hosts import ASK_S, Fetch, SimulatedHost

# A save may take so many times what it was to take, and so long, as in production.
_LATE, _LEAST_S = 3.0, 2.0

Then = Callable[[], None]
_Key = tuple[str, str, SnapshotId | SlotId, int | None]


@dataclass(slots=True)
class Fetches:
    """Carries out fetches, each for all requests that want it.

    `at` calls something at a time; `feed` tells the scheduler of a host; `copy` makes a file of the
    first tokens of a snapshot.
    """

    meter: Meter
    now: Callable[[], float]
    at: Callable[[float, Then], None]
    feed: Callable[[SimulatedHost, ev.Event], None]
    copy: Callable[[SimulatedHost, Snapshot, int], Snapshot]
    _under_way: dict[_Key, list[Then]] = field(default_factory=dict)
    _awaited: dict[SlotId, list[Then]] = field(default_factory=dict)

    def begin(self, host: SimulatedHost, fetch: Fetch, request: Request, then: Then) -> None:
        """Fetch a state for a request, and call `then` when it is there, or cannot be had."""
        handout, holder = fetch.handout, fetch.holder
        key = host.name, holder.name, handout.content, handout.cut
        if (waiting := self._under_way.get(key)) is not None:
            waiting.append(then)
            return
        self._under_way[key] = [then]
        holder.n_sending += 1
        there = partial(self._saved, key, host, fetch, request)
        slot = handout.content
        if not isinstance(slot, SlotId):
            there()
            return
        once = _Once(there)
        self._awaited.setdefault(slot, []).append(once)
        limit_s = _LATE * handout.offered.ready_s + _LEAST_S
        self.at(self.now() + limit_s, once)
        self.feed(holder, ev.SaveAsked(slot))
        if not holder.view.is_being_saved(slot):
            self.saved(slot)

    def saved(self, slot: SlotId) -> None:
        """Go on with the fetches that waited for the save of a slot: it is over."""
        for go_on in self._awaited.pop(slot, ()):
            go_on()

    def _saved(self, key: _Key, host: SimulatedHost, fetch: Fetch, request: Request) -> None:
        """Send what the holder has saved, if that is still of use."""
        holder = fetch.holder
        found = holder.handout(request, self.now(), saved=True)
        if found is None or found.offered.reused < fetch.handout.offered.reused:
            self._over(key, holder)
            return
        ready_s = self.now() + found.offered.ready_s
        self.at(ready_s, partial(self._send, key, host, holder, found, request))

    def _send(
        self,
        key: _Key,
        host: SimulatedHost,
        holder: SimulatedHost,
        handout: Handout,
        request: Request,
    ) -> None:
        assert not isinstance(handout.content, SlotId)
        snapshot = holder.view.snapshot(handout.content)
        if snapshot is None:  # evicted meanwhile
            self._over(key, holder)
            return
        if handout.cut is not None:
            snapshot = self._cut(holder, snapshot, handout.cut)
            self.meter.cuts += 1
            self.meter.cut_bytes += snapshot.size_bytes
        inventory = host.scheduler.state.inventory
        size_bytes = missing_bytes(request, inventory, host.servers[0].info, handout.offered)
        begin = max(self.now() + ASK_S, holder.sends_until, host.receives_until)
        end = begin + size_bytes / host.link_bytes_per_s
        holder.sends_until = host.receives_until = end
        host.link(holder.name).fetched(size_bytes, end - begin, ASK_S)
        self.meter.fetches += 1
        self.meter.fetched_bytes += size_bytes
        self.at(end, partial(self._arrived, key, host, holder, snapshot))

    def _cut(self, holder: SimulatedHost, longer: Snapshot, n_tokens: int) -> Snapshot:
        """Return the snapshot of the first tokens of another one."""
        known = holder.view.equal(longer, n_tokens)
        if known is not None and (found := holder.view.snapshot(known)) is not None:
            return found
        return self._made(holder, longer, n_tokens)

    def _arrived(
        self, key: _Key, host: SimulatedHost, holder: SimulatedHost, snapshot: Snapshot
    ) -> None:
        self._made(host, snapshot, len(snapshot))
        self._over(key, holder)

    def _made(self, host: SimulatedHost, snapshot: Snapshot, n_tokens: int) -> Snapshot:
        made = self.copy(host, snapshot, n_tokens)
        kind = host.servers[0].info.memory_kind
        self.feed(host, ev.SnapshotsFound((made,), kind, made=True))
        return made

    def _over(self, key: _Key, holder: SimulatedHost) -> None:
        holder.n_sending -= 1
        for then in self._under_way.pop(key):
            then()


@dataclass(slots=True)
class _Once:
    """Something to do at the first call only."""

    do: Then | None

    def __call__(self) -> None:
        do, self.do = self.do, None
        if do is not None:
            do()
