"""Planner: each rule of the decision, on the smallest possible inventory."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.tokens import join
from router.base.types import MemoryKind, Prompt, Request, RequestId, Source
from router.core.inventory.inventory import Inventory
from router.core.model.policy import PolicyName, SnapshotLimits
from router.core.model.rates import Mean
from router.core.model.slots import NO_WORK, Content, Resident
from router.core.planning.planner import plan
from router.core.planning.pricing import can_save, saving_pays
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    OTHER_NS,
    R2,
    A,
    R,
    backend,
    busy,
    inventory,
    leased,
    rates,
    request,
    run_of,
    snapshot,
)
from tests.support.scheduler.plans import ELSE, LONG, TWO, chosen, sources

# -- candidates ---------------------------------------------------------------------------------


def test_the_slot_that_holds_the_prefix() -> None:
    best = chosen(request(ids=LONG), inventory(backend(), holding={A1: run_of(900)}))

    assert (best.slot, best.source, best.reused_tokens) == (A1, Source.RESIDENT, 900)
    assert best.price.prefill_s == pytest.approx(1.0)


def test_a_snapshot_into_an_idle_slot() -> None:
    best = chosen(request(ids=LONG), inventory(snapshots=[snapshot("s", run_of(900))]))

    assert (best.slot, best.source, best.reused_tokens) == (A0, Source.SNAPSHOT, 900)
    assert best.snapshot == "s"
    assert best.price.restore_s == pytest.approx(0.001)


def test_a_copy_of_what_an_idle_slot_elsewhere_holds() -> None:
    """Copying pays because the owner computes the rest far slower than the other backend."""
    made = inventory(*TWO, holding={A0: run_of(500)})
    made.backends[A].rates = rates(prefill_s=1.0)

    best = chosen(request(ids=LONG), made)

    assert (best.slot, best.source, best.copy_from) == (B0, Source.COPY, A0)
    assert best.reused_tokens == 500
    assert (best.price.save_s, best.price.restore_s) == (0.001, 0.001)


def test_cold_where_nothing_is_known() -> None:
    best = chosen(request(ids=LONG), inventory())

    assert (best.slot, best.source, best.reused_tokens) == (A0, Source.COLD, 0)


def test_a_cold_start_takes_the_slot_that_is_idle_for_longest() -> None:
    made = inventory()
    made.slots[A0].last_used = 5.0

    assert chosen(request(), made).slot == A1


def test_a_cold_start_displaces_what_is_worth_least() -> None:
    made = inventory(backend(kv_dir=None), holding={A0: ELSE})

    assert chosen(request(ids=LONG), made).slot == A1


def test_asked_for_the_best_alone_the_others_are_not_priced() -> None:
    made = inventory(*TWO, holding={A0: run_of(100), B0: run_of(900)})

    decision = plan(request(ids=LONG), made, 0.0, losers=0)
    assert decision is not None
    assert (decision.chosen.slot, decision.losers) == (B0, ())


def test_of_two_prefills_the_first_to_end_is_waited_for() -> None:
    made = inventory(backend("a", 1), backend("b", 1), backend("c", 1))
    for slot, until in ((A0, 1.0), (B0, 20.0)):
        leased(made.slots[slot], R2, NO_WORK)
        made.slots[slot].do(replace(made.slots[slot].work, sharing=True, pending=LONG))
        made.slots[slot].do(replace(made.slots[slot].work, busy_until=until))

    decision = plan(request(ids=[*([1] * 1000), 2]), made, 0.0, losers=0)
    assert decision is not None
    assert (decision.chosen.wait_for, decision.losers) == (A0, ())


def test_the_losers_come_along_in_order() -> None:
    decision = plan(request(ids=LONG), inventory(holding={A0: run_of(9)}), 0.0)

    assert decision is not None
    assert [c.slot for c in decision.losers] == [A1]
    assert decision.reason.startswith("resident is cheapest at ")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(prompt=Prompt(unknown="media")), "tokens unknown: media"),
        (request(ids=LONG, reuse=False), "the client asked for no reuse"),
        (request(ids=LONG, whole_backend=True), "none is cheapest at"),
    ],
)
def test_the_router_has_no_say(asked: Request, reason: str) -> None:
    made = inventory(holding={A0: LONG}, snapshots=[snapshot("s", LONG)])

    decision = plan(asked, made, 0.0)

    assert sources(decision) == {Source.NONE}
    assert decision is not None
    assert decision.reason.startswith(reason)
    assert not decision.prefill_first


# -- eligible backends and slots ----------------------------------------------------------------


def test_no_backend_no_plan() -> None:
    assert plan(request(), Inventory(), 0.0) is None


@pytest.mark.parametrize(
    "asked",
    [request(model="other"), request(avoid=frozenset({A})), request(ids=run_of(10_000))],
    ids=["another model", "failed there already", "as long as the context"],
)
def test_a_backend_that_does_not_serve_the_request(asked: Request) -> None:
    assert plan(asked, inventory(), 0.0) is None


def test_a_model_by_its_name() -> None:
    assert plan(request(model="m"), inventory(), 0.0) is not None


def test_only_idle_slots() -> None:
    made = inventory()
    busy(made, A0)
    assert chosen(request(), made).slot == A1
    busy(made, A1)
    assert plan(request(), made, 0.0) is None


def test_a_gated_backend_gets_nothing() -> None:
    made = inventory(*TWO)
    made.backends[A].gate.holder = RequestId("other")

    assert chosen(request(), made).slot == B0


def test_a_whole_backend_only_where_all_is_idle() -> None:
    made = inventory(backend("a", 2), backend("b", 2))
    busy(made, A0)

    assert chosen(request(whole_backend=True), made).slot == B0
    busy(made, B0)
    assert plan(request(whole_backend=True), made, 0.0) is None


def test_a_server_that_chooses_is_kept_from_slots_in_preparation() -> None:
    """Also from a slot that is still watched: the server may consider it idle."""
    made = inventory()
    lease = leased(made.slots[A0], R, NO_WORK)
    unread = request(prompt=Prompt(unknown="media"), pinnable=False)
    assert plan(unread, made, 0.0) is None
    assert plan(request(), made, 0.0) is not None

    made.slots[A0].abandon(lease)
    assert plan(unread, made, 0.0) is None
    assert plan(request(), made, 0.0) is not None


def test_a_slot_hint_is_obeyed_if_there_is_such_a_slot() -> None:
    made = inventory(holding={A1: LONG})

    assert chosen(request(ids=LONG, slot_hint=0), made).slot == A0
    assert chosen(request(ids=LONG, slot_hint=7), made).slot == A1
    busy(made, A0)
    assert plan(request(slot_hint=0), made, 0.0) is None


# -- states that fit a slot ---------------------------------------------------------------------


def test_namespaces_never_mix() -> None:
    infos = (backend("a", 1, namespace=OTHER_NS), backend("b", 1))
    made = inventory(
        *infos, holding={A0: run_of(500)}, snapshots=[snapshot("s", LONG, ns=OTHER_NS)]
    )
    made.backends[A].rates = rates(prefill_s=1.0)
    made.slots[A0].hold(Content(Resident(run_of(500))))

    decision = plan(request(ids=LONG, avoid=frozenset({A})), made, 0.0)
    assert sources(decision) == {Source.COLD}
    assert Source.COPY not in sources(plan(request(ids=LONG), made, 0.0))


@pytest.mark.parametrize(
    "change",
    [{"kv_dir": None}, {"memory_kind": MemoryKind.SLIDING_WINDOW}, {"n_ctx": 1100}],
    ids=["no place for files", "a kind that cannot be restored", "longer than a slot"],
)
def test_no_restore_where_it_could_not_be_used(change: dict[str, Any]) -> None:
    long = snapshot("s", join([LONG, run_of(200, 2)]))
    made = inventory(backend(**change), snapshots=[long])

    assert sources(plan(request(ids=LONG), made, 0.0)) == {Source.COLD}


@pytest.mark.parametrize(
    "changes",
    [
        ({"kv_dir": None}, {}),
        ({}, {"n_ctx": 1100}),
        ({}, {"memory_kind": MemoryKind.HYBRID}),
        ({}, {"kv_dir": None}),
    ],
    ids=["source cannot save", "target too small", "diverging hybrid", "target cannot restore"],
)
def test_no_copy_where_it_could_not_be_used(changes: tuple[dict[str, Any], ...]) -> None:
    infos = (backend("a", 1, **changes[0]), backend("b", 1, **changes[1]))
    made = inventory(*infos, holding={A0: join([run_of(900), run_of(300, 2)])})
    made.backends[A].rates = rates(prefill_s=1.0)

    assert sources(plan(request(ids=LONG), made, 0.0)) == {Source.RESIDENT, Source.COLD}


def test_a_snapshot_of_a_diverging_hybrid_is_not_offered() -> None:
    made = inventory(
        backend(memory_kind=MemoryKind.HYBRID), snapshots=[snapshot("s", run_of(1200))]
    )

    assert sources(plan(request(ids=LONG), made, 0.0)) == {Source.COLD}


# -- displaced content --------------------------------------------------------------------------


def test_what_is_displaced_is_saved_if_that_pays() -> None:
    made = inventory(backend("a", 1), holding={A0: ELSE})

    best = chosen(request(ids=LONG), made)
    assert (best.save_displaced, best.price.save_s, best.price.loss_s) == (True, 0.001, 0.0005)


def test_handling_of_saves_takes_time_but_stops_nobody() -> None:
    made = inventory(backend("a", 2), holding={A0: ELSE}, snapshots=[snapshot("s", run_of(900))])
    made.backends[A].rates.handling_s = Mean(0.5)
    busy(made, A1)

    best = chosen(request(ids=LONG), made)
    assert (best.source, best.save_displaced) == (Source.SNAPSHOT, True)
    assert best.price.handling_s == 0.5
    assert best.price.stall_s == pytest.approx(0.001 + 0.001 + 1.0)


def test_what_a_snapshot_holds_already_has_to_be_restored() -> None:
    made = inventory(backend("a", 1), holding={A0: ELSE}, snapshots=[snapshot("s", ELSE)])

    assert saving_pays(made, made.slots[A0]) == (0.0, 0.0005, False)


def test_the_chance_falls_with_the_uses_of_other_slots() -> None:
    """Halved after two uses on a backend of two slots."""
    made = inventory(backend("a", 2), holding={A0: ELSE}, snapshots=[snapshot("s", ELSE)])
    made.note_use(made.slots[A1])
    made.note_use(made.slots[A1])

    assert saving_pays(made, made.slots[A0]) == (0.0, 0.00025, False)
    made.note_use(made.slots[A0])
    assert saving_pays(made, made.slots[A0]) == (0.0, 0.0005, False)


def test_long_gone_content_is_displaced_before_new() -> None:
    """2,000 tokens, unused during 20 uses on two slots, are displaced before 300."""
    made = inventory(backend(kv_dir=None), holding={A0: run_of(2000, 7), A1: run_of(300, 8)})
    assert chosen(request(ids=LONG), made).slot == A1

    for _ in range(20):
        made.note_use(made.slots[A1])
    assert chosen(request(ids=LONG), made).slot == A0


def test_what_stays_useful_is_no_loss() -> None:
    made = inventory(backend("a", 1), holding={A0: ELSE})

    assert saving_pays(made, made.slots[A0], kept=1000) == (0.0, 0.0, False)
    assert saving_pays(inventory(), inventory().slots[A0]) == (0.0, 0.0, False)


def test_replaced_end_of_a_conversation_is_not_saved() -> None:
    """30 tokens take 0.3 s, a save 10 ms; but a request with the whole prompt is its next turn."""
    made = inventory(backend("a", 1), holding={A0: ELSE})
    made.backends[A].rates = rates(transfer_s=0.01)
    assert saving_pays(made, made.slots[A0], kept=970)[2]

    made.slots[A0].hold(Content(Resident(ELSE, 0, (500, 966))))
    save_s, loss_s, save = saving_pays(made, made.slots[A0], kept=970)
    assert (save_s, save) == (0.0, False)
    assert loss_s == pytest.approx(0.5 * 0.03 * 0.3)
    assert saving_pays(made, made.slots[A0], kept=965)[2]  # another conversation branches off


def test_a_part_of_a_hybrid_covers_nothing() -> None:
    info = backend("a", 1, memory_kind=MemoryKind.HYBRID)
    part = inventory(info, holding={A0: ELSE}, snapshots=[snapshot("s", run_of(900, 7))])
    whole = inventory(info, holding={A0: ELSE}, snapshots=[snapshot("s", ELSE)])

    assert saving_pays(part, part.slots[A0]) == (0.001, 0.0005, True)
    assert saving_pays(whole, whole.slots[A0]) == (0.0, 0.0005, False)


def test_saving_does_not_pay_when_it_stops_too_much() -> None:
    """Expected loss: 0.5 x 10 s = 5 s; a save of 4 s and 0.5 x 4 s for the restore cost more."""
    made = inventory(backend("a", 2), holding={A0: ELSE})
    made.backends[A].rates = rates(transfer_s=3.0)
    assert saving_pays(made, made.slots[A0]) == (3.0, 1.5, True)

    # A stream that stops for the save would also stop for the prefill that the save avoids.
    busy(made, A1)
    assert saving_pays(made, made.slots[A0]) == (3.0, 3.0, True)
    made.backends[A].rates = rates(transfer_s=4.0)
    assert saving_pays(made, made.slots[A0]) == (0.0, 10.0, False)
    assert chosen(request(ids=LONG), made).price.loss_s == 10.0


def test_a_prompt_that_the_router_computes_counts_as_load() -> None:
    made = inventory(backend("a", 2), backend("b", 2))
    leased(made.slots[A0], R2, NO_WORK)
    made.slots[A0].do(replace(made.slots[A0].work, sharing=True))
    assert chosen(request(ids=LONG), made).slot == B0


def test_nobody_waits_for_less_than_is_worth_a_file() -> None:
    made = inventory(backend("a", 1), backend("b", 1))
    leased(made.slots[A0], R2, NO_WORK)
    made.slots[A0].do(replace(made.slots[A0].work, sharing=True, pending=run_of(100)))
    made.slots[A0].do(replace(made.slots[A0].work, busy_until=0.5))
    assert chosen(request(ids=run_of(101)), made).wait_for == A0
    made.catalog.limits = SnapshotLimits(min_tokens=101)
    assert chosen(request(ids=run_of(101)), made).wait_for is None


def test_streams_that_stop_are_priced() -> None:
    made = inventory(snapshots=[snapshot("s", run_of(900))])
    busy(made, A1)

    best = chosen(request(ids=LONG), made)
    assert best.price.stall_s == pytest.approx(1.0 + 0.001)  # of the prefill, and of the restore


@pytest.mark.parametrize(
    ("change", "policy", "limits"),
    [
        ({"kv_dir": None}, PolicyName.CHEAPEST, SnapshotLimits()),
        (
            {"memory_kind": MemoryKind.SLIDING_WINDOW, "window": 5},
            PolicyName.CHEAPEST,
            SnapshotLimits(),
        ),
        ({}, PolicyName.STICKY, SnapshotLimits()),
        ({}, PolicyName.CHEAPEST, SnapshotLimits(max_tokens=4)),
    ],
)
def test_what_cannot_be_saved(
    change: dict[str, Any], policy: PolicyName, limits: SnapshotLimits
) -> None:
    made = inventory(backend(**change), policy=policy)
    made.catalog.limits = limits

    assert not can_save(made, made.backends[A], 5)
    assert can_save(inventory(), inventory().backends[A], 5)
