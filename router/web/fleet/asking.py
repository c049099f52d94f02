"""Ask peers for quotes: what each would take for a request, and what it would hand out.

A host that holds most of a prompt may be the wrong one to serve it. So the best of what is offered
is told to the others, and each says what it would take once it has fetched that.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from time import perf_counter

from msgspec.structs import replace

from router.base.types import Namespace, Request
from router.core.model.plan import Offered, Quote
from router.engine.held_prefixes import HeldPrefixes
from router.hosts.choice import Offer, best_held, in_order, may_fetch_elsewhere, to_ask, twice_s
from router.hosts.messages import QuoteAsk, QuoteReply
from router.hosts.peer import Peer
from router.hosts.peers import Peers, Usable
from router.telemetry.decision_log import HostOffer, HostsAsked
from router.telemetry.hosts_metrics import HostsMetrics
from router.web.fleet.fetching import COLD, Fetching, Way
from router.web.fleet.handing_out import HandingOut
from router.web.server.call import Call

# No answer within this time is no offer. A request that takes seconds here gives peers a
# `_QUOTE_SHARE` of that instead: a busy peer that holds its prompt may need it.
_QUOTE_LIMIT_S, _QUOTE_SHARE, _QUOTE_MOST_S = 0.010, 0.05, 0.25
# What forwarding takes, besides asking: a connection is kept, so it is two copies of the bytes.
WAY_S = 0.001
_UNKNOWN = Namespace("")
_HOLDERS = 2  # asked besides: hosts that serve nothing


@dataclass(slots=True)
class Sought:
    """A request that looks for a host. `own` None: nothing here can serve it."""

    call: Call
    request: Request
    model: str | None  # as hosts know it
    own: Quote | None
    beginning: bytes  # a digest of what the bodies of a conversation have in common
    namespace: Namespace = _UNKNOWN
    hashes: Sequence[bytes] = ()
    n_tokens: int = 0

    @property
    def first(self) -> bytes:
        """Return the first prefix hash, or a digest of the beginning of the body."""
        return self.hashes[0] if self.hashes else self.beginning


@dataclass(frozen=True, slots=True)
class Ways:
    """Offers of peers, and the peers to send the request to: the best first, with their quotes.

    A quote of None: none came in time. `fetch`: serve it here instead, once this is fetched.
    `fetches`: what each peer fetches for it, and where, by the peer's key. `computing`: tokens of
    the prompt that some host is computing.
    """

    told: HostsAsked
    quoted: Mapping[str, float | None]
    answers: Mapping[str, QuoteReply]
    fetches: Mapping[str, tuple[str, Offered]]
    fetch: Way | None = None
    computing: int = 0


@dataclass(slots=True, eq=False)
class Asking:
    """Asks peers for this host."""

    _peers: Peers
    _held: HeldPrefixes
    _fetching: Fetching
    _handing_out: HandingOut
    _metrics: HostsMetrics

    def cost_s(self, usable: Usable) -> float:
        """Return the seconds that asking and forwarding take."""
        return min((peer.quote_s for peer in usable.peers.values()), default=0.0) + WAY_S

    async def ways(self, sought: Sought, usable: Usable) -> Ways:
        """Ask peers, and return what to do."""
        keys = to_ask({key: one.busy for key, one in usable.peers.items()}, sought.first)
        asked = {key: usable.peers[key] for key in keys}
        others = {peer.key: peer for peer in self._peers.drained()[:_HOLDERS]}
        mine = self._mine(sought)
        answers = await self._ask(sought, asked | others, self._peers.incarnation, mine)
        own_key = self._peers.incarnation
        fetches = {} if mine is None else dict.fromkeys(_fetching(answers), (own_key, mine))
        held = {
            key: found
            for key, one in answers.items()
            if (found := self._first_of_use(sought, one.offers)) is not None
        }
        if mine is not None:
            held[own_key] = mine
        computing = max((one.reused for one in held.values() if one.computing), default=0)
        best = best_held(held)
        fetch = self._fetching.way(sought.request, sought.own, COLD)
        if best is None and (cold := self._fetching.cold_offer(sought.request)) is not None:
            best = COLD, cold[1]
        if best is not None and best[0] != own_key:
            holder, offered = best
            way = self._fetching.way(sought.request, sought.own, holder, offered)
            ways = [one for one in (way, fetch) if one is not None]
            fetch = min(ways, key=lambda one: one.quote.price_s, default=None)
            again = {key: peer for key, peer in asked.items() if key != holder}
            own = sought.own if fetch is None else fetch.quote
            prices_s = [one.quote.price_s for one in answers.values() if one.quote is not None]
            if again and may_fetch_elsewhere(own, prices_s, self.cost_s(usable)):
                told = await self._ask(sought, again, holder, offered)
                told = {key: one for key, one in told.items() if one.quote is not None}
                answers |= told
                fetches = {key: there for key, there in fetches.items() if key not in told}
                fetches |= dict.fromkeys(_fetching(told), best)
        return self._decided(sought, usable, answers, fetches, fetch, computing)

    def without_fetch(self, sought: Sought, usable: Usable, ways: Ways) -> Ways:
        """Return the ways without the fetch, which did not succeed: the offers are still good."""
        answers, fetches, computing = ways.answers, ways.fetches, ways.computing
        return self._decided(sought, usable, answers, fetches, None, computing)

    def _decided(
        self,
        sought: Sought,
        usable: Usable,
        answers: Mapping[str, QuoteReply],
        fetches: Mapping[str, tuple[str, Offered]],
        fetch: Way | None,
        computing: int,
    ) -> Ways:
        by_key, own = usable.peers, sought.own if fetch is None else fetch.quote
        asked = [key for key in answers if key in by_key]
        n_tokens = sought.n_tokens
        compared = own
        if own is not None:
            loss_s = twice_s(own, computing, n_tokens)
            compared = replace(own, price_s=own.price_s + loss_s)
        offers = [
            Offer(
                key,
                one.quote,
                by_key[key].trust.price_s(one.quote.price_s)
                + twice_s(one.quote, computing, n_tokens),
            )
            for key, one in answers.items()
            if one.quote is not None and key in by_key
        ]
        order = in_order(compared, offers, WAY_S, self._peers.incarnation, sought.first)
        quotes = {offer.peer: offer.quote for offer in offers}
        told = HostsAsked(
            own=own, offers=tuple(HostOffer(by_key[key].name, quotes.get(key)) for key in asked)
        )
        quoted: dict[str, float | None] = {offer.peer: offer.quote.price_s for offer in order}
        if own is None and not order:  # no quote in time: any peer is better than none
            quoted = dict.fromkeys(asked)
        fetch = None if quoted else fetch
        return Ways(told, quoted, answers, fetches, fetch, computing)

    def _mine(self, sought: Sought) -> Offered | None:
        """Return this host's offer for the request."""
        if not sought.hashes:
            return None
        request = sought.request
        tokens, tenant = request.prompt.tokens, request.tenant
        found = self._handing_out.offers(tokens, sought.namespace, tenant, sought.n_tokens)
        return self._first_of_use(sought, found)

    def _first_of_use(self, sought: Sought, offers: Sequence[Offered]) -> Offered | None:
        """Return the first offer that the prompt begins with, as far as its tokens are known."""
        prompt, tenant = sought.request.prompt, sought.request.tenant

        def is_of_use(offered: Offered) -> bool:
            return self._held.is_of_use(offered, sought.namespace, tenant, prompt.tokens)

        return next((one for one in offers if prompt.unknown or is_of_use(one)), None)

    async def _ask(
        self, sought: Sought, peers: Mapping[str, Peer], holder: str, offered: Offered | None
    ) -> dict[str, QuoteReply]:
        """Return the answers of peers, by the given keys: a peer may start again."""
        request, own = sought.request, sought.own
        share_s = inf if own is None else own.price_s * _QUOTE_SHARE
        limit_s = min(max(share_s, _QUOTE_LIMIT_S), _QUOTE_MOST_S)
        ask = QuoteAsk(
            model=sought.model,
            namespace=sought.namespace,
            tenant=request.tenant,
            n_tokens=sought.n_tokens,
            hashes=b"".join(sought.hashes),
            max_new_tokens=request.max_new_tokens,
            pinnable=request.pinnable,
            reuse=request.reuse,
            tasks=request.tasks,
            answers=request.answers,
            whole_backend=request.whole_backend,
            holder=holder if offered is not None else "",
            offered=offered,
        )

        async def answer(peer: Peer) -> QuoteReply:
            begun = perf_counter()
            told = await peer.quote(ask, limit_s)
            seconds = perf_counter() - begun
            self._metrics.quoted(peer.name, seconds, offered=told.quote is not None)
            return told

        found = await asyncio.gather(*(answer(peer) for peer in peers.values()))
        return dict(zip(peers, found, strict=True))


def _fetching(answers: Mapping[str, QuoteReply]) -> list[str]:
    """Return the peers whose quote is for the time after a fetch."""
    return [key for key, one in answers.items() if one.quote is not None and one.quote.fetched]
