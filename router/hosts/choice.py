"""Decide which peers to ask, and which host gets a request. Pure.

Seconds throughout. A host compares its own price with the offers of peers; a forwarded request pays
for the way on top.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from math import exp2

import xxhash
from msgspec import Struct

from router.core.model.plan import Offered, Quote

# Peers that a request asks, 0.25 ms of a core each; of a larger fleet those that the prompt's first
# hash names, the same on all hosts, and the least busy one. Chosen.
MAX_ASKED = 8
# A request asks no peer if its own price is lower than this many times the cost of asking: asking
# could not pay. Chosen: at 2 ms for asking and the way, requests of less than 20 ms stay.
_WORTH_ASKING = 10.0
# Share of a prompt that is as good as all: the next turn of a long conversation. Chosen.
_NEARLY_ALL = 0.95
# A peer has to be cheaper by this factor, so that equal hosts keep what clients send them. Chosen.
_CHEAPER = 0.9
# Prices within this factor are equal: then the favourite host of the prompt gets it. Chosen: the
# probes of equal servers differ by more.
_EQUAL = 1.25
_SOON = 0.05  # of the price: waits that differ by no more are equal
# Share of the seconds that others lose. Chosen: the `reuse_probability` of the policies.
_LOST = 0.5
# A price may be this many times the quote when the request comes: else the peer refuses it.
_STALE_FACTOR, _STALE_S = 2.0, 0.05


class Offer(Struct, frozen=True):
    """The quote of a peer, by its incarnation. `price_s`: as far as the quote is trusted."""

    peer: str
    quote: Quote
    price_s: float


def dear_above_s(cost_s: float) -> float:
    """Return the price from which a request may ask peers; `cost_s`: of asking and forwarding."""
    return _WORTH_ASKING * cost_s


def is_worth_asking(own: Quote | None, n_prompt: int, cost_s: float) -> bool:
    """Return whether a request should ask peers. `own` None: nothing here can serve it.

    No peer can save much of a prompt that is nearly all held here, in a slot that is free.
    """
    if own is None:
        return True
    if own.reused_tokens >= _NEARLY_ALL * n_prompt > 0 and own.wait_s <= cost_s:
        return False
    return own.price_s > dear_above_s(cost_s)


def to_ask(busy: Mapping[str, float], first_hash: bytes, n: int = MAX_ASKED) -> list[str]:
    """Return the peers to ask, the most promising first. `busy`: of all that can be used.

    The order is that of `favourite`: all hosts then ask the same peers for the same beginning. The
    last place goes to the least busy peer, so that a new host gets work.
    """
    if len(busy) <= n:
        return list(busy)
    ranked = ranked_for(busy, first_hash)
    return [*ranked[: n - 1], min(ranked[n - 1 :], key=busy.__getitem__)]


def ranked_for(hosts: Collection[str], first_hash: bytes) -> list[str]:
    """Return hosts in the order in which a prompt prefers them: the same on every host."""
    return sorted(hosts, key=lambda host: (_lot(host, first_hash), host))


def favourite(hosts: Collection[str], first_hash: bytes) -> str:
    """Return the host that gets a prompt where prices are equal: the same one on every host.

    A prompt that many clients send at once, by all doors, is then computed once and not on every
    host. Prompts that begin differently are spread over the hosts.
    """
    return min(hosts, key=lambda host: _lot(host, first_hash))


def _lot(host: str, first_hash: bytes) -> int:
    """Return the rank of a host for a prompt. 0.2 µs: there may be a hundred hosts."""
    return xxhash.xxh32_intdigest(first_hash, _seed(host))


@lru_cache(maxsize=1024)
def _seed(host: str) -> int:
    return int.from_bytes(blake2b(host.encode(), digest_size=4).digest(), "little")


def in_order(
    own: Quote | None, offers: Collection[Offer], way_s: float, here: str, first_hash: bytes
) -> list[Offer]:
    """Return the offers to take instead of serving the request here, the cheapest first.

    `way_s`: what forwarding takes; `here`: the name of this host among the peers. Offers that are
    not clearly cheaper are left out, unless nothing here can serve the request. Of hosts with equal
    prices, one is the favourite of the prompt.
    """
    ways = {offer.peer: (offer.price_s, offer.quote) for offer in offers}
    good = [
        offer for offer in offers if own is None or offer.price_s + way_s < own.price_s * _CHEAPER
    ]
    if own is not None:
        ways[here] = own.price_s, own
    if not ways:
        return []
    favoured = favourite(_equal(ways), first_hash)
    if own is not None and favoured == here:
        return []
    good += [offer for offer in offers if offer.peer == favoured and offer not in good]
    return sorted(
        good,
        key=lambda offer: (
            offer.peer != favoured,
            offer.price_s,
            -offer.quote.reused_tokens,
            offer.peer,
        ),
    )


def _equal(ways: Mapping[str, tuple[float, Quote]]) -> list[str]:
    """Return the hosts that are as good as the cheapest one: as soon, with as much reused."""
    best_s, best = min(ways.values(), key=lambda way: (way[0], -way[1].reused_tokens))
    return [
        host
        for host, (price_s, quote) in ways.items()
        if price_s <= _EQUAL * best_s
        and quote.wait_s <= best.wait_s + _SOON * best_s
        and quote.reused_tokens >= best.reused_tokens
    ]


def best_held(offers: Mapping[str, Offered]) -> tuple[str, Offered] | None:
    """Return the host that offers most of a prompt, the soonest, and what it offers. None: none."""
    ranks = {host: (-one.reused, one.ready_s, one.size_bytes) for host, one in offers.items()}
    best = min(ranks, key=ranks.__getitem__, default=None)
    return None if best is None else (best, offers[best])


def may_fetch_elsewhere(own: Quote | None, prices_s: Collection[float], cost_s: float) -> bool:
    """Return whether to ask peers what they would take with the best state of all fetched.

    `own`: the quote of this host with that; `prices_s`: of peers without. It may pay if all are
    dear, and this host would have to wait: else no other one fetches the state sooner.
    """
    dear_s = dear_above_s(cost_s)
    if own is not None and own.wait_s <= dear_s:
        return False
    prices = [*prices_s, *([] if own is None else [own.price_s])]
    return min(prices, default=0.0) > dear_s


def twice_s(quote: Quote, computing: int, n_prompt: int) -> float:
    """Return the seconds that others lose if a host computes what another one is computing.

    `computing`: tokens of a prompt of `n_prompt`; what is fetched is not computed. On one host the
    planner counts the same.
    """
    if quote.fetched:
        return 0.0
    again = max(computing - quote.reused_tokens, 0)
    takes_s = max(quote.price_s - quote.wait_s, 0.0)
    rest = max(n_prompt - quote.reused_tokens, 1)
    return _LOST * takes_s * min(again / rest, 1.0)


def is_stale(quoted_s: float, now_s: float | None) -> bool:
    """Return whether a host must refuse a request that it quoted, because of its price by now.

    `now_s` None: it can no longer serve the request.
    """
    return now_s is None or now_s > _STALE_FACTOR * quoted_s + _STALE_S


class Undecided:
    """Requests that ask peers at this moment, with the seconds that they take in a free slot.

    Most of them will stay, and be in the queue before the next one. Without them, requests that
    come at once would all see a host without a queue, and all stay. Those that begin alike do not
    count for each other: what they share is computed once.
    """

    def __init__(self) -> None:
        self._asking: dict[str, tuple[str | None, bytes, float]] = {}

    @contextmanager
    def counted(
        self, request: str, model: str | None, first_hash: bytes, takes_s: float
    ) -> Iterator[None]:
        """Count a request, by its id, while it asks."""
        self._asking[request] = model, first_hash, takes_s
        try:
            yield
        finally:
            del self._asking[request]

    def before_s(self, model: str | None, first_hash: bytes) -> float:
        """Return the seconds that requests of a model take on one server, if all stay."""
        return sum(
            takes_s
            for named, first, takes_s in self._asking.values()
            if named == model and first != first_hash
        )


class Trust:
    """Trust in the quotes of a peer: the seconds by which it was late, learned.

    A peer that always quotes 0 is believed less with each request that took longer, until others
    are cheaper. What it says of itself does not count, only the time that it took. Half of it is
    forgotten in a minute: a peer that gets nothing could not show that it is in time again.
    """

    _WEIGHT = 0.3  # of one observation. Chosen: three lies in a row are enough
    _SLACK_S = 0.02  # late by this much is no lie: the way, a busy processor
    _MOST = 1e6
    _HALF_LIFE_S = 60.0  # Chosen

    def __init__(self, now: Callable[[], float]) -> None:
        """Set up for a peer that was never late. `now`: clock seconds."""
        self._now = now
        self._noted_s = 0.0
        self._noted_at = now()

    @property
    def late_s(self) -> float:
        """Return the seconds by which the peer is expected to be late."""
        return self._noted_s * exp2((self._noted_at - self._now()) / self._HALF_LIFE_S)

    def price_s(self, quoted_s: float) -> float:
        """Return the quoted seconds plus the peer's usual lateness."""
        return quoted_s + self.late_s

    def note(self, quoted_s: float, took_s: float) -> None:
        """Learn from a forwarded request: quoted, and taken until the first token."""
        late_s = min(max(took_s - quoted_s - self._SLACK_S, 0.0), self._MOST)
        before_s = self.late_s
        self._noted_s, self._noted_at = before_s + self._WEIGHT * (late_s - before_s), self._now()
