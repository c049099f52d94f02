"""Which peers are asked, and which host gets a request."""

import pytest

from router.core.model.plan import Quote
from router.hosts.choice import (
    Offer,
    Trust,
    Undecided,
    favourite,
    in_order,
    is_stale,
    is_worth_asking,
    ranked_for,
    to_ask,
)

FIRST = b"head"
HOSTS = ["here", "a", "b"]


def offer(peer: str, price_s: float, reused: int = 0) -> Offer:
    return Offer(peer, Quote(price_s, reused_tokens=reused), price_s)


def test_a_cheap_request_asks_nobody() -> None:
    assert not is_worth_asking(Quote(0.01), 1000, 0.002)
    assert is_worth_asking(Quote(0.1), 1000, 0.002)
    assert is_worth_asking(None, 1000, 0.002)


def test_prompt_nearly_all_here_asks_only_if_it_waits() -> None:
    assert not is_worth_asking(Quote(0.1, reused_tokens=960), 1000, 0.002)
    assert is_worth_asking(Quote(0.1, reused_tokens=900), 1000, 0.002)
    assert is_worth_asking(Quote(0.1, wait_s=0.05, reused_tokens=960), 1000, 0.002)


def test_the_least_busy_is_asked_too() -> None:
    peers = [f"p{n}" for n in range(20)]
    asked = to_ask(dict.fromkeys(peers, 0.0), FIRST, 3)
    idle = next(peer for peer in peers if peer not in asked)
    busy = dict.fromkeys(peers, 1.0) | {idle: 0.0}

    assert to_ask(busy, FIRST, 3) == [*asked[:2], idle]


def test_every_host_asks_the_same_peers_for_a_beginning() -> None:
    peers = [f"p{n}" for n in range(20)]
    asked = to_ask(dict.fromkeys(peers, 0.0), FIRST)

    assert to_ask(dict.fromkeys(peers[::-1], 0.0), FIRST)[:-1] == asked[:-1]
    assert favourite(peers, FIRST) == asked[0]
    assert {favourite(peers, bytes([n])) for n in range(100)} > {favourite(peers, FIRST)}


def test_every_host_ranks_all_hosts_alike_for_a_beginning() -> None:
    """Who was second for some prompts must not be second for all whose first host refuses."""
    ranked = [ranked_for(HOSTS, bytes([n])) for n in range(100)]
    assert ranked == [ranked_for(HOSTS[::-1], bytes([n])) for n in range(100)]
    assert len({tuple(one) for one in ranked}) == 6


def test_cheapest_peer_gets_it_if_clearly_cheaper() -> None:
    offers = [offer("a", 0.5), offer("b", 0.2), offer("c", 0.98)]

    assert [one.peer for one in in_order(Quote(1.0), offers, 0.001, "here", FIRST)] == ["b", "a"]
    assert in_order(Quote(0.2), offers, 0.001, "here", FIRST) == []


def test_of_equal_prices_one_host_is_the_favourite() -> None:
    """Also of some that are a little cheaper: probes of equal hosts differ by more."""
    offers = [offer("a", 0.9), offer("b", 1.0)]
    favours = {favourite(HOSTS, bytes([n])): bytes([n]) for n in range(100)}

    def order(own: Quote, favoured: str) -> list[str]:
        found = in_order(own, offers, 0.001, "here", favours[favoured])
        return [one.peer for one in found]

    assert order(Quote(1.0), "b") == ["b"]
    assert order(Quote(1.1), "b") == ["b", "a"]
    assert order(Quote(1.0), "here") == []
    assert order(Quote(1.2), "here") == ["a", "b"] or order(Quote(1.2), "here") == ["b", "a"]
    assert order(Quote(1.0, wait_s=0.1), "here") in (["a"], ["b"]), "it would wait here"
    assert order(Quote(0.9, reused_tokens=5), "b") == [], "no other has any of it"


def test_a_quote_is_stale_when_the_price_has_doubled() -> None:
    assert not is_stale(1.0, 1.9)
    assert is_stale(1.0, 2.1)
    assert is_stale(1.0, None)


def test_a_peer_that_lies_loses_its_turn() -> None:
    liar = Trust(lambda: 0.0)
    for _ in range(3):
        liar.note(quoted_s=0.0, took_s=2.0)

    assert liar.price_s(0.0) > 1.0
    for _ in range(20):
        liar.note(quoted_s=1.0, took_s=1.0)
    assert liar.price_s(0.0) == pytest.approx(0.0, abs=0.01)


def test_lateness_is_forgotten_by_half_in_a_minute() -> None:
    """A peer that gets nothing could not show that it is in time again."""
    now = 100.0
    peer = Trust(lambda: now)
    peer.note(quoted_s=0.0, took_s=60.02)
    late_s = peer.late_s
    assert late_s == pytest.approx(18.0)
    now += 60.0
    assert peer.late_s == pytest.approx(late_s / 2)
    peer.note(quoted_s=1.0, took_s=1.0)
    assert peer.late_s == pytest.approx(0.7 * late_s / 2)


def test_requests_that_come_at_once_see_each_other() -> None:
    """Those that begin alike do not: what they share is computed once."""
    undecided = Undecided()
    with undecided.counted("1", "m", b"a", 0.5), undecided.counted("2", "m", b"b", 0.2):
        assert undecided.before_s("m", b"c") == pytest.approx(0.7)
        assert undecided.before_s("m", b"a") == pytest.approx(0.2)
        assert undecided.before_s("other", b"c") == 0.0
    assert undecided.before_s("m", b"c") == 0.0
