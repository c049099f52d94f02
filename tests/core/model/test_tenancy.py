"""Tenants: no tenant's tokens are reused for, reported to or left to another tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.base.errors import NoBackendError
from router.base.tokens import head
from router.base.types import (
    NO_TENANT,
    BackendId,
    Miss,
    Namespace,
    Outcome,
    RequestId,
    SlotId,
    Source,
    Tenant,
)
from router.core.model.effects import (
    Dispatch,
    Effect,
    Erase,
    Prefill,
    Reject,
    Restore,
    Save,
    SaveReason,
)
from router.core.model.policy import PolicyName
from router.core.model.slots import UNKNOWN, Content, Resident
from router.core.model.tenancy import attracts, may_attract, model_of, namespace_of, tenant_of
from router.core.planning.planner import plan
from router.core.reporting.miss_reasons import coverage_of
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    NS,
    R2,
    R,
    backend,
    request,
    run_of,
    scheduler,
    snapshot,
    tokens,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    finish,
    launched,
    names,
    plan_of,
    prefill_failed,
    prefilled,
    quiet,
    saved,
    slot,
)
from tests.support.scheduler.driven import Driven

X, Y = Tenant("x"), Tenant("y")
LONG = run_of(900)
XS = Namespace(f"{NS}@x")


def apart(*infos: object, **more: object) -> Driven:
    """Return a scheduler that keeps tenants apart, without idle saves and shared prefills."""
    given = {"idle_save_after_s": None, "coalesce_above_s": None, "keeps_apart": True} | more
    return scheduler(*(infos or (backend("a", 1),)), **given)  # type: ignore[arg-type]


def holds(s: Driven, where: SlotId, tenant: Tenant, held: Resident | None = None) -> None:
    """Put a tenant's tokens into a slot. None: LONG."""
    slot(s, where).hold(Content(Resident(LONG) if held is None else held, tenant))


def erased(s: Driven, where: SlotId = A0, name: str = "r") -> list[Effect]:
    return s.handle(fact.erased(RequestId(name), where), NOW)


def erase_failed(s: Driven, where: SlotId = A0, name: str = "r") -> list[Effect]:
    return s.handle(fact.erase_failed(RequestId(name), where, "no"), NOW)


def test_a_namespace_is_of_a_model_and_of_a_tenant() -> None:
    info = backend("a", 1)
    assert namespace_of(info, NO_TENANT) == NS
    named = namespace_of(info, X)
    assert (named, model_of(named), tenant_of(named)) == (XS, NS, X)
    assert (model_of(NS), tenant_of(NS)) == (NS, NO_TENANT)


def test_ones_own_slot_is_gone_on_from() -> None:
    s = apart()
    holds(s, A0, X)
    assert plan_of(arrive(s, ids=LONG, tenant=X)).chosen.source is Source.RESIDENT


def test_anothers_slot_is_emptied_first() -> None:
    s = apart(reuse_probability=0.0)
    holds(s, A0, X)
    assert arrive(s, ids=LONG, tenant=Y) == [Erase(R, A0)]
    assert plan_of(erased(s)).chosen.source is Source.COLD
    assert slot(s, A0).content.tenant == Y


def test_what_it_held_is_saved_for_its_tenant() -> None:
    s = apart(reuse_probability=1.0)
    holds(s, A0, X)
    assert arrive(s, ids=LONG, tenant=Y) == [Save(R, A0, XS, SaveReason.DISPLACED)]
    assert saved(s, snapshot("s", LONG, ns=XS)) == [Erase(R, A0)]
    assert names(erased(s)) == ["Dispatch"]


def test_a_slot_of_unknown_content_is_emptied_and_never_saved() -> None:
    s = apart(reuse_probability=1.0)
    holds(s, A0, NO_TENANT)
    assert arrive(s, ids=LONG, tenant=Y) == [Erase(R, A0)]


@pytest.mark.parametrize("coalesce_above_s", [None, 0.0])
def test_nothing_is_sent_to_a_slot_that_could_not_be_emptied(
    coalesce_above_s: float | None,
) -> None:
    s = apart(reuse_probability=0.0, coalesce_above_s=coalesce_above_s)
    holds(s, A0, X)
    arrive(s, ids=LONG, tenant=Y)
    (reject,) = erase_failed(s)
    assert isinstance(reject, Reject)
    assert isinstance(reject.error, NoBackendError)
    assert (slot(s, A0).content.resident, slot(s, A0).content.tenant) == (UNKNOWN, NO_TENANT)
    assert slot(s, A0).is_idle
    assert arrive(s, "r2", ids=LONG, tenant=X) == [Erase(R2, A0)], "not even for whose it was"


