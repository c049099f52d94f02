"""Attach: what exists already when the router or a backend starts."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.types import BackendId, MemoryKind, RequestId, SlotId, SlotStatus, Snapshot
from router.core.admission.backend_attach import probe_name
from router.core.execution.state import State
from router.core.model.effects import Delete, WatchSlot
from router.core.model.rates import LinearFit, Rates
from router.core.model.slots import UNKNOWN, Content, Phase, Resident
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    A2,
    B0,
    NS,
    OTHER_NS,
    A,
    B,
    backend,
    run_of,
    scheduler,
    snapshot,
    tokens,
)
from tests.support.scheduler.drive import NOW, arrive, astray, finish, names, prefilled, slot
from tests.support.scheduler.driven import Driven

STRANGER = RequestId("stranger-b/0-0")


def status(index: int = 0, busy: bool = False, n: int | None = 5) -> SlotStatus:
    return SlotStatus(index, busy, n, 1000)


def test_what_a_slot_holds_is_known_in_number_only() -> None:
    s = scheduler()
    s.handle(fact.backend_up(backend("b", 3), (status(0), status(1, n=None))), NOW)

    assert [x.content.resident for x in s.state.inventory.slots.of(B)] == [
        Resident(unread=5),
        Resident(may_hold_more=True),
        Resident(),
    ]


def test_slot_of_an_unknown_client_is_left_until_quiet() -> None:
    s = scheduler(backend("a", 1))
    up = fact.backend_up(backend("b", 1), (status(busy=True),))

    assert s.handle(up, NOW) == [WatchSlot(STRANGER, B0)]
    assert slot(s, B0).phase is Phase.ABANDONED
    arrive(s)
    assert arrive(s, "r2") == []
    # The stranger's content is saved before it is displaced; the save reads its tokens.
    assert names(s.handle(fact.quiet(STRANGER, 7), NOW)) == ["Save"]


@pytest.mark.parametrize("busy", [False, True])
def test_what_an_adapter_of_its_own_has_computed_is_wiped(busy: bool) -> None:
    """Otherwise its KV would be taken for KV of the model without the adapter."""
    s = scheduler(idle_save_after_s=None)
    found = SlotStatus(0, busy, 5, 1000, adapted=True)

    assert s.handle(fact.backend_up(backend("b", 1), (found,)), NOW) == [
        WatchSlot(STRANGER, B0, wipe=True)
    ]
    assert s.handle(fact.quiet(STRANGER, None), NOW) == []
    assert slot(s, B0).content.resident == UNKNOWN


def test_of_a_stranger_only_the_length_is_known() -> None:
    s = scheduler(idle_save_after_s=None)
    s.handle(fact.backend_up(backend("b", 1), (status(busy=True),)), NOW)
    s.handle(fact.quiet(STRANGER, 7), NOW)

    assert slot(s, B0).content.resident == Resident(unread=7)


def test_priors_come_from_the_probe_and_outlive_a_restart() -> None:
    s = scheduler()
    info = backend("b", 1, prefill_s_per_token=0.5, bytes_per_token=7.0)
    s.handle(fact.backend_up(info), NOW)
    rates = s.state.inventory.backends[B].rates
    assert rates.bytes_per_token.value == 7.0
    assert rates.prefill_s(10) > 5.0

    s.handle(fact.backend_up(backend("b", 2)), NOW)
    assert s.state.inventory.backends[B].rates is rates
    assert len(s.state.inventory.slots.of(B)) == 2


def test_a_backend_that_tells_nothing_gets_priors_all_the_same() -> None:
    s = scheduler()
    s.handle(fact.backend_up(backend("b", 1)), NOW)

    assert s.state.inventory.backends[B].rates.prefill_s(10) > 0


# -- a backend that is probed later ----------------------------------------------------------------

TRIED = backend("a", 3, memory_kind=MemoryKind.FULL, bytes_per_token=7.0)
UNTRIED = backend("a", 3, kv_dir=None, memory_kind=MemoryKind.UNKNOWN)


def lent(s: Driven, backend_id: BackendId = A) -> list[SlotId]:
    """Return the slots that are lent to the backend's probe."""
    name = probe_name(backend_id)
    return [slot.id for slot in s.state.inventory.slots.of(backend_id) if slot.holder == name]


def test_two_emptiest_slots_are_lent_and_return_unknown() -> None:
    s = scheduler(UNTRIED)
    slot(s, A0).hold(Content(Resident(unread=50)))
    assert s.handle(fact.probe_due(A), NOW) == []
    assert lent(s) == [A1, A2]
    slot(s, A0).hold(replace(slot(s, A0).content, save_decided=True))

    effects = s.handle(fact.probed(TRIED), NOW)
    assert lent(s) == []
    assert s.state.inventory.backends[A].info == TRIED
    assert s.state.inventory.backends[A].rates.bytes_per_token.value == 7.0
    assert [slot(s, x).content.resident for x in (A1, A2)] == [UNKNOWN, UNKNOWN]
    assert slot(s, A0).content.resident == Resident(unread=50)
    # Content that could not be saved so far is saved now.
    assert names(effects) == ["Save"]
    assert not [job for job in s.state.inventory.jobs if job == probe_name(A)]


