"""What another host would get, and what a request takes once that is here."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from router.base.tokens import Tokens, join
from router.base.types import (
    NO_TENANT,
    BackendId,
    MemoryKind,
    RequestId,
    SlotId,
    SnapshotId,
    Tenant,
)
from router.core.hosts.handout import handouts, once_fetched
from router.core.hosts.quote import quote
from router.core.model.effects import Dispatch, Prefill, Save, SaveReason
from router.core.model.plan import Handout, Offered, Quote
from router.core.model.request_queue import Queue
from router.core.model.slots import Content, Resident
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    NS,
    OTHER_NS,
    backend,
    busy,
    inventory,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import NOW, arrive, cancel, finish, names, prefilled, slot
from tests.support.scheduler.driven import Driven

LONG = run_of(1000)
SAVE = RequestId("save-1")
N = 1200
LINK: Callable[[int], float] = lambda size_bytes: size_bytes / 1e6  # noqa: E731


def offers(
    s: Driven, tokens: Tokens = LONG, tenant: Tenant = NO_TENANT, now: float = NOW, **options: Any
) -> Handout | None:
    found = handouts(s.state.inventory, [NS], tenant, tokens, N, now, **options)
    return found[0] if found else None


def keep(
    s: Driven, name: str, tokens: Tokens, kind: MemoryKind = MemoryKind.FULL, ns: str = NS
) -> None:
    s.handle(fact.snapshots_found((snapshot(name, tokens, ns=ns),), kind), NOW)


def test_a_snapshot_is_offered() -> None:
    s = scheduler(backend("a", 1))
    keep(s, "s", LONG)
    found = offers(s)
    assert found is not None
    assert (found.content, found.cut) == (SnapshotId("s"), None)
    assert (found.offered.reused, found.offered.n_tokens) == (1000, 1000)


@pytest.mark.parametrize("cuts", [True, False])
def test_the_beginning_of_a_longer_snapshot_is_cut_out(cuts: bool) -> None:
    s = scheduler(backend("a", 1, cuts=cuts))
    keep(s, "s", join([LONG, run_of(3000, 5)]))
    found = offers(s)
    assert found is not None
    assert found.offered.reused == 1000
    assert (found.cut, found.offered.n_tokens) == ((1000, 1000) if cuts else (None, 4000))


def test_a_model_that_is_not_up_offers_what_was_saved() -> None:
    """A drained host: the memory kind is that of the save."""
    s = scheduler(backend("a", 1))
    keep(s, "s", LONG, MemoryKind.HYBRID)
    keep(s, "longer", join([LONG, run_of(50, 5)]), MemoryKind.HYBRID)
    s.handle(fact.backend_down(BackendId("a")), NOW)
    found = offers(s)
    assert found is not None
    assert found.content == SnapshotId("s"), "a longer hybrid state cannot go back"


def test_nothing_of_another_model_or_tenant_is_offered() -> None:
    s = scheduler(backend("a", 1), holding={A0: LONG})
    keep(s, "s", LONG, ns=OTHER_NS)
    keep(s, "t", LONG, ns=f"{NS}@alice")
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=Tenant("bob")))
    assert offers(s) is None
    found = offers(s, tenant=Tenant("alice"))
    assert found is not None
    assert found.content == SnapshotId("t")


def test_what_an_idle_slot_holds_is_saved_when_asked_for() -> None:
    s = scheduler(backend("a", 1), holding={A0: LONG})
    found = offers(s)
    assert found is not None
    assert found.content == A0
    assert offers(s, saved=True) is None
    assert s.handle(fact.save_asked(A0), NOW) == [Save(SAVE, A0, NS, SaveReason.HOST)]
    assert s.handle(fact.save_asked(A0), NOW) == [], "it is being saved"
    during = offers(s)
    assert during is not None
    assert during.content == A0
    s.handle(fact.saved(SAVE, A0, snapshot("s", LONG), 0.001), NOW)
    after = offers(s)
    assert after is not None
    assert after.content == SnapshotId("s")


def test_nothing_is_offered_that_must_not_be_saved() -> None:
    s = scheduler(backend("a", 1), holding={A0: LONG})
    slot(s, A0).hold(Content(Resident(LONG), savable=False))
    assert offers(s) is None
    assert s.handle(fact.save_asked(A0), NOW) == []
    assert s.handle(fact.save_asked(SlotId(A0.backend, 5)), NOW) == []


def test_no_idle_slot_is_saved_beside_a_request_at_the_gate() -> None:
    """The server may have put the request there, and its answer would be another client's."""
    s = scheduler(backend("a", 2), holding={A1: LONG}, idle_save_after_s=None)
    arrive(s, ids=[1], pinnable=False)
    assert s.state.inventory.gated
    assert offers(s) is None
    assert s.handle(fact.save_asked(A1), NOW) == []


def test_a_host_that_no_longer_waits_costs_no_save() -> None:
    s = scheduler(backend("a", 1))
    arrive(s, ids=LONG)
    s.handle(fact.save_asked(A0), NOW)
    s.handle(fact.save_unasked(A0), NOW)
    assert names(prefilled(s)) == ["Dispatch"]


