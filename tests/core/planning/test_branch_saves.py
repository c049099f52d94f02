"""Branch saves: a prompt is saved before a long answer where a sibling is likely to gain by it."""

from typing import Any

import pytest
from msgspec.structs import replace

from router.base.tokens import join
from router.base.types import MemoryKind, Prompt, Tenant
from router.core.model.effects import Save, SaveReason
from router.core.model.policy import SnapshotLimits
from router.core.model.rates import LinearFit, Mean
from router.core.model.slots import Content, Resident
from tests.support.scheduler.build import A0, A1, R, backend, busy, run_of, scheduler, snapshot
from tests.support.scheduler.drive import arrive, names, prefilled, save_failed, saved, slot
from tests.support.scheduler.driven import Driven

BRANCH_SAVES = True
# A history of 3,000 tokens: 30 s to compute, 1 ms to save; an answer takes 20 s.
HISTORY = run_of(3000)
QUESTION = join([HISTORY, run_of(10, 2)])
OTHER = join([HISTORY, run_of(10, 3)])
PICTURE = Prompt(QUESTION, n_media=1)


def world(*infos: Any, save_s: float = 0.001, **more: Any) -> Driven:
    s = scheduler(*infos, **({"holding": {A0: HISTORY}} | more))
    rates = s.state.inventory.backends[A0.backend].rates
    rates.save = LinearFit(save_s, 0.0)
    rates.output_s_per_token = Mean(0.1, n=3)
    return s


def saves(effects: list[Any]) -> list[SaveReason]:
    return [effect.reason for effect in effects if isinstance(effect, Save)]


def test_a_held_history_is_saved_before_a_long_answer() -> None:
    s = world()

    first = arrive(s, R, QUESTION)
    after = saved(s, snapshot("b", HISTORY))
    sibling = arrive(s, "other", OTHER)

    assert saves(first) == [SaveReason.BRANCH]
    assert names(after) == ["Dispatch"]
    assert names(sibling) == ["Restore"]


def test_a_computed_prompt_is_saved_before_a_long_answer() -> None:
    s = world(holding={A0: run_of(5, 9)}, coalesce_above_s=0.1)
    assert names(arrive(s, R, QUESTION)) == ["Prefill"]

    assert saves(prefilled(s, prompt_tokens=3009, cached_tokens=0)) == [SaveReason.BRANCH]


def test_a_save_that_failed_is_not_tried_again() -> None:
    s = world()
    arrive(s, R, QUESTION)

    assert names(save_failed(s)) == ["Dispatch"]


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("the answer is short: the sibling waits for the slot", {"max_new_tokens": 1}),
        ("the client asked not to cache", {"reuse": False}),
        ("llama-server places it", {"whole_backend": True}),
    ],
)
def test_requests_that_are_not_saved_first(why: str, more: dict[str, Any]) -> None:
    s = world(save_s=0.01)

    assert SaveReason.BRANCH not in saves(arrive(s, R, QUESTION, **more)), why


def test_the_first_answer_is_priced_by_the_probe() -> None:
    """The scene that kvferry exists for is as likely right after a start as later."""
    s = world()
    s.state.inventory.backends[A0.backend].rates.output_s_per_token = Mean(0.1, n=0)

    assert names(arrive(s, R, QUESTION)) == ["Save"]


def test_what_a_snapshot_holds_is_not_saved_again() -> None:
    s = world(snapshots=[snapshot("old", HISTORY)])

    assert names(arrive(s, R, QUESTION)) == ["Dispatch"]


@pytest.mark.parametrize(
    ("beside", "wanted"),
    [
        (run_of(3000, 9), []),
        (join([run_of(1000), run_of(2000, 9)]), []),  # less than half of the beginning
        (OTHER, [SaveReason.BRANCH]),
    ],
)
def test_a_dear_save_needs_a_sibling_that_came_before(
    beside: Any, wanted: list[SaveReason]
) -> None:
    """The save takes 2 s, twice with the stream beside it: too much for a chance of 5 %."""
    s = world(save_s=2.0)
    busy(s.state.inventory, A1, until=100.0, pending=beside)

    assert saves(arrive(s, R, QUESTION)) == wanted


