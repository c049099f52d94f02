"""Policies: voluntary waits, prefills before a request, and the baselines."""

import pytest
from msgspec.structs import replace

from router.base.tokens import Tokens
from router.base.types import Prompt, Request, SlotId, Source
from router.core.inventory.inventory import Inventory
from router.core.model.jobs import RequestJob
from router.core.model.plan import Candidate, Plan, Price
from router.core.model.policy import PolicyName
from router.core.model.slots import Work
from router.core.planning.baseline_policies import sticky_key
from router.core.planning.planner import plan
from router.core.planning.wait_candidates import trust_ends
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    A,
    B,
    R,
    backend,
    busy,
    inventory,
    rates,
    request,
    run_of,
    snapshot,
)
from tests.support.scheduler.plans import ELSE, LONG, TWO, chosen, waits

# -- waiting ------------------------------------------------------------------------------------


def shared_prefill(policy: PolicyName = PolicyName.PREFER_IDLE, until: float = 2.0) -> Inventory:
    """Return an inventory in which a/0 prefills LONG for sharing; a/1 is idle."""
    made = inventory(policy=policy)
    planned = Plan(Candidate(A0, Source.COLD, 0, Price()))
    job = RequestJob(id=R, own=made.slots[A0], request=request(), plan=planned, chunk_until=until)
    made.jobs[R] = job
    work = Work(sharing=True, pending=LONG, busy_until=until)
    made.slots[A0].lease(job, work)
    return made


MORE = Tokens(LONG + run_of(10, 3))


def test_request_waits_for_a_running_prefill_if_cheaper() -> None:
    decision = plan(request(ids=MORE), shared_prefill(until=2.0), 0.0)

    assert decision is not None
    assert decision.chosen.wait_for == A0
    assert decision.chosen.source is Source.SNAPSHOT
    assert decision.chosen.reused_tokens == 1000
    assert decision.reason == "waiting for a/0 is cheaper"


def test_request_does_not_wait_for_a_longer_prefill() -> None:
    """Computing the prefix twice is priced by the chance that its seconds are needed elsewhere."""
    for until, expected in ((14.0, A0), (16.0, None)):
        made = shared_prefill(until=until)
        made.take(backend("b"), rates())
        assert waits(request(ids=MORE), made) == expected


def test_other_prompt_on_the_backend_is_computed_after_it() -> None:
    made = shared_prefill(until=60.0)
    assert waits(request(ids=MORE), made) == A0

    price = chosen(request(ids=ELSE), made).price
    assert price.wait_s == 60.0
    assert chosen(request(ids=ELSE[:40]), made).price.wait_s == 0.0  # too short to queue


def test_shared_prefill_is_waited_for_however_long() -> None:
    """`max_wait` limits waits for a slot's owner; here all waiting requests would start anew."""
    assert waits(request(ids=MORE), shared_prefill(), waited_s=3000.0) == A0


def test_nobody_waits_for_what_is_long_overdue() -> None:
    made = shared_prefill(until=-59.0)
    assert waits(request(ids=MORE), made) == A0
    made = shared_prefill(until=-60.0)
    assert waits(request(ids=MORE), made) is None
    assert trust_ends(made, -1.0) == 0.0


@pytest.mark.parametrize(
    "asked",
    [request(ids=ELSE), request(ids=MORE, reuse=False), request(ids=MORE, avoid=frozenset({A}))],
    ids=["another prompt", "no reuse", "failed there already"],
)
def test_nobody_waits_for_what_is_of_no_use(asked: Request) -> None:
    made = shared_prefill()
    made.take(backend("b"), rates())

    assert waits(asked, made) is None


@pytest.mark.parametrize(
    ("policy", "waited_for"),
    [
        (PolicyName.PREFER_IDLE, None),
        (PolicyName.PREFER_OWNER, A0),
        (PolicyName.CHEAPEST, A0),
        (PolicyName.LEAST_BUSY, None),
    ],
)
def test_the_owner_is_waited_for_where_the_policy_allows(
    policy: PolicyName, waited_for: SlotId | None
) -> None:
    made = inventory(policy=policy)
    busy(made, A0, until=3.0, pending=LONG)

    assert waits(request(ids=MORE), made) == waited_for