def test_put_off_probe_gives_its_slots_to_the_request() -> None:
    s = scheduler(UNTRIED)
    for name in ("r", "r2"):
        arrive(s, name)
    s.handle(fact.probe_due(A), NOW)
    assert arrive(s, "r3") == []

    assert "Dispatch" in names(s.handle(fact.probe_put_off(A), NOW))
    assert lent(s) == []
    assert s.state.inventory.backends[A].info == UNTRIED
    s.handle(fact.probe_put_off(A), NOW)  # of a backend that went down meanwhile: nothing to do


def test_slots_in_use_are_not_lent_and_go_on() -> None:
    s = scheduler(UNTRIED)
    for name in ("r", "r2", "r3"):
        arrive(s, name)
    s.handle(fact.probe_due(A), NOW)
    assert lent(s) == []
    assert list(s.state.inventory.jobs) == ["r", "r2", "r3"]

    finish(s, "r3")
    s.handle(fact.probe_due(A), NOW)
    assert len(lent(s)) == 1
    waits = arrive(s, "r4")
    assert waits == []
    assert names(s.handle(fact.probed(TRIED), NOW)) == ["Dispatch"]
    assert {job.id for job in s.state.inventory.jobs.values()} == {"r", "r2", "r4"}


def test_a_request_that_the_server_places_and_a_probe_keep_apart() -> None:
    """Otherwise the server might place the request on the lent slot."""
    s = scheduler(UNTRIED)
    s.handle(fact.probe_due(A), NOW)
    arrive(s, "r", pinnable=False)
    assert s.state.inventory.gated == set()
    prefilled(s)
    assert names(s.handle(fact.probed(TRIED), NOW)) == ["Dispatch"]
    assert s.state.inventory.gated == {A}
    s.handle(fact.probe_due(A), NOW)
    assert lent(s) == []


def test_nothing_is_lent_twice_nor_by_a_router_that_stops() -> None:
    s = scheduler(UNTRIED)
    s.handle(fact.probe_due(A), NOW)
    s.handle(fact.probe_due(A), NOW)
    assert lent(s) == [A0, A1]
    s.handle(fact.probed(UNTRIED), NOW)
    s.handle(fact.stopping(save=False), NOW)
    s.handle(fact.probe_due(A), NOW)
    assert lent(s) == []


def test_lost_backend_ends_the_loan_of_its_probe() -> None:
    s = scheduler(UNTRIED)
    s.handle(fact.probe_due(A), NOW)
    s.handle(fact.backend_down(A), NOW)
    assert s.state.inventory.jobs == {}
    s.handle(fact.probed(TRIED), NOW)
    assert A not in s.state.inventory.up
    s.handle(fact.probe_due(A), NOW)
    assert s.state.inventory.jobs == {}


def test_files_on_disk_are_all_offered() -> None:
    s = scheduler()
    found = (snapshot("s1", tokens(1)), snapshot("s2", tokens(1, 1)), snapshot("s3", tokens(1)))

    assert s.handle(fact.snapshots_found(found), NOW) == [Delete(found[2])]
    assert [one for one, _, _ in s.state.inventory.catalog.snapshots()] == list(found[:2])


def test_without_a_backend_a_snapshot_is_kept() -> None:
    s = scheduler()
    s.handle(fact.backend_down(A), NOW)
    s.handle(fact.snapshots_found((snapshot("s", run_of(100)),)), NOW)

    assert len(s.state.inventory.catalog) == 1
    assert {slot(s, x).phase for x in (A0, A1)} == {Phase.LOST}


GPU: dict[str, Any] = {"prefill_s_per_token": 1e-4}


def recovered(*found: Snapshot) -> Driven:
    """Return a scheduler with `found` on disk, and no backend yet."""
    s = Driven(State())
    s.handle(fact.snapshots_found(found), NOW)
    assert s.next_wakeup(NOW) is None
    return s


def up(s: Driven, name: str, s_per_token: float, **more: Any) -> None:
    """Attach a backend, and tick the scheduler as often as it wants."""
    s.handle(fact.backend_up(backend(name, 1, prefill_s_per_token=s_per_token, **more)), NOW)
    tick(s)


def tick(s: Driven) -> None:
    for _ in range(5):
        if s.next_wakeup(NOW) == NOW:
            s.handle(fact.tick(), NOW)


def values(s: Driven) -> dict[str, float]:
    """Return the value of each snapshot in seconds."""
    return {name: entry.value_s for name, entry in s.state.inventory.catalog._entries.items()}


def seconds(n: int, s_per_token: float = 1e-4) -> float:
    return Rates(prefill=LinearFit(s_per_token, Rates().prefill.b)).prefill_s(n)


