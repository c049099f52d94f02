"""Miss reasons: each computed token has exactly one reason, the right one."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.base.tokens import Tokens, count, head, join, unpack
from router.base.types import MemoryKind, Miss, Nearest, Prompt, Request
from router.core.inventory.catalog import Catalog
from router.core.inventory.inventory import Inventory
from router.core.model.plan import Coverage
from router.core.model.policy import PolicyName, SnapshotLimits
from router.core.model.slots import Content, Resident
from router.core.planning.planner import plan
from router.core.reporting.miss_reasons import coverage_of, missed
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
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
from tests.support.scheduler.drive import NOW, arrive, finish, launched, restore_failed, save_failed

SHARED, TAIL, OTHER = run_of(200), run_of(100, 2), run_of(100, 3)
PROMPT = join([SHARED, TAIL])
AWAY = join([SHARED, OTHER])
lengths = st.integers(0, 12)
sights = st.builds(
    Coverage,
    planned=lengths,
    usable=lengths,
    waiting=lengths,
    held=lengths,
    evicted=lengths,
    displaced=lengths,
    goes_on=st.booleans(),
    worth=lengths,
)


@given(st.none() | sights, lengths, lengths, st.booleans())
@example(Coverage(), 1, 1, False)
@example(Coverage(planned=3), 2, 2, True)
def test_the_parts_add_up(sight: Coverage | None, n: int, computed: int, failed: bool) -> None:
    computed = min(computed, n)
    found = missed(request(), sight, n, computed, failed=failed)

    assert sum(found.values()) == computed
    assert all(tokens > 0 for tokens in found.values())


def test_the_first_reason_is_taken() -> None:
    lengths: dict[str, Any] = {"usable": 5, "waiting": 6, "held": 7, "evicted": 8, "displaced": 9}

    assert missed(request(), Coverage(**lengths), 20, 18) == {
        Miss.PRICE: 3,
        Miss.BUSY: 1,
        Miss.KIND: 1,
        Miss.EVICTED: 1,
        Miss.DISPLACED: 1,
        Miss.NEW: 11,
    }
    equal: dict[str, Any] = dict.fromkeys(lengths, 9)
    assert missed(request(), Coverage(**equal), 20, 18) == {Miss.PRICE: 7, Miss.NEW: 11}


def why(made: Inventory, asked: Request, computed: int | None = None) -> dict[Miss, int]:
    """Return the miss reasons if the plan is carried out, or for `computed` tokens."""
    decision = plan(asked, made, 0.0)
    assert decision is not None
    n = len(asked.prompt)
    reused = decision.chosen.reused_tokens
    seen = coverage_of(asked, decision, made)
    return missed(asked, seen, n, n - reused if computed is None else computed)


def nearest_of(made: Inventory) -> Nearest:
    """Return the content that is reported as nearest to PROMPT."""
    asked = request(ids=PROMPT)
    decision = plan(asked, made, 0.0)
    assert decision is not None
    seen = coverage_of(asked, decision, made)
    assert seen is not None
    assert seen.nearest is not None
    return seen.nearest


def one(**more: Any) -> Inventory:
    return inventory(backend("a", 1), **more)


def test_a_prompt_that_nothing_is_like_is_cold() -> None:
    assert why(one(), request(ids=PROMPT)) == {Miss.COLD: 300}


def test_so_is_one_that_shares_less_than_is_worth_a_snapshot() -> None:
    made = one(holding={A0: AWAY})
    made.catalog = Catalog(SnapshotLimits(min_tokens=201))

    assert why(made, request(ids=PROMPT)) == {Miss.COLD: 100}


def test_the_next_turn_of_what_is_held_is_new() -> None:
    assert why(one(holding={A0: SHARED}), request(ids=PROMPT)) == {Miss.NEW: 100}


def test_where_something_else_goes_on_it_has_diverged() -> None:
    assert why(one(holding={A0: AWAY}), request(ids=PROMPT)) == {Miss.DIVERGED: 100}


def test_the_last_token_of_a_repetition_is_new() -> None:
    assert why(one(holding={A0: join([PROMPT, OTHER])}), request(ids=PROMPT)) == {Miss.NEW: 1}


def test_what_a_plan_promised_was_mispredicted() -> None:
    found = why(one(holding={A0: SHARED}), request(ids=PROMPT), computed=120)

    assert found == {Miss.MISPREDICTED: 20, Miss.NEW: 100}


def test_a_busy_slot_that_is_not_waited_for() -> None:
    made = inventory(backend("a", 2))
    busy(made, A0, pending=SHARED)

    assert why(made, request(ids=PROMPT)) == {Miss.BUSY: 200, Miss.NEW: 100}


def test_a_busy_slot_of_a_kind_that_is_not_known() -> None:
    """Memory kind unknown without `kv_dir`: the model may be able to go back."""
    made = inventory(backend("a", 2, memory_kind=MemoryKind.UNKNOWN))
    busy(made, A0, pending=AWAY)

    assert why(made, request(ids=PROMPT)) == {Miss.BUSY: 200, Miss.DIVERGED: 100}


def test_a_state_that_cannot_go_back() -> None:
    made = inventory(backend("a", 1, memory_kind=MemoryKind.HYBRID), holding={A0: AWAY})

    assert why(made, request(ids=PROMPT)) == {Miss.KIND: 200, Miss.DIVERGED: 100}


def test_one_that_can_go_back_to_a_checkpoint() -> None:
    made = inventory(backend("a", 1, memory_kind=MemoryKind.HYBRID))
    made.slots[A0].hold(Content(Resident(AWAY, checkpoints=(150,))))

    assert why(made, request(ids=PROMPT)) == {Miss.KIND: 50, Miss.DIVERGED: 100}


def test_a_snapshot_that_cannot_go_back() -> None:
    infos = backend("a", 1, memory_kind=MemoryKind.HYBRID)
    made = inventory(infos, snapshots=[snapshot("s", AWAY), snapshot("t", head(SHARED, 90))])

    assert why(made, request(ids=PROMPT)) == {Miss.KIND: 110, Miss.DIVERGED: 100}


def test_a_policy_that_never_moves_kv() -> None:
    made = inventory(backend("a", 2), policy=PolicyName.ROUND_ROBIN, holding={A1: SHARED})
    made.catalog.add(snapshot("s", PROMPT), MemoryKind.FULL, 1.0)

    assert why(made, request(ids=PROMPT)) == {Miss.PRICE: 200, Miss.NEW: 100}


def test_a_slot_that_the_client_did_not_want() -> None:
    made = inventory(backend("a", 2, kv_dir=None), holding={A1: SHARED})

    found = why(made, request(ids=PROMPT, slot_hint=0))
    assert found == {Miss.PRICE: 200, Miss.NEW: 100}


def test_another_namespace_does_not_count() -> None:
    made = inventory(backend("a", 1), backend("b", 1, namespace=OTHER_NS), holding={B0: PROMPT})

    assert why(made, request(ids=PROMPT, avoid=frozenset({"b"}))) == {Miss.COLD: 300}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"prompt": Prompt(unknown="why")}, Miss.UNKNOWN),
        ({"reuse": False}, Miss.DECLINED),
        ({"whole_backend": True}, Miss.DECLINED),
    ],
)
def test_where_the_router_has_no_say(more: dict[str, Any], reason: Miss) -> None:
    asked = request(**more)
    made = one()
    decision = plan(asked, made, 0.0)

    assert decision is not None
    assert coverage_of(asked, decision, made) is None
    assert missed(asked, None, 9, 5) == {reason: 5}
    assert missed(asked, None, 9, 0) == {}


def test_one_of_equals_is_named_that_goes_on() -> None:
    """Prefixes cut out of a conversation may end exactly at the point of divergence."""
    made = inventory(backend("a", 2), holding={A0: SHARED, A1: AWAY})
    nearest = nearest_of(made)
    assert (nearest.slot, nearest.snapshot) == (A1, None)
    assert (nearest.common, nearest.length, nearest.diverges) == (200, 300, True)
    assert [unpack(part) for part in (nearest.before, nearest.ours, nearest.theirs)] == [
        [1] * 10,
        [2] * 10,
        [3] * 10,
    ]


def test_a_snapshot_is_the_nearest() -> None:
    made = one(holding={A0: head(SHARED, 50)}, snapshots=[snapshot("s", SHARED)])
    nearest = nearest_of(made)

    assert (nearest.slot, nearest.snapshot) == (None, "s")
    assert not nearest.diverges
    assert count(nearest.theirs) == 0


def test_it_may_be_told_when_the_slot_is_leased_but_not_later() -> None:
    """Coverage is computed before the next event changes the inventory."""
    s = scheduler(backend("a", 1), holding={A0: AWAY}, coalesce_above_s=None)
    arrive(s, "r", PROMPT)
    job = s.job_of(request().id)
    assert job.plan is not None
    before = job.plan.coverage

    save_failed(s)
    after = job.plan.coverage
    assert before is None
    assert after is not None
    assert (after.usable, after.held) == (200, 200)
    assert s.state.unexplained == []


# -- content that was held before ------------------------------------------------------------------


def reasons(s: Any, name: str, ids: Tokens, **more: Any) -> dict[Miss, int]:
    """Return the miss reasons of a request that is admitted at once."""
    arrive(s, name, ids, **more)
    s.explain_admitted()
    job = s.job_of(name)
    n = count(ids)
    return missed(job.request, job.plan.coverage, n, n - job.plan.chosen.reused_tokens)


def alone(**more: Any) -> Any:
    """Return a scheduler with one slot that saves nothing."""
    options: dict[str, Any] = {"idle_save_after_s": None, "coalesce_above_s": None}
    return scheduler(backend("a", 1, **more), reuse_probability=0.0, **options)


def serve(s: Any, name: str, ids: Tokens) -> None:
    arrive(s, name, ids)
    finish(s, name, prompt_tokens=count(ids), cached_tokens=0, generated_tokens=1)


def test_what_another_prompt_displaced() -> None:
    s = alone(kv_dir=None)
    serve(s, "first", SHARED)
    serve(s, "second", OTHER)

    assert reasons(s, "third", PROMPT) == {Miss.DISPLACED: 200, Miss.NEW: 100}


def test_what_was_lost_with_its_backend() -> None:
    s = alone(kv_dir=None)
    serve(s, "first", SHARED)
    s.handle(fact.backend_up(backend("a", 1, kv_dir=None)), NOW)

    assert reasons(s, "again", PROMPT) == {Miss.DISPLACED: 200, Miss.NEW: 100}


def test_what_a_snapshot_holds_is_not_displaced() -> None:
    s = alone(kv_dir=None)
    serve(s, "first", SHARED)
    s.state.inventory.catalog.add(snapshot("s", SHARED), MemoryKind.FULL, 1.0)
    serve(s, "second", OTHER)

    assert len(s.state.inventory.displaced) == 0


def test_what_several_answers_at_once_displaced() -> None:
    s = scheduler(backend("a", 2, kv_dir=None), idle_save_after_s=None, coalesce_above_s=None)
    serve(s, "first", SHARED)
    serve(s, "second", OTHER)
    arrive(s, "many", run_of(10, 9), tasks=2)
    s.explain_admitted()
    launched(s, 0, "many", others={1})

    assert len(s.state.inventory.displaced) == 2


def test_what_was_evicted() -> None:
    made = one()
    made.catalog = Catalog(SnapshotLimits(max_tokens=250))
    made.catalog.add(snapshot("s", SHARED), MemoryKind.FULL, 1.0)
    made.catalog.add(snapshot("t", OTHER), MemoryKind.FULL, 9.0)

    assert why(made, request(ids=PROMPT)) == {Miss.EVICTED: 200, Miss.NEW: 100}


def test_what_was_found_to_be_unusable() -> None:
    made = one(snapshots=[snapshot("s", AWAY)])
    made.catalog.forget(snapshot("s").id)

    assert made.catalog.gone.nearest(NS, PROMPT) == (200, True)
    assert why(made, request(ids=PROMPT)) == {Miss.EVICTED: 200, Miss.DIVERGED: 100}


def test_a_restore_that_failed() -> None:
    s = alone()
    s.state.inventory.catalog.add(snapshot("s", SHARED), MemoryKind.FULL, 1.0)
    arrive(s, "r", PROMPT)
    job = s.job_of(request().id)
    restore_failed(s, bad=True)

    assert job.plan is not None
    assert job.plan.chosen.reused_tokens == 0
    sight = job.plan.coverage
    assert missed(request(), sight, 300, 300, failed=True) == {Miss.FAILED: 200, Miss.NEW: 100}
