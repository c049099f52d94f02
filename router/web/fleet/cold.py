"""The cold tier as a holder of states, beside the hosts of a fleet; or alone, without a fleet."""

from collections.abc import Callable

from aiohttp import web

from router.base.tasks import spawn
from router.base.types import BackendInfo, Request, RequestId
from router.core.model.plan import Offered
from router.core.model.tenancy import facts_of
from router.engine.engine import Engine
from router.hosts.choice import dear_above_s
from router.hosts.link import Breaker, Link
from router.store.cold.names import StateName
from router.store.cold.tier import ColdTier, Owned
from router.telemetry.decision_log import DecisionLog, HostsAsked
from router.web.api.elsewhere import Elsewhere
from router.web.fleet.fetching import COLD, Fetching, Held
from router.web.server.call import Call

NAME = "cold tier"  # no host has a space in its name
_LONGEST_BREAK_S = 60.0
_ASKING_S = 0.1  # until one was fetched: the manifest, and the first byte of a blob
_GOOD_S = 6 * 3600.0  # a state comes from there now and then only


class ColdHolder:
    """The tier, and the link to it."""

    def __init__(self, tier: ColdTier, now: Callable[[], float]) -> None:
        self._tier = tier
        self._now = now
        # One failure is enough: a store that hangs is to cost one request the deadline of a fetch.
        breaker = Breaker(_LONGEST_BREAK_S, now, after=1)
        self.link = Link(breaker, now, _ASKING_S, tier.doubt, _GOOD_S)
        self._last: tuple[RequestId, tuple[Held, Offered] | None] | None = None

    def found(self, request: Request, info: BackendInfo) -> tuple[Held, Offered] | None:
        """Return the holder and the offer that spare most of a request. None: there is none.

        The same for all questions about one request: a look takes 1 ms for 32,000 tokens.
        """
        if request.prompt.unknown or self.link.breaker.is_open or not self._tier.is_usable:
            return None
        if self._last is None or self._last[0] != request.id:
            self._last = request.id, self._found(request, info)
        return self._last[1]

    def _found(self, request: Request, info: BackendInfo) -> tuple[Held, Offered] | None:
        owned = Owned(facts_of(info.namespace), request.tenant)
        back = info.memory_kind.goes_back
        match = self._tier.find(owned, request.prompt.tokens, goes_back=back)
        if match is None:
            return None
        state = match.state
        offered = Offered(match.common, state.n_tokens, state.size_bytes)
        return self._held(state, owned), offered

    def _held(self, state: StateName, owned: Owned) -> Held:
        tier = self._tier
        return Held(
            NAME,
            state.path.encode(),
            self.link,
            lambda _: tier.manifest(state, owned),
            lambda _, ends_at: tier.reading(state, ends_at, self._now),
            lambda error: spawn(tier.give_up(state, error), name="give up a cold state"),
        )


class FromCold(Elsewhere):
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
        way = self._fetching.way(request, own, COLD)
        if way is not None and await self._fetching.fetch(request, (), way):
            call.fetched_from = NAME
            self._decision_log.note_hosts(
                request.id, HostsAsked(own=way.quote, offers=(), fetched_from=NAME)
            )
        return None