def test_a_client_that_left_meanwhile_is_told_nothing() -> None:
    s = apart(reuse_probability=0.0)
    holds(s, A0, X)
    arrive(s, ids=LONG, tenant=Y)
    s.handle(fact.cancelled(R), NOW)
    assert erase_failed(s) == []
    assert s.state.inventory.jobs == {}


def test_news_of_a_job_that_is_over_is_ignored() -> None:
    s = apart()
    assert erased(s) == []


def test_snapshots_are_their_tenants() -> None:
    s = apart(
        reuse_probability=0.0, snapshots=[snapshot("s", LONG, ns=XS), snapshot("t", LONG, ns=NS)]
    )
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=Y))
    assert plan_of(arrive(s, ids=LONG, tenant=Y)).chosen.source is Source.COLD
    finish(s, outcome=Outcome.OK, prompt_tokens=900, generated_tokens=1)
    assert arrive(s, "r2", ids=LONG, tenant=X) == [Erase(R2, A0)]
    (restore,) = erased(s, name="r2")
    assert isinstance(restore, Restore)
    assert restore.snapshot.namespace == XS


def test_no_copy_is_made_of_anothers() -> None:
    s = apart(backend("a", 1), backend("b", 1))
    holds(s, A0, X)
    slot(s, B0).hold(Content(tenant=Y))
    made = plan(request(ids=LONG, tenant=Y), s.state.inventory, NOW)
    assert made is not None
    assert {way.source for way in (made.chosen, *made.losers)} == {Source.COLD}


def test_nobody_waits_for_what_another_computes() -> None:
    """Equal prompts: the second waits for the first only within one tenant."""
    for second, waits in ((X, True), (Y, False)):
        s = apart(backend("a", 3), coalesce_above_s=0.0)
        for index, whose in enumerate((X, second, second)):
            s.state.inventory.slots[SlotId(BackendId("a"), index)].hold(Content(tenant=whose))
        assert names(arrive(s, ids=LONG, tenant=X)) == ["Prefill"]
        arrive(s, "r2", ids=LONG, tenant=second)
        assert slot(s, A1).is_idle is waits


def test_nothing_is_saved_for_another_who_waits() -> None:
    for second, expected in ((X, ["Save"]), (Y, ["Dispatch"])):
        s = apart(backend("a", 1), coalesce_above_s=0.0)
        slot(s, A0).hold(replace(slot(s, A0).content, tenant=X))
        arrive(s, ids=LONG, tenant=X)
        arrive(s, "r2", ids=LONG, tenant=second)
        assert names(prefilled(s)) == expected


def test_nobody_waits_for_what_is_being_saved_of_another() -> None:
    for second, waits in ((X, True), (Y, False)):
        s = apart(backend("a", 1), backend("b", 1), reuse_probability=1.0)
        holds(s, A0, X)
        slot(s, B0).hold(Content(tenant=second))
        # The slot is leased to another prompt, and its displaced content is being saved.
        effects = arrive(s, ids=[7, 8, 9], tenant=X, avoid=frozenset({B0.backend}))
        assert names(effects) == ["Save"]
        made = plan(request("r2", LONG, tenant=second), s.state.inventory, NOW)
        assert made is not None
        assert (made.chosen.wait_for is not None) == waits


def test_a_miss_is_not_explained_by_what_another_had() -> None:
    for tenant, reason in ((X, Miss.DISPLACED), (Y, Miss.NEW)):
        s = apart(reuse_probability=0.0)
        holds(s, A0, X)
        arrive(s, ids=[7, 8, 9], tenant=X)  # displaces LONG
        finish(s, prompt_tokens=3, generated_tokens=1)
        holds(s, A0, tenant, Resident(run_of(3, 7)))
        arrive(s, "r2", ids=LONG, tenant=tenant)
        s.explain_admitted()
        (account,) = [
            e
            for e in finish(s, "r2", prompt_tokens=900, cached_tokens=0, generated_tokens=1)
            if type(e).__name__ == "Account"
        ]
        sight = account.plan.coverage  # type: ignore[union-attr]
        assert sight is not None
        assert (sight.displaced > 0) == (reason is Miss.DISPLACED)
        assert sight.held == 0


@pytest.mark.parametrize("name", [PolicyName.ROUND_ROBIN, PolicyName.STICKY, PolicyName.LEAST_BUSY])
def test_the_baselines_keep_tenants_apart_too(name: PolicyName) -> None:
    s = apart(policy=name)
    holds(s, A0, X)
    assert arrive(s, ids=LONG, tenant=Y, session="s") == [Erase(R, A0)]
    assert plan_of(erased(s)).chosen.reused_tokens == 0


# Server-placed requests


