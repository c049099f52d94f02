"""The cold tier as a holder of states, beside the hosts of a fleet; or alone, without a fleet."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web

from router.base.errors import KvError
from router.base.types import BackendInfo, Request, RequestId
from router.core.model.memory_kinds import goes_back
from router.core.model.plan import Offered
from router.core.model.tenancy import facts_of
from router.engine.engine import Engine
from router.hosts.breaker import Breaker
from router.hosts.choice import dear_above_s
from router.hosts.link import Link
from router.store.cold.names import StateName
from router.store.cold.tier import ColdTier, Owned
from router.store.manifests import Manifest
from router.telemetry.decision_log import DecisionLog, HostsAsked
from router.web.api.elsewhere import Nowhere
from router.web.fleet.fetching import Fetching, Holder
from router.web.server.call import Call

NAME = "cold tier"  # no host has a space in its name
_LONGEST_BREAK_S = 60.0
_LOOK_S = 0.5  # between two looks whether a read is to stop
_ASKING_S = 0.1  # until one was fetched: the manifest, and the first byte of a blob
_GOOD_S = 6 * 3600.0  # a state comes from there now and then only


class ColdHolder:
    """The tier, and the link to it."""

    name = NAME

    def __init__(self, tier: ColdTier, now: Callable[[], float]) -> None:
        self._tier = tier
        # One failure is enough: a store that hangs is to cost one request the deadline of a fetch.
        breaker = Breaker(_LONGEST_BREAK_S, now, after=1)
        self.link = Link(breaker, now, _ASKING_S, tier.doubt, _GOOD_S)
        self._last: tuple[RequestId, tuple[Holder, Offered] | None] | None = None

    def found(self, request: Request, info: BackendInfo) -> tuple[Holder, Offered] | None:
        """Return the holder and the offer that spare most of a request. None: there is none.

        The same for all questions about one request: a look takes 1 ms for 32,000 tokens.
        """
        if request.prompt.unknown or self.link.breaker.is_open or not self._tier.is_usable:
            return None
        if self._last is None or self._last[0] != request.id:
            self._last = request.id, self._found(request, info)
        return self._last[1]

    def _found(self, request: Request, info: BackendInfo) -> tuple[Holder, Offered] | None:
        owned = Owned(facts_of(info.namespace), request.tenant)
        back = goes_back(info.memory_kind)
        match = self._tier.find(owned, request.prompt.tokens, goes_back=back)
        if match is None:
            return None
        state = match.state
        offered = Offered(match.common, state.n_tokens, state.size_bytes)
        return HeldCold(self._tier, state, owned, self.link), offered


class ColdParts:
    """The parts of one state. Implements `exchange.Remote`; reads in the threads of the tier."""

    def __init__(
        self,
        tier: ColdTier,
        state: StateName,
        manifest: Manifest,
    ) -> None:
        """Set up in the event loop, in which the tier lives."""
        self._tier = tier
        self._state = state
        self._blobs = manifest.sized
        self._loop = asyncio.get_running_loop()
        self._stopped = False
        self.read_bytes = 0
        self._first_at = self._last_at = 0.0

    @property
    def reading_s(self) -> float:
        """Return the seconds from the first question to the last byte."""
        return self._last_at - self._first_at

    def stop(self) -> None:
        """Let all reads fail soon."""
        self._stopped = True

    def read(self, index: int, into: memoryview) -> None:
        """Read one part, of just this size. Blocks. Raises KvError."""
        work = self._tier.read_part(self._state, self._blobs[index], into, lambda: self._stopped)
        self._first_at = self._first_at or self._loop.time()
        reading = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not reading.done():
            with suppress(TimeoutError):
                reading.result(_LOOK_S)
            if self._stopped:
                reading.cancel()  # its thread may hang; what waits for it need not
                raise KvError("it takes too long")
        reading.result()
        self.read_bytes += len(into)
        self._last_at = self._loop.time()


@dataclass(frozen=True, slots=True)
class HeldCold:
    """One state of the tier. Implements `fetching.Holder`."""

    tier: ColdTier
    state: StateName
    owned: Owned
    link: Link
    name: str = NAME
    forgets: bool = True

    @property
    def key(self) -> bytes:
        """Return the key of the state in the tier."""
        return self.state.path.encode()

    async def manifest(self, _: float) -> bytes:
        """Return the manifest of the state. Raises KvError."""
        return await self.tier.manifest(self.state, self.owned)

    def parts(self, manifest: Manifest, _: float) -> ColdParts:
        """Return the reader of the state's parts."""
        return ColdParts(self.tier, self.state, manifest)


class FromCold(Nowhere):
    """The other hosts of a host that has none, but a cold tier."""

    def __init__(self, engine: Engine, fetching: Fetching, decision_log: DecisionLog) -> None:
        super().__init__(engine)
        self._fetching = fetching
        self._decision_log = decision_log

    async def if_sooner(self, call: Call) -> web.StreamResponse | None:
        """Fetch what a call begins with, if that is sooner than to compute it. Returns None."""
        request, engine = call.scheduled, self.engine
        if engine.is_surely_cheap(request, dear_above_s(0.0)):
            return None
        own = engine.quote(request)
        way = self._fetching.from_cold(request, own)
        if way is not None and await self._fetching.fetch(request, (), way):
            call.fetched_from = NAME
            self._decision_log.note_hosts(
                request.id, HostsAsked(own=way.quote, offers=()).fetched(NAME)
            )
        return None