@pytest.mark.parametrize(
    ("held", "wanted"), [(HISTORY, [SaveReason.BRANCH]), (join([HISTORY, run_of(5, 9)]), [])]
)
def test_state_that_cannot_go_back_is_saved_if_all_is_shared(
    held: Any, wanted: list[SaveReason]
) -> None:
    s = world(backend(memory_kind=MemoryKind.RECURRENT), holding={A0: held})

    found = [reason for reason in saves(arrive(s, R, QUESTION)) if reason is SaveReason.BRANCH]

    assert found == wanted


@pytest.mark.parametrize(
    ("why", "rates", "more"),
    [
        ("a save takes as long as the answer", {"save_s": 20.0}, {}),
        ("each call to the server is slow", {"handling_s": 10.0}, {}),
        ("a restore gains nothing", {"restore_s": 40.0}, {}),
        ("a state of this size is worth no file", {}, {"limits": SnapshotLimits(min_tokens=4000)}),
    ],
)
def test_a_save_that_costs_more_than_it_gains(
    why: str, rates: dict[str, float], more: dict[str, Any]
) -> None:
    """Each price alone is enough; the sibling is certain, as the other slot shows."""
    s = world(**more)
    busy(s.state.inventory, A1, until=100.0, pending=OTHER)
    known = s.state.inventory.backends[A0.backend].rates
    known.save = LinearFit(rates.get("save_s", 0.001), 0.0)
    known.restore = LinearFit(rates.get("restore_s", 0.001), 0.0)
    known.handling_s = Mean(rates.get("handling_s", 0.0))

    assert SaveReason.BRANCH not in saves(arrive(s, R, QUESTION)), why


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("the client asked not to cache", {"reuse": False}),
        ("it holds a picture, of which the tokens say nothing", {"prompt": PICTURE}),
    ],
)
def test_in_the_only_slot(why: str, more: dict[str, Any]) -> None:
    """The slot that holds the history is the only one, whatever the request reuses of it."""
    s = world(backend("a", 1), reuse_probability=0.0)

    assert SaveReason.BRANCH not in saves(arrive(s, R, **({"ids": QUESTION} | more))), why


@pytest.mark.parametrize(("runs", "wanted"), [(False, [SaveReason.BRANCH]), (True, [])])
def test_each_running_stream_waits_for_the_save(runs: bool, wanted: list[SaveReason]) -> None:
    """The save takes 8 s, and is worth about 10 s to a sibling that comes in half of the cases."""
    s = world(save_s=8.0)
    if runs:
        busy(s.state.inventory, A1, until=100.0, pending=OTHER)
    else:
        slot(s, A1).hold(Content(Resident(OTHER)))

    assert saves(arrive(s, R, QUESTION, slot_hint=0)) == wanted


def test_a_slot_that_must_not_be_saved() -> None:
    s = world()
    busy(s.state.inventory, A1, until=100.0, pending=OTHER)
    slot(s, A0).hold(replace(slot(s, A0).content, savable=False))

    assert SaveReason.BRANCH not in saves(arrive(s, R, QUESTION))


def test_the_slot_of_another_tenant_shows_nothing() -> None:
    """A dear save, and a sibling only in the slot of another tenant: its prompts are not ours."""
    s = world(save_s=2.0)
    busy(s.state.inventory, A1, until=100.0, pending=OTHER)
    slot(s, A1).hold(replace(slot(s, A1).content, tenant=Tenant("other")))

    assert saves(arrive(s, R, QUESTION)) == []


@pytest.mark.parametrize(
    ("saved_before", "sibling", "wanted"),
    [(1000, True, [SaveReason.BRANCH]), (2000, True, []), (1000, False, [])],
)
def test_on_a_disk_half_is_new_and_a_sibling_known(
    saved_before: int, sibling: bool, wanted: list[SaveReason]
) -> None:
    """An agent alone does not write its whole state with each turn."""
    holding = {A0: HISTORY} | ({A1: OTHER[:8000]} if sibling else {})
    before = [snapshot("s", HISTORY[: 4 * saved_before])]
    s = world(backend(on_disk=True), holding=holding, snapshots=before, saves_late=True)
    assert saves(arrive(s, R, QUESTION)) == wanted