def test_nothing_is_computed_for_hosts_that_no_longer_wait() -> None:
    s = scheduler(backend("a", 1))
    arrive(s, ids=LONG)
    s.handle(fact.save_asked(A0), NOW)
    assert names(cancel(s)) == [], "another host waits for it"
    assert names(s.handle(fact.save_unasked(A0), NOW)) == ["StopWork"]


def test_a_state_that_must_fit_whole_is_told_with_its_tokens() -> None:
    s = scheduler(backend("a", 1, memory_kind=MemoryKind.HYBRID))
    keep(s, "s", LONG, MemoryKind.HYBRID)
    found = offers(s)
    assert found is not None
    assert found.whole == LONG


def test_what_is_being_computed_is_saved_before_its_answer() -> None:
    s = scheduler(backend("a", 1))
    (effect,) = arrive(s, ids=LONG)
    assert isinstance(effect, Prefill)
    found = offers(s)
    assert found is not None
    assert found.content == A0
    assert found.offered.computing
    assert found.offered.ready_s > 9, "it takes ten seconds to compute"
    assert s.handle(fact.save_asked(A0), NOW) == []
    (save,) = prefilled(s)
    assert isinstance(save, Save)
    assert save.reason is SaveReason.SHARED
    after = s.handle(fact.saved(save.request, A0, snapshot("s", LONG), 0.001), NOW)
    assert names(after) == ["Dispatch"]
    finish(s)


def test_what_no_host_asked_for_is_not_saved_before_its_answer() -> None:
    s = scheduler(backend("a", 1))
    arrive(s, ids=LONG)
    (effect,) = prefilled(s)
    assert isinstance(effect, Dispatch)


def test_what_is_computed_too_slowly_is_not_offered() -> None:
    s = scheduler(backend("a", 1))
    arrive(s, ids=LONG)
    assert offers(s, now=NOW + 1000) is None


# -- the price of a request after a fetch ---------------------------------------------------------

ASKED = request(ids=join([LONG, run_of(200, 9)]))
OFFERED = Offered(1000, 1000, 1_000_000)  # a second on `LINK`


def priced(offered: Offered = OFFERED, own: Quote | None = None, **more: Any) -> Quote | None:
    made = inventory(**more)
    found = own or quote(ASKED, made, Queue(), 0.0)
    assert found is not None
    return once_fetched(ASKED, made, found, offered, LINK)


def test_a_fetch_is_priced_with_its_link_and_restore() -> None:
    found = priced()
    assert found is not None
    assert found.price_s == pytest.approx(1.0 + 0.001 + 2.0), "200 tokens are still to compute"
    assert (found.reused_tokens, found.fetched) == (1000, True)


def test_the_wait_for_a_slot_goes_on_during_a_fetch() -> None:
    found = priced(own=Quote(17.0, wait_s=5.0))
    assert found is not None
    assert found.price_s == pytest.approx(5.0 + 0.001 + 2.0)


def test_other_fetches_share_the_link() -> None:
    found = priced(replace(OFFERED, sharers=2))
    assert found is not None
    assert found.price_s == pytest.approx(3.0 + 0.001 + 2.0)


def test_streams_on_a_backend_stop_for_the_restore_and_the_rest() -> None:
    made = inventory()
    busy(made, A1)
    found = once_fetched(ASKED, made, Quote(24.0), OFFERED, LINK)
    assert found is not None
    assert found.price_s == pytest.approx(1.0 + 2 * (0.001 + 2.0))


def test_only_missing_bytes_are_priced() -> None:
    found = priced(snapshots=[snapshot("s", run_of(750))], own=Quote(12.0, reused_tokens=750))
    assert found is not None
    assert found.price_s == pytest.approx(0.25 + 0.001 + 2.0)


@pytest.mark.parametrize(
    ("offered", "own"),
    [
        (replace(OFFERED, size_bytes=12_000_000), None),  # as long as to compute it
        (OFFERED, Quote(2.1, reused_tokens=1000)),  # here already
        (OFFERED, Quote(3.5)),  # saves less than a fifth
        (replace(OFFERED, size_bytes=100), Quote(2.016)),  # saves less than 20 ms
        (replace(OFFERED, n_tokens=20_000), None),  # fits in no slot
        (replace(OFFERED, reused=100), None),  # not worth a file
    ],
)
def test_a_fetch_that_does_not_pay(offered: Offered, own: Quote | None) -> None:
    made = scheduler().state.inventory
    limits = replace(made.catalog.limits, min_tokens=128)
    made.catalog.limits = limits
    found = own or quote(ASKED, made, Queue(), 0.0)
    assert found is not None
    assert once_fetched(ASKED, made, found, offered, LINK) is None


def test_nothing_is_fetched_for_servers_without_files() -> None:
    made = inventory(backend("a", kv_dir=None))
    assert once_fetched(ASKED, made, Quote(12.0), OFFERED, LINK) is None


def test_to_compute_what_another_host_computes_is_a_loss() -> None:
    late = replace(OFFERED, ready_s=10.0)  # 13 s, and 12 without
    assert priced(late) is None
    found = priced(replace(late, computing=True))
    assert found is not None
    assert found.price_s == pytest.approx(13.001)