def test_owner_is_not_waited_for_beyond_cap_or_hint() -> None:
    made = inventory(policy=PolicyName.CHEAPEST, max_wait_s=2.0)
    busy(made, A0, until=3.0, pending=LONG)
    assert waits(request(ids=MORE), made) is None

    made.slots[A0].do(replace(made.slots[A0].work, busy_until=1.0))
    assert waits(request(ids=MORE), made) == A0
    assert waits(request(ids=MORE, slot_hint=1), made) is None


def test_whoever_is_done_by_our_guess_is_done_soon() -> None:
    made = inventory(policy=PolicyName.CHEAPEST)
    busy(made, A0, until=-5.0, pending=LONG)

    assert chosen(request(ids=MORE), made).price.wait_s == 0.0


# -- prefills by the router ---------------------------------------------------------------------


def prefill_first(asked: Request, made: Inventory) -> bool:
    decision = plan(asked, made, 0.0)
    assert decision is not None
    return decision.prefill_first


def test_long_prefill_is_done_first_to_be_shared() -> None:
    assert prefill_first(request(ids=LONG), inventory())
    assert not prefill_first(request(ids=run_of(10)), inventory())
    assert not prefill_first(request(ids=LONG), inventory(coalesce_above_s=None))
    assert not prefill_first(request(ids=LONG), inventory(backend(kv_dir=None)))


def test_prefill_leads_the_server_to_our_slot() -> None:
    assert prefill_first(request(ids=run_of(10), pinnable=False), inventory())
    assert not prefill_first(request(ids=run_of(1), pinnable=False), inventory())
    held = inventory(holding={A0: run_of(9)})
    assert not prefill_first(request(ids=run_of(10), pinnable=False), held)


def test_media_cannot_be_prefilled() -> None:
    assert not prefill_first(request(prompt=Prompt(LONG, n_media=1)), inventory())


# -- baselines ----------------------------------------------------------------------------------


def test_round_robin_takes_the_next_in_turn() -> None:
    made = inventory(*TWO, policy=PolicyName.ROUND_ROBIN)
    assert chosen(request(), made).slot == A0
    made.granted = 1
    assert chosen(request(), made).slot == B0
    made.granted = 2
    busy(made, A0)
    assert chosen(request(), made).slot == B0


def test_least_busy_takes_emptiest_backend_and_oldest_slot() -> None:
    made = inventory(backend("a", 2), backend("b", 3), policy=PolicyName.LEAST_BUSY)
    busy(made, A0)
    made.slots[B0].last_used = 5.0

    assert chosen(request(), made).slot == SlotId(B, 1)


def test_sticky_goes_home_however_long_it_takes() -> None:
    made = inventory(policy=PolicyName.STICKY)
    asked = request(session="x")
    assert chosen(asked, made).slot == A0
    made.sticky["x"] = A1
    assert chosen(asked, made).slot == A1
    busy(made, A1)
    assert plan(asked, made, 0.0) is None


@pytest.mark.parametrize("home", [B0, SlotId(A, 7)], ids=["backend gone", "slot gone"])
def test_sticky_with_its_home_gone_goes_elsewhere(home: SlotId) -> None:
    """Regression: requests waited until the deadline for a home that a restart had removed."""
    made = inventory(policy=PolicyName.STICKY)
    made.sticky["x"] = home

    assert chosen(request(session="x"), made).slot == A0


def test_a_hint_overrules_sticky() -> None:
    made = inventory(policy=PolicyName.STICKY)
    made.sticky["x"] = A1

    assert chosen(request(session="x", slot_hint=0), made).slot == A0


def test_baselines_count_held_tokens_and_move_nothing() -> None:
    made = inventory(
        backend("a", 1),
        policy=PolicyName.LEAST_BUSY,
        holding={A0: Tokens(run_of(5) + ELSE)},
        snapshots=[snapshot("s", LONG)],
    )

    best = chosen(request(ids=LONG), made)
    assert (best.source, best.reused_tokens, best.save_displaced) == (Source.RESIDENT, 5, False)
    assert chosen(request(ids=ELSE), made).source is Source.COLD
    assert chosen(request(prompt=Prompt(unknown="x")), made).source is Source.NONE
    assert chosen(request(ids=LONG, reuse=False), made).source is Source.NONE


def test_sticky_key_is_session_then_beginning_then_id() -> None:
    assert sticky_key(request(session="x")) == "x"
    assert sticky_key(request(ids=LONG)) == sticky_key(request("other", run_of(128)))
    assert sticky_key(request(prompt=Prompt(unknown="x"))) == R