def test_slots_in_doubt_keep_their_tenant() -> None:
    """One tenant's slots are all in doubt: its next request there is sent all the same."""
    s = apart(backend("a", 3))
    for where in (A0, A1, SlotId(BackendId("a"), 2)):
        holds(s, where, X)
    arrive(s, ids=tokens(1, 2), tenant=X, pinnable=False)
    prefilled(s)
    launched(s, 7)  # it runs where the router cannot tell
    arrive(s, "r2", ids=tokens(3, 4), tenant=X, pinnable=False)
    finish(s, "r", Outcome.CLIENT_GONE)

    assert [one.offered_tenant for one in s.state.inventory.slots] == [X, X, X]
    assert "Reject" not in names(prefilled(s, "r2"))


def other() -> Resident:
    """Return tokens that diverge from LONG after 400 tokens."""
    return Resident(head(LONG, 400) + run_of(9, 5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (Resident(LONG), True),
        (Resident(head(LONG, 899)), True),
        (Resident(head(LONG, 898)), False),  # the leased slot will hold one more
        (Resident(head(LONG, 400), unread=5), True),  # the unread tokens may continue the prompt
        (Resident(head(LONG, 400), may_hold_more=True), True),
        (Resident(may_hold_more=True), True),
        (Resident(), False),
        (other(), False),
    ],
)
def test_which_idle_slots_the_server_could_prefer(held: Resident, expected: bool) -> None:
    s = apart(backend("a", 2))
    holds(s, A1, X, held)
    asked = request(ids=LONG, tenant=Y, pinnable=False)
    assert attracts(slot(s, A1), asked, computed_first=True) == expected
    assert attracts(slot(s, A1), asked, computed_first=False), "it may take any"
    assert not attracts(slot(s, A1), request(ids=LONG, tenant=X), computed_first=False)
    assert not attracts(slot(s, A1), request(tenant=Y, reuse=False), computed_first=False)


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (Resident(LONG), True),
        (Resident(run_of(899, 5)), True),  # as long, without a shared prefix
        (Resident(run_of(898, 5)), False),
        (Resident(run_of(400, 5), unread=5), True),
        (Resident(run_of(400, 5), may_hold_more=True), True),
        (Resident(), False),
    ],
)
def test_which_are_emptied_does_not_depend_on_their_tokens(held: Resident, expected: bool) -> None:
    s = apart(backend("a", 2))
    holds(s, A1, X, held)
    asked = request(ids=LONG, tenant=Y, pinnable=False)
    assert may_attract(slot(s, A1), asked, computed_first=True) == expected
    assert may_attract(slot(s, A1), asked, computed_first=False), "it may take any"
    assert not may_attract(slot(s, A1), request(ids=LONG, tenant=X), computed_first=False)
    assert not may_attract(slot(s, A1), request(tenant=Y, reuse=False), computed_first=False)


@given(st.lists(st.integers(1, 2), max_size=4), st.integers(0, 2), st.booleans())
def test_whatever_tempts_is_emptied(held: list[int], unread: int, may_hold_more: bool) -> None:
    s = apart(backend("a", 2))
    holds(s, A1, X, Resident(tokens(*held), unread, may_hold_more=may_hold_more))
    asked = request(ids=[1, 2, 1], tenant=Y, pinnable=False)
    if attracts(slot(s, A1), asked, computed_first=True):
        assert may_attract(slot(s, A1), asked, computed_first=True)


def unpinned(s: Driven, name: str = "r", tenant: Tenant = Y) -> list[Effect]:
    return arrive(s, name, ids=LONG, tenant=tenant, pinnable=False)


def test_slots_that_the_server_could_prefer_are_emptied() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X)
    assert unpinned(s) == [Erase(R, A1)]
    (prefill,) = erased(s, A1)
    assert isinstance(prefill, Prefill)
    assert slot(s, A1).is_idle
    assert names(prefilled(s)) == ["Dispatch"]


def test_what_they_held_is_saved_for_its_tenant() -> None:
    s = apart(backend("a", 2), reuse_probability=1.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X)
    assert unpinned(s) == [Save(R, A1, XS, SaveReason.DISPLACED)]
    assert saved(s, snapshot("s", LONG, ns=XS), A1) == [Erase(R, A1)]


def test_one_that_is_shorter_stays_as_it_is() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X, other())
    assert names(unpinned(s)) == ["Prefill"]


def test_not_sent_while_a_running_slot_may_attract_it() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=X))
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Y))
    assert names(arrive(s, ids=LONG, tenant=X)) == ["Dispatch"]
    assert unpinned(s, "r2") == []
    # After the answer, the slot is emptied.
    effects = finish(s, prompt_tokens=900, generated_tokens=2)
    assert Erase(R2, A0) in effects
    assert names(erased(s, A0, "r2")) == ["Prefill"]
    assert names(prefilled(s, "r2")) == ["Dispatch"]