def test_files_on_disk_are_valued_anew_for_a_known_backend() -> None:
    """Regression: by a laptop's rates, old snapshots had 20 times the value of new ones.

    In a full store, all new ones were evicted.
    """
    old = snapshot("old", run_of(800))
    s = recovered(old)
    assert values(s)["old"] == Rates().prefill_s(800)
    up(s, "a", 1e-4)

    assert values(s)["old"] == seconds(800)
    assert s.next_wakeup(NOW) is None


def test_a_tenants_too_and_by_the_slowest_that_it_fits() -> None:
    s = recovered(snapshot("old", run_of(800), ns=f"{NS}@t"))
    for name, s_per_token in (("a", 1e-4), ("b", 2e-4)):
        s.handle(fact.backend_up(backend(name, 1, prefill_s_per_token=s_per_token)), NOW)
    tick(s)

    assert values(s)["old"] == seconds(800, 2e-4)


def test_where_all_were_busy_it_is_valued_when_one_was_tried_out() -> None:
    s = recovered(snapshot("old", run_of(800)))
    s.handle(fact.backend_up(UNTRIED), NOW)
    tick(s)
    assert values(s)["old"] == Rates().prefill_s(800)
    s.handle(fact.probe_due(A), NOW)
    s.handle(fact.probed(replace(TRIED, **GPU)), NOW)
    tick(s)

    assert values(s)["old"] == seconds(800)


def test_what_was_learned_from_traffic_is_not_given_for_a_probe() -> None:
    s = scheduler(UNTRIED)
    s.state.inventory.backends[A].rates.observe_prefill(1000, 0, 3.0)
    learned = s.state.inventory.backends[A].rates.prefill_s(1000)
    s.handle(fact.probe_due(A), NOW)
    s.handle(fact.probed(replace(TRIED, **GPU)), NOW)

    assert s.state.inventory.backends[A].rates.prefill_s(1000) == learned


def test_snapshot_without_a_backend_is_valued_by_the_fastest() -> None:
    """Regression: after a model change, unused snapshots displaced those in use."""
    s = recovered(snapshot("old", run_of(800), ns=OTHER_NS))
    up(s, "a", 2e-4)
    assert values(s)["old"] == seconds(800, 2e-4)
    s.handle(fact.snapshots_found((snapshot("s", run_of(900), ns=OTHER_NS),)), NOW)
    up(s, "b", 1e-4)
    assert values(s)["old"] == seconds(800, 2e-4)  # valued only once by other backends
    s.handle(fact.snapshots_found((snapshot("s2", run_of(700, 2), ns=OTHER_NS),)), NOW)
    assert values(s)["s2"] == seconds(700)
    up(s, "c", 5e-4, namespace=OTHER_NS)

    assert [values(s)[name] for name in ("old", "s2")] == [seconds(800, 5e-4), seconds(700, 5e-4)]


def test_what_is_found_later_is_valued_at_once() -> None:
    s = scheduler(backend("a", 1))
    s.handle(fact.snapshots_found((snapshot("s", run_of(100)),)), NOW)

    assert values(s) == {"s": s.state.inventory.backends[A].rates.prefill_s(100)}
    s.handle(fact.backend_up(backend("b", 1, **GPU)), NOW)
    assert s.next_wakeup(NOW) is None


# -- a stranger that comes later -------------------------------------------------------------------


def test_an_idle_slot_found_busy_is_left_alone() -> None:
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    slot(s, A0).hold(Content(Resident(run_of(900))))

    assert s.handle(fact.found_busy({A0: 0}), NOW) == [WatchSlot(RequestId("stranger-a/0-0"), A0)]
    assert (slot(s, A0).phase, slot(s, A1).phase) == (Phase.ABANDONED, Phase.IDLE)
    s.handle(fact.quiet(RequestId("stranger-a/0-0"), 7), NOW)
    assert (slot(s, A0).phase, slot(s, A0).content.resident) == (Phase.IDLE, Resident(unread=7))


def test_what_was_leased_meanwhile_is_no_stranger() -> None:
    """Poll that began before the lease, and was answered while the router's request ran."""
    s = scheduler(backend("a", 1), idle_save_after_s=None)
    arrive(s, ids=[1])
    finish(s)
    generation = slot(s, A0).generation

    assert s.handle(fact.found_busy({A0: generation - 1}), NOW) == []
    arrive(s, "r2", ids=[1])
    assert s.handle(fact.found_busy({A0: generation}), NOW) == []
    assert slot(s, A0).holder == "r2"


def test_a_slot_that_is_no_more_is_nobodys() -> None:
    s = scheduler(backend("a", 1))
    assert s.handle(fact.found_busy({A2: 0}), NOW) == []


def test_while_the_server_places_a_request_it_may_be_that_one() -> None:
    s = astray()
    assert s.handle(fact.found_busy({A1: 0}), NOW) == []
    assert slot(s, A1).phase is Phase.IDLE
