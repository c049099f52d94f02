"""The index of what a host holds, by prefix hash."""

import operator
import random
import tracemalloc

from router.base.prefix_hash import BLOCK, STEP
from router.base.tokens import Tokens, count, head, join, pack
from router.base.types import NO_TENANT, BackendId, MemoryKind, Namespace, Snapshot, Tenant
from router.core.inventory.inventory import Inventory
from router.core.model.slots import Content, Resident
from router.engine.held_prefixes import HeldPrefixes
from tests.support.scheduler.build import NS, backend, rates, snapshot

PROMPT = pack(range(10 * BLOCK + 100))
NAMESPACE = Namespace(NS)


def held_by(inventory: Inventory) -> HeldPrefixes:
    return HeldPrefixes(inventory, b"secret", lambda namespace: namespace, operator.eq)


def made_anew(inventory: Inventory) -> HeldPrefixes:
    """Return another index of the same inventory, which the inventory does not tell of changes."""
    watch = inventory.catalog.watch
    index = held_by(inventory)
    inventory.catalog.watch = watch
    return drained(index)


def with_slot(tokens: Tokens) -> Inventory:
    inventory = Inventory()
    inventory.take(backend("a", 2), rates())
    inventory.slots.of(BackendId("a"))[0].hold(Content(Resident(tokens)))
    return inventory


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
    other = join([head(PROMPT, 3 * BLOCK + 2 * STEP + 5), pack([-1] * BLOCK)])

    assert longest(index, other) == head(PROMPT, 3 * BLOCK + 2 * STEP)


def test_nothing_of_another_tenant_or_model_is_found() -> None:
    index = drained(held_by(with_slot(PROMPT)))

    assert longest(index, PROMPT, Tenant("alice")) == b""
    assert index.longest(index.hashes(Namespace("other"), NO_TENANT, PROMPT)) == b""


def test_a_slot_with_other_content_is_followed() -> None:
    inventory = with_slot(PROMPT)
    index = drained(held_by(inventory))
    assert len(index) == 10 + 100 // STEP

    inventory.slots.of(BackendId("a"))[0].hold(Content(Resident(head(PROMPT, 2 * BLOCK))))
    drained(index)

    assert len(index) == 2
    assert longest(index, PROMPT) == head(PROMPT, 2 * BLOCK)


def test_what_two_contents_share_stays_until_both_are_gone() -> None:
    inventory = with_slot(PROMPT)
    kept = snapshot("s", head(PROMPT, 5 * BLOCK), ns=NS)
    inventory.catalog.add(kept, MemoryKind.FULL, 1.0)
    index = drained(held_by(inventory))

    inventory.slots.of(BackendId("a"))[0].hold(Content(Resident()))
    drained(index)
    assert longest(index, PROMPT) == head(PROMPT, 5 * BLOCK)

    inventory.catalog.remove(kept.id)
    drained(index)
    assert len(index) == 0
    assert longest(index, PROMPT) == b""


def test_a_snapshot_that_comes_later_is_followed() -> None:
    inventory = with_slot(pack([]))
    index = drained(held_by(inventory))
    inventory.catalog.add(snapshot("s", PROMPT, ns=NS), MemoryKind.FULL, 1.0)

    assert longest(drained(index), PROMPT) == PROMPT


def test_a_backend_that_is_gone_holds_nothing() -> None:
    inventory = with_slot(PROMPT)
    index = drained(held_by(inventory))
    inventory.lose(BackendId("a"))

    assert longest(drained(index), PROMPT) == b""


def test_a_long_conversation_is_kept_in_memory_once() -> None:
    """Each turn is a new object of all tokens: 50 of them would be 10 MB."""
    turns = [pack(range(n)) for n in range(2_000, 102_000, 2_000)]
    inventory = with_slot(pack([]))
    inventory.catalog.add(snapshot("s", turns[10], ns=NS), MemoryKind.FULL, 1.0)
    index = drained(held_by(inventory))
    tracemalloc.start()
    while turns:
        inventory.slots.of(BackendId("a"))[0].hold(
            Content(Resident(pack(list(range(len(turns.pop(0)) // 4)))))
        )
        drained(index)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert kept < 2_000_000
    assert count(longest(index, pack(range(100_000)))) == 100_000


def test_a_content_that_goes_on_does_not_end_where_it_did() -> None:
    """Of what ends before the next hash, all is returned; of what goes on, whole hashes."""
    inventory = with_slot(head(PROMPT, 2 * BLOCK + 10))
    index = drained(held_by(inventory))
    other = join([head(PROMPT, 2 * BLOCK + 10), pack([-1] * BLOCK)])
    assert longest(index, other) == head(PROMPT, 2 * BLOCK + 10)

    inventory.slots.of(BackendId("a"))[0].hold(Content(Resident(PROMPT)))
    drained(index)
    assert longest(index, other) == head(PROMPT, 2 * BLOCK)


def test_the_index_agrees_with_one_made_anew() -> None:
    """Slots and snapshots come, go on and go, in random order."""
    chance, inventory = random.Random(5), with_slot(pack([]))
    index, kept = held_by(inventory), list[Snapshot]()
    for number in range(200):
        tokens = head(PROMPT, chance.randrange(0, 2700, 16))
        if chance.random() < 0.5:
            tokens = join([tokens, pack([-number] * chance.randrange(300))])
        if kept and chance.random() < 0.3:
            inventory.catalog.remove(kept.pop(chance.randrange(len(kept))).id)
        elif chance.random() < 0.5:
            kept.append(snapshot(f"s{number}", tokens, ns=NS))
            inventory.catalog.add(kept[-1], MemoryKind.FULL, 1.0)
        else:
            chance.choice(inventory.slots.of(BackendId("a"))).hold(Content(Resident(tokens)))
        drained(index)
        anew = made_anew(inventory)
        assert set(index._entries) == set(anew._entries)
        found, expected = longest(index, PROMPT), longest(anew, PROMPT)
        assert abs(count(found) - count(expected)) < STEP
        assert PROMPT.startswith(head(found, count(found) // STEP * STEP))


def test_another_content_that_ends_there_takes_over() -> None:
    """A slot and its snapshot end alike; the snapshot goes, and the slot has not changed."""
    tokens = head(PROMPT, 2 * BLOCK + 10)
    inventory = with_slot(tokens)
    kept = snapshot("s", tokens, ns=NS)
    inventory.catalog.add(kept, MemoryKind.FULL, 1.0)
    index = drained(held_by(inventory))
    inventory.catalog.remove(kept.id)

    assert longest(drained(index), PROMPT) == tokens


def test_the_asker_knows_which_state_its_prompt_begins_with() -> None:
    """Both end before the next hash: a state that cannot go back is of use only if it fits."""
    system = head(PROMPT, 4 * BLOCK)
    other, own = (join([system, pack([token] * 20)]) for token in (-5, -6))
    inventory = Inventory()
    inventory.take(backend("a", memory_kind=MemoryKind.HYBRID), rates())
    for name, tokens in (("system", system), ("other", other)):
        inventory.catalog.add(snapshot(name, tokens, ns=NS), MemoryKind.HYBRID, 1.0)
    index = drained(held_by(inventory))
    asked = join([own, pack([7] * 9)])
    found = index.handouts(longest(index, asked), NAMESPACE, NO_TENANT, count(asked), 0.0)

    assert [one.content for one in found] == ["other", "system"]
    of_use = [index.is_of_use(one.offered, NAMESPACE, NO_TENANT, asked) for one in found]
    assert of_use == [False, True]