def test_it_is_sent_beside_one_that_runs_something_else() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=X))
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Y))
    assert names(arrive(s, ids=run_of(900, 5), tenant=X)) == ["Dispatch"]
    assert names(unpinned(s, "r2")) == ["Prefill"]


def test_unprefilled_is_not_sent_where_another_has_more() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X, other())
    unpinned(s)
    (reject,) = prefill_failed(s)
    assert isinstance(reject, Reject)
    assert all(one.is_idle for one in s.state.inventory.slots)


def test_unprefilled_is_not_sent_where_another_may_have_more() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=X))
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Y))
    arrive(s, ids=run_of(900, 5), tenant=X)
    unpinned(s, "r2")
    (reject,) = prefill_failed(s, "r2")
    assert isinstance(reject, Reject)
    assert slot(s, A1).is_idle


def test_where_it_ran_unseen_nobody_owns_what_is_left() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X, other())
    unpinned(s)
    prefilled(s)
    finish(s, prompt_tokens=900, generated_tokens=2)
    assert (slot(s, A0).content.tenant, slot(s, A1).content.tenant) == (Y, NO_TENANT)


def test_where_it_was_left_unseen_nobody_owns_what_is_left() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X, other())
    unpinned(s)
    prefilled(s)
    finish(s, outcome=Outcome.CLIENT_GONE)
    assert slot(s, A1).content.tenant == NO_TENANT


def test_where_it_ran_instead_is_its_tenants_now() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, Y, Resident())
    holds(s, A1, X, other())
    unpinned(s)
    prefilled(s)
    launched(s, 1)
    finish(s, prompt_tokens=900, generated_tokens=2)
    assert (slot(s, A0).content.tenant, slot(s, A1).content.tenant) == (Y, Y)


def test_a_slot_that_may_have_been_used_by_another_is_nobodys() -> None:
    """X's client disconnected; while its slot is watched, the server may pick that slot."""
    s = apart(backend("a", 2), reuse_probability=0.0)
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=Y))
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=X))
    arrive(s, ids=[7, 8, 9], tenant=Y, pinnable=False)
    prefilled(s)
    launched_at = slot(s, A0).phase
    assert launched_at == "running"
    job = s.job_of(R)
    job.slot_confirmed = False
    s.state.inventory.backends[A0.backend].gate.leave(job)
    arrive(s, "r2", ids=[1, 2, 3], tenant=X)
    finish(s, "r2", outcome=Outcome.CLIENT_GONE)
    finish(s, "r", prompt_tokens=3, generated_tokens=1)
    quiet(s, "r2", 3)
    assert slot(s, A1).content.tenant == NO_TENANT


def test_all_slots_of_a_backend_are_emptied_for_a_batch() -> None:
    s = apart(backend("a", 2), reuse_probability=0.0)
    holds(s, A0, X)
    holds(s, A1, NO_TENANT)
    effects = arrive(s, ids=LONG, tenant=Y, whole_backend=True)
    assert names(effects) == ["Erase"]
    (second,) = erased(s, effects[0].slot)  # type: ignore[union-attr]
    assert isinstance(second, Erase)
    (dispatch,) = erased(s, second.slot)
    assert isinstance(dispatch, Dispatch)


def test_slots_that_are_lent_to_the_probe_are_nobodys() -> None:
    s = apart()
    holds(s, A0, X)
    s.handle(fact.probe_due(A0.backend), NOW)
    assert slot(s, A0).content.tenant == NO_TENANT


def test_where_all_share_nothing_is_emptied() -> None:
    s = scheduler(backend("a", 1), idle_save_after_s=None, coalesce_above_s=None)
    slot(s, A0).hold(Content(UNKNOWN))
    assert names(arrive(s, ids=LONG)) == ["Dispatch"]


def test_sight_is_of_ones_own() -> None:
    s = apart(backend("a", 2))
    holds(s, A0, X)
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Y))
    asked = request(ids=LONG, tenant=Y)
    made = plan(asked, s.state.inventory, NOW)
    assert made is not None
    sight = coverage_of(asked, made, s.state.inventory)
    assert sight is not None
    assert (sight.held, sight.nearest) == (0, None)


def test_tenants_content_stays_theirs_after_sharing_begins() -> None:
    """Reload enables sharing while a tenant's tokens are still in a slot."""
    s = apart(backend("a", 2))
    slot(s, A0).hold(replace(slot(s, A0).content, tenant=X))
    arrive(s, ids=LONG, tenant=X)
    finish(s, prompt_tokens=900, generated_tokens=1)
    s.state.inventory.policy = replace(s.state.inventory.policy, keeps_apart=False)
    made = plan(request("r2", LONG), s.state.inventory, NOW)
    assert made is not None
    assert made.chosen.source is Source.COLD
