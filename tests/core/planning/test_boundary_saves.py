"""Boundary saves: where a prefill stops to save a snapshot, and what follows."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.tokens import head, join
from router.base.types import MemoryKind, Outcome, Prompt, Reported, Request, Source, StateShape
from router.core.model.effects import Account, Delete, Dispatch, Prefill, Save, SaveReason
from router.core.model.plan import Plan
from router.core.model.policy import SnapshotLimits
from router.core.model.slots import Content, Resident
from router.core.planning.early_saves import boundary_saves
from router.core.planning.planner import plan
from router.core.reporting.miss_reasons import record_of
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    NS,
    R,
    backend,
    busy,
    inventory,
    rates,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import (
    NOW,
    arrive,
    cancel,
    held,
    names,
    plan_of,
    prefilled,
    save_failed,
    saved,
    slot,
)
from tests.support.scheduler.driven import Driven

HYBRID = backend(memory_kind=MemoryKind.HYBRID)
# A system prompt of 600 tokens, a question up to 900, and the start of an answer.
CHAT = Prompt(run_of(905), boundaries=(600, 900))
OTHER = join([run_of(600), run_of(305, 2)])


def asked(prompt: Prompt = CHAT, **more: Any) -> Request:
    return request(prompt=prompt, **more)


def planned(made: Any, prompt: Prompt = CHAT, **more: Any) -> Plan:
    found = plan(asked(prompt, **more), made, NOW)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "kind", [MemoryKind.SLIDING_WINDOW, MemoryKind.HYBRID, MemoryKind.RECURRENT]
)
def test_a_kind_that_cannot_go_back_pauses_at_the_boundaries(kind: MemoryKind) -> None:
    found = planned(inventory(backend(memory_kind=kind)))

    assert found.boundary_saves == (600, 900)
    assert found.boundary_saves_s == pytest.approx(0.002)
    assert found.ttft_s == pytest.approx(found.chosen.price.ttft_s + 0.002)


@pytest.mark.parametrize(
    ("info", "more"),
    [
        (backend(memory_kind=MemoryKind.FULL), {}),
        (backend(memory_kind=MemoryKind.UNKNOWN), {}),
        (backend(memory_kind=MemoryKind.HYBRID, kv_dir=None), {}),
        (backend(memory_kind=MemoryKind.SLIDING_WINDOW, window=2000), {}),
        (HYBRID, {"whole_backend": True, "pinnable": False}),
        (HYBRID, {"reuse": False}),
        (HYBRID, {"prompt": Prompt(unknown="why")}),
        (HYBRID, {"prompt": Prompt(run_of(905), boundaries=(600,), n_media=1)}),
    ],
)
def test_nothing_is_saved_that_would_be_of_no_use(info: Any, more: dict[str, Any]) -> None:
    assert planned(inventory(info), **({"prompt": CHAT} | more)).boundary_saves == ()


def test_without_boundaries_the_last_token_but_one() -> None:
    assert planned(inventory(HYBRID), Prompt(run_of(905))).boundary_saves == (904,)


def test_reused_and_saved_boundaries_are_not_saved_again() -> None:
    made = inventory(HYBRID, snapshots=[snapshot("s", run_of(600))])
    found = planned(made)

    assert (found.chosen.source, found.chosen.reused_tokens) == (Source.SNAPSHOT, 600)
    assert found.boundary_saves == (900,)

    made = inventory(HYBRID, snapshots=[snapshot("s", run_of(900))])
    assert boundary_saves(made, asked(), planned(inventory(HYBRID)).chosen) == ((600,), 0.001)


def test_second_branch_at_a_place_is_saved() -> None:
    made = inventory(HYBRID, snapshots=[snapshot("s", run_of(1000))])
    assert planned(made, Prompt(OTHER)).boundary_saves == (600, 904)

    made = inventory(HYBRID)
    made.slots[A1].hold(Content(Resident(run_of(700))))
    assert planned(made, Prompt(OTHER)).boundary_saves == (600, 904)


def test_a_save_that_costs_more_than_it_can_spare_is_not_made() -> None:
    made = inventory(HYBRID)
    made.backends[HYBRID.id].rates = rates(prefill_s=1e-6)
    assert planned(made).boundary_saves == ()

    # At reuse probability 0.5: (600 tokens at 10 ms, less a 1 s restore) / 2 is 2.5 s; 300: 1 s.
    made = inventory(HYBRID)
    made.backends[HYBRID.id].rates = rates(transfer_s=1.0)
    assert planned(made).boundary_saves == (600,)
    busy(made, A1)
    assert planned(made).boundary_saves == (600,)
    made.backends[HYBRID.id].rates = rates(transfer_s=1.3)
    assert planned(made).boundary_saves == (900,)  # each save stops a stream


def test_handling_time_of_a_save_is_learned_and_counts() -> None:
    made = inventory(HYBRID)
    made.backends[HYBRID.id].rates = rates(prefill_s=0.0001)
    assert planned(made).boundary_saves == (
        600,
        900,
    )  # spare 30 ms and 15 ms at reuse probability 0.5
    made.backends[HYBRID.id].rates.handling_s.value = 0.01
    found = planned(made)
    assert found.boundary_saves == (600,)
    assert found.boundary_saves_s == pytest.approx(0.021)

    s = started()
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    s.handle(fact.saved(R, A0, snapshot("b1", run_of(600)), 0.001, handling_s=3.0), NOW)
    assert s.state.inventory.backends[HYBRID.id].rates.handling_s.value == pytest.approx(1.5)


def test_window_is_learned_from_a_useless_state() -> None:
    swa = backend(memory_kind=MemoryKind.SLIDING_WINDOW)
    s = scheduler(swa, coalesce_above_s=None)
    arrive(s, prompt=CHAT)
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    useless = replace(snapshot("b1", run_of(600)), shape=StateShape(extendable=False))

    assert saved(s, useless) == [Delete(useless), Prefill(R, A0, run_of(900))]
    assert held(s, A0) == run_of(600)
    assert s.state.inventory.backends[swa.id].info.window == 600
    other = Prompt(run_of(905, 3), boundaries=(600, 900))
    assert planned(s.state.inventory, other).boundary_saves == (900,)


def test_a_state_with_checkpoints_says_nothing_of_the_window() -> None:
    """Checkpoints make the state reusable, so an equally short one is saved again."""
    swa = backend(memory_kind=MemoryKind.SLIDING_WINDOW)
    s = scheduler(swa, coalesce_above_s=None)
    arrive(s, prompt=CHAT)
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    saved(s, replace(snapshot("b1", run_of(600)), shape=StateShape(1, (500,), extendable=False)))

    assert s.state.inventory.backends[swa.id].info.window == 0
    other = Prompt(run_of(905, 3), boundaries=(600, 900))
    assert planned(s.state.inventory, other).boundary_saves[0] == 600


@pytest.mark.parametrize(("extendable", "reused"), [(False, 499), (True, 700)])
def test_a_live_slot_shorter_than_its_window(extendable: bool, reused: int) -> None:
    """It goes on from a checkpoint; the first state that can be extended was not so short."""
    s = scheduler(backend(memory_kind=MemoryKind.SLIDING_WINDOW), coalesce_above_s=None)
    known, other = s.state.inventory, slot(s, A1)
    other.hold(Content(Resident(run_of(700, 5), 0, (500,))))
    assert known.reusable(other, 905, 700) == 499
    arrive(s, prompt=CHAT)
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    saved(s, replace(snapshot("b1", run_of(600)), shape=StateShape(1, (500,), extendable)))
    assert known.reusable(other, 905, 700) == reused


def test_limits_hold_for_pauses() -> None:
    made = inventory(HYBRID)
    made.catalog.limits = SnapshotLimits(max_tokens=700)
    assert planned(made).boundary_saves == (600,)


def started(**more: Any) -> Driven:
    s = scheduler(HYBRID, coalesce_above_s=None, **more)
    assert arrive(s, prompt=CHAT) == [Prefill(R, A0, run_of(600))]
    return s


def test_prefill_save_prefill_save_send() -> None:
    s = started()

    assert prefilled(s, prompt_tokens=600, cached_tokens=0) == [
        Save(R, A0, NS, SaveReason.BOUNDARY)
    ]
    assert saved(s, snapshot("b1", run_of(600))) == [Prefill(R, A0, run_of(900))]
    assert prefilled(s, prompt_tokens=900, cached_tokens=600) == [
        Save(R, A0, NS, SaveReason.BOUNDARY)
    ]
    assert names(saved(s, snapshot("b2", run_of(900)))) == ["Dispatch"]
    assert held(s, A0) == run_of(900)
    assert slot(s, A0).content.resident.checkpoints == (596, 896)
    job = s.job_of(R)
    assert job.prefilled is not None
    assert job.prefilled.tokens == 900


def test_next_turn_regenerate_and_sibling_find_a_snapshot() -> None:
    s = started()
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    saved(s, snapshot("b1", run_of(600)))
    prefilled(s, prompt_tokens=900, cached_tokens=600)
    saved(s, snapshot("b2", run_of(900)))

    fleet_ = s.state.inventory
    fleet_.slots[A1].hold(Content(Resident(run_of(50, 9))))
    for prompt, reused in (
        (Prompt(run_of(905)), 900),
        (Prompt(join([run_of(900), run_of(300, 3)])), 900),
        (Prompt(OTHER), 600),
    ):
        found = plan(request("r9", prompt=prompt), fleet_, NOW)
        assert found is not None
        assert (found.chosen.source, found.chosen.reused_tokens) == (Source.SNAPSHOT, reused)


def test_a_save_that_fails_costs_no_more_than_the_snapshot() -> None:
    s = started()
    prefilled(s, prompt_tokens=600, cached_tokens=0)

    assert save_failed(s) == [Prefill(R, A0, run_of(900))]


def test_a_prefill_that_fails_leaves_nothing_to_save() -> None:
    s = started()

    effects = s.handle(fact.prefill_failed(R, "no"), NOW)
    assert names(effects) == ["Dispatch"]
    assert slot(s, A0).content.resident.may_hold_more


def test_a_client_that_leaves_at_a_pause_is_the_end_of_it() -> None:
    s = started()
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    cancel(s)

    assert names(saved(s, snapshot("b1", run_of(600)))) == ["Spent"]
    assert R not in s.state.inventory.jobs
    assert held(s, A0) == run_of(600)


def test_who_wants_the_same_waits_for_the_last_pause() -> None:
    s = started()
    assert arrive(s, "r2", prompt=CHAT) == []
    assert slot(s, A0).work.pending == run_of(900)

    # Saved at the boundary, and not once more for r2.
    assert names(prefilled(s, prompt_tokens=600, cached_tokens=0)) == ["Save"]


def test_server_placed_request_is_prefilled_to_the_end() -> None:
    s = scheduler(HYBRID, coalesce_above_s=None)
    arrive(s, prompt=CHAT, pinnable=False)
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    saved(s, snapshot("b1", run_of(600)))
    prefilled(s, prompt_tokens=900, cached_tokens=600)

    assert saved(s, snapshot("b2", run_of(900))) == [Prefill(R, A0, head(CHAT.tokens, 904))]
    effects = prefilled(s, prompt_tokens=904, cached_tokens=900)
    assert [type(e) for e in effects] == [Dispatch]
    assert plan_of(effects).boundary_saves == (600, 900)


def test_the_computed_tokens_of_all_parts_are_counted_once() -> None:
    s = started()
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    saved(s, snapshot("b1", run_of(600)))
    prefilled(s, prompt_tokens=900, cached_tokens=600)
    saved(s, snapshot("b2", run_of(900)))

    effects = s.handle(
        fact.finished(R, Outcome.OK, Reported(prompt_tokens=905, cached_tokens=900)), NOW
    )
    (account,) = (e for e in effects if isinstance(e, Account))
    assert record_of(account).computed_tokens == 905
