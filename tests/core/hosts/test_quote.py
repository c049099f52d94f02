"""Quotes: what serving a request would take, free or busy, loaded or not."""

import pytest
from msgspec.structs import replace

from router.base.tokens import pack
from router.base.types import NO_TENANT, BackendId, MemoryKind, SlotId, Source
from router.core.hosts.quote import is_surely_cheap, quote
from router.core.model.request_queue import Queue
from router.core.model.servers import ServerSpec
from router.core.model.slots import NO_WORK, Work
from router.core.planning.planner import plan
from tests.support.scheduler.build import backend, inventory, leased, request, scheduler
from tests.support.scheduler.drive import NOW, arrive, finish, names, tick

SLOT = SlotId(BackendId("a"), 0)
PROMPT = pack(range(1000))


def test_a_free_slot_is_quoted_as_the_planner_prices_it() -> None:
    made = inventory(holding={SLOT: PROMPT})
    asked = request(ids=pack(range(1100)))
    planned = plan(asked, made, 0.0)
    assert planned is not None
    found = quote(asked, made, Queue(), 0.0)

    assert found is not None
    assert found.price_s == planned.chosen.price.total_s
    assert (found.reused_tokens, found.source) == (1000, Source.RESIDENT)


def test_busy_backend_quotes_its_wait_and_future_content() -> None:
    made = inventory(backend("a", n_slots=1))
    (slot,) = made.slots.of(BackendId("a"))
    leased(slot, request("other").id, Work(pending=PROMPT, busy_until=7.0))
    found = quote(request(ids=pack(range(1100))), made, Queue(), 2.0)

    assert found is not None
    assert found.wait_s == 5.0
    assert found.reused_tokens == 1000
    assert found.price_s == 5.0 + made.backends[BackendId("a")].rates.prefill_s(100, 1000)


def test_an_idle_slot_is_quoted_with_its_checkpoints() -> None:
    """A hybrid's slot goes back to one; the prompt diverges after 800 of its 1,000 tokens."""
    made = inventory(backend("a", n_slots=2, memory_kind=MemoryKind.HYBRID), holding={SLOT: PROMPT})
    slot, queue = made.slots[SLOT], Queue()
    slot.hold(replace(slot.content, resident=replace(slot.content.resident, checkpoints=(500,))))
    queue.add(request("before"), 0.0)
    found = quote(request(ids=pack([*range(800), *range(5000, 5300)])), made, queue, 0.0)

    assert found is not None
    assert found.reused_tokens == 500


def test_each_queued_request_takes_a_slot_first() -> None:
    made = inventory(backend("a", n_slots=2))
    assert made.backends[BackendId("a")].rates.generation_s(None) < 10.0
    for slot, until in zip(made.slots.of(BackendId("a")), (6.0, 8.0), strict=True):
        leased(slot, request(str(until)).id, NO_WORK)
        slot.do(Work(pending=pack([1]), busy_until=until))
    queue, waits = Queue(), []
    for n in range(3):
        found = quote(request(), made, queue, 0.0)
        assert found is not None
        waits.append(found.wait_s)
        queue.add(request(f"q{n}"), 0.0)

    assert waits == [6.0, 8.0, 6.0 + 7.0]


def test_quote_during_an_idle_save_waits_for_that() -> None:
    s = scheduler(backend("a", n_slots=1), coalesce_above_s=None)
    arrive(s, ids=PROMPT)
    finish(s)
    assert names(tick(s, 5.0)) == ["Save"]
    found = quote(request(), s.state.inventory, s.state.queue, NOW + 5.0)

    assert found is not None
    rates = s.state.inventory.backends[BackendId("a")].rates
    assert 0 < found.wait_s <= max(rates.save_s(1000), rates.generation_s(None) / 2)


def test_slots_of_one_request_are_busy_as_long_as_it() -> None:
    s = scheduler(backend("a", n_slots=3), coalesce_above_s=None)
    arrive(s, whole_backend=True, max_new_tokens=500)

    assert len({slot.work.busy_until for slot in s.state.inventory.slots}) == 1
    assert all(slot.work.busy_until > NOW for slot in s.state.inventory.slots)


def test_an_answer_that_is_late_is_not_taken_to_be_over() -> None:
    made = inventory(backend("a", n_slots=1))
    (slot,) = made.slots.of(BackendId("a"))
    leased(slot, "other", Work(pending=pack([1]), busy_until=1.0))
    at_least_s = made.backends[BackendId("a")].rates.generation_s(None) / 2
    waits = {}
    for now in (1.0, 1.0 + at_least_s + 1.0, 5.0 + at_least_s, 1000.0):
        found = quote(request(), made, Queue(), now)
        assert found is not None
        waits[now - 1.0] = found.wait_s

    assert waits == {
        0.0: at_least_s,
        at_least_s + 1.0: pytest.approx(at_least_s + 1.0),  # as long again as it is late
        at_least_s + 4.0: pytest.approx(at_least_s + 4.0),
        999.0: 10.0,
    }


def test_an_end_that_nobody_knows_is_not_waited_for_without_end() -> None:
    made = inventory(backend("a", n_slots=1))
    (slot,) = made.slots.of(BackendId("a"))
    leased(slot, request("other").id, NO_WORK)
    slot.do(replace(slot.work, busy_until=float("inf")))
    found = quote(request(), made, Queue(), 0.0)

    assert found is not None
    assert found.wait_s == 10.0


def test_a_model_that_is_not_loaded_costs_its_load() -> None:
    made = inventory(backend("a"))
    made.servers.configure([ServerSpec(name=BackendId("s"), models=("big",))], [], now=0.0)
    found = quote(request(model="big"), made, Queue(), 0.0)

    assert found is not None
    assert found.price_s == found.wait_s == 10.0


def test_what_nothing_here_can_serve_has_no_quote() -> None:
    assert quote(request(model="other"), inventory(), Queue(), 0.0) is None


def test_a_short_prompt_is_surely_cheap_where_a_slot_is_free() -> None:
    made = inventory(backend("a", n_slots=1))
    assert is_surely_cheap(request(ids=range(10)), made, Queue(), 0.0, 1.0)
    assert not is_surely_cheap(request(ids=range(200)), made, Queue(), 0.0, 1.0)
    (slot,) = made.slots.of(BackendId("a"))
    leased(slot, request("other").id, NO_WORK)
    assert not is_surely_cheap(request(ids=range(10)), made, Queue(), 0.0, 1.0)


def test_asking_changes_nothing() -> None:
    made = inventory(holding={SLOT: PROMPT})
    before = [(slot.phase, slot.content.resident, slot.generation) for slot in made.slots]
    quote(request(ids=PROMPT, tenant=NO_TENANT), made, Queue(), 0.0)

    assert [(slot.phase, slot.content.resident, slot.generation) for slot in made.slots] == before
