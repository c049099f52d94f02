"""The index of what a host holds, by prefix hash."""

from router.base.prefix_hash import BLOCK, STEP
from router.base.tokens import Tokens, head, join, pack
from router.base.types import NO_TENANT, BackendId, MemoryKind, Namespace, Tenant
from router.core.fleet.fleet import Fleet
from router.core.model.slots import Resident
from router.engine.held_prefixes import HeldPrefixes
from tests.support.scheduler.build import NS, backend, snapshot

PROMPT = pack(range(10 * BLOCK + 100))
NAMESPACE = Namespace(NS)


def held_by(fleet: Fleet) -> HeldPrefixes:
    return HeldPrefixes(fleet, b"secret", lambda namespace: namespace)


def with_slot(tokens: Tokens) -> Fleet:
    fleet = Fleet()
    fleet.infos[BackendId("a")] = backend("a")
    fleet.slots.add(BackendId("a"), 2)
    fleet.slots.of(BackendId("a"))[0].hold(Resident(tokens))
    return fleet


def drained(index: HeldPrefixes) -> HeldPrefixes:
    while index.refresh():
        pass
    return index


def longest(index: HeldPrefixes, prompt: Tokens, tenant: Tenant = NO_TENANT) -> Tokens:
    return index.longest(index.hashes(NAMESPACE, tenant, prompt))


def test_a_conversation_that_goes_on_finds_all_that_is_held() -> None:
    index = drained(held_by(with_slot(PROMPT)))

    assert longest(index, join([PROMPT, pack([1, 2, 3] * 50)])) == PROMPT


def test_a_prompt_that_leaves_early_finds_what_it_shares() -> None:
    index = drained(held_by(with_slot(PROMPT)))
    other = join([head(PROMPT, 3 * BLOCK + STEP), pack([-1] * BLOCK)])

    assert longest(index, other) == head(PROMPT, 3 * BLOCK)


def test_nothing_of_another_tenant_or_model_is_found() -> None:
    index = drained(held_by(with_slot(PROMPT)))

    assert longest(index, PROMPT, Tenant("alice")) == b""
    assert index.longest(index.hashes(Namespace("other"), NO_TENANT, PROMPT)) == b""


def test_a_slot_with_other_content_is_news() -> None:
    fleet = with_slot(PROMPT)
    index = drained(held_by(fleet))
    added, removed = index.take_news()
    assert len(added) == len(index) == 10 + 100 // STEP
    assert removed == []

    fleet.slots.of(BackendId("a"))[0].hold(Resident(head(PROMPT, 2 * BLOCK)))
    drained(index)
    added, removed = index.take_news()

    assert added == []
    assert len(removed) == 8 + 100 // STEP
    assert longest(index, PROMPT) == head(PROMPT, 2 * BLOCK)


def test_what_two_contents_share_stays_until_both_are_gone() -> None:
    fleet = with_slot(PROMPT)
    kept = snapshot("s", head(PROMPT, 5 * BLOCK), ns=NS)
    fleet.catalog.add(kept, MemoryKind.FULL, 1.0)
    index = drained(held_by(fleet))

    fleet.slots.of(BackendId("a"))[0].hold(Resident())
    drained(index)
    assert longest(index, PROMPT) == head(PROMPT, 5 * BLOCK)

    fleet.catalog.remove(kept.id)
    drained(index)
    assert len(index) == 0
    assert longest(index, PROMPT) == b""


def test_a_snapshot_that_comes_later_is_followed() -> None:
    fleet = with_slot(pack([]))
    index = drained(held_by(fleet))
    fleet.catalog.add(snapshot("s", PROMPT, ns=NS), MemoryKind.FULL, 1.0)

    assert longest(drained(index), PROMPT) == PROMPT


def test_a_backend_that_is_gone_holds_nothing() -> None:
    fleet = with_slot(PROMPT)
    index = drained(held_by(fleet))
    del fleet.infos[BackendId("a")]

    assert longest(drained(index), PROMPT) == b""
