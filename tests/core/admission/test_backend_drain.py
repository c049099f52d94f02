"""Drained backends, and a reload of the configuration."""

import pytest
from msgspec.structs import replace

from router.base.errors import NoBackendError, QueueFullError
from router.base.tokens import Tokens
from router.base.types import BackendInfo, MemoryKind, Outcome, RequestId, SlotStatus, SnapshotId
from router.core.model.effects import Delete, Detach, Prove, Save, SaveReason
from router.core.model.policy import Policy, PolicyName, SnapshotLimits
from router.core.model.request_queue import QueueLimits
from router.core.model.servers import Server
from router.core.model.slots import Phase
from router.core.planning.planner import plan
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    NS,
    A,
    B,
    R,
    backend,
    request,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import NOW, arrive, finish, names, plan_of, restored, slot
from tests.support.scheduler.driven import Driven
from tests.support.scheduler.servers import server

LONG = run_of(1000)
SAVE = RequestId("save-1")
LARGE = SnapshotLimits(min_tokens=100)  # no content of the requests here is worth a file
DRAINING = fact.draining(A)


def test_an_idle_backend_is_let_go_of_at_once() -> None:
    s = scheduler(backend("a"), backend("b"))

    assert s.handle(DRAINING, NOW) == [Detach(A)]
    assert A not in s.state.inventory.up
    assert slot(s, A0).phase is Phase.LOST
    assert s.state.inventory.draining == set()


def test_so_is_one_that_nobody_has_seen_yet() -> None:
    s = scheduler(backend("b"))

    assert s.handle(DRAINING, NOW) == [Detach(A)]


def test_what_runs_ends_first_and_nothing_new_comes() -> None:
    s = scheduler(backend("a", 2), backend("b", 1), coalesce_above_s=None, limits=LARGE)
    arrive(s, "r")
    assert slot(s, A0).phase is Phase.RUNNING

    assert s.handle(DRAINING, NOW) == []
    assert plan_of(arrive(s, "r2")).chosen.slot == B0
    assert arrive(s, "r3") == []  # waits for b, although a has an idle slot
    assert names(finish(s, "r")) == ["Account", "Detach"]
    assert names(finish(s, "r2")) == ["Account", "Dispatch"]


def test_what_is_worth_it_is_saved_before() -> None:
    """Also without idle saves, and for content that was not worth a save beside a stream."""
    s = scheduler(backend("a", 2), holding={A0: LONG, A1: run_of(900, 7)}, idle_save_after_s=None)
    slot(s, A0).hold(replace(slot(s, A0).content, save_decided=True))

    assert s.handle(DRAINING, NOW) == [Save(SAVE, A0, NS, SaveReason.IDLE)]
    (second,) = s.handle(fact.saved(SAVE, A0, snapshot("s", LONG), 0.001), NOW)
    assert isinstance(second, Save)
    assert s.handle(fact.save_failed(second.request, A1, "disk full"), NOW) == [Detach(A)]
    assert SnapshotId("s") in s.state.inventory.catalog


def unprobed(*contents: Tokens) -> tuple[Driven, BackendInfo]:
    """Return a scheduler with a backend that was not probed, and the facts that a probe finds."""
    tried = backend("a", len(contents))
    found = dict(zip((A0, A1), contents, strict=False))
    untried = replace(tried, untried=True, kv_dir=None, memory_kind=MemoryKind.UNKNOWN)
    return scheduler(untried, holding=found), tried


def test_unprobed_backend_is_probed_before_its_slots_are_saved() -> None:
    """Regression: the first swap lost all conversations of a server without an idle moment."""
    s, tried = unprobed(LONG, run_of(900, 7))

    assert s.handle(DRAINING, NOW) == [Prove(A)]
    (first,) = s.handle(fact.probed(tried, frozenset({0, 1})), NOW)
    (second,) = s.handle(fact.saved(SAVE, A0, snapshot("s", LONG), 0.001), NOW)

    assert first == Save(SAVE, A0, NS, SaveReason.IDLE)
    assert isinstance(second, Save)
    assert second.slot == A1


def test_slot_that_the_probe_could_not_put_back_is_not_saved() -> None:
    s, tried = unprobed(LONG)
    s.handle(DRAINING, NOW)

    assert s.handle(fact.probed(tried), NOW) == [Detach(A)]


@pytest.mark.parametrize("answer", [fact.probe_put_off(A, frozenset({0})), fact.backend_down(A)])
def test_probe_that_fails_holds_up_no_drain(answer: fact.Fact) -> None:
    s, _ = unprobed(LONG)
    s.handle(DRAINING, NOW)

    assert s.handle(answer, NOW) == [Detach(A)]


def test_unprobed_backend_with_too_little_is_detached_at_once() -> None:
    s, _ = unprobed(run_of(50))
    s.state.inventory.catalog.limits = LARGE

    assert s.handle(DRAINING, NOW) == [Detach(A)]


def test_unprobed_server_is_probed_for_its_next_process() -> None:
    """Regression: a model for titles was never probed, and each load began a probe in vain."""
    s, _ = unprobed(run_of(50))
    s.state.inventory.catalog.limits = LARGE
    s.state.inventory.servers.by_name[A] = Server(server("a"))

    assert s.handle(DRAINING, NOW) == [Prove(A)]


def test_unprobed_backend_is_probed_before_the_router_stops() -> None:
    s, tried = unprobed(LONG)

    assert s.handle(fact.stopping(save=True), NOW) == [Prove(A)]
    assert names(s.handle(fact.probed(tried, frozenset({0})), NOW)) == ["Save"]


def test_router_that_stops_without_saves_probes_nothing() -> None:
    s, _ = unprobed(LONG)

    assert s.handle(fact.stopping(save=False), NOW) == []


def test_what_was_saved_there_is_restored_elsewhere() -> None:
    s = scheduler(backend("a", 1), backend("b", 1), holding={A0: LONG})
    s.handle(DRAINING, NOW)
    assert arrive(s, ids=run_of(1001)) == []  # the save under way is about to be of use
    effects = s.handle(fact.saved(SAVE, A0, snapshot("s", LONG), 0.001), NOW)

    assert names(effects) == ["Restore", "Detach"]
    assert plan_of(restored(s, 1000)).chosen.slot == B0


def test_nobody_waits_for_a_slot_of_a_draining_backend() -> None:
    """Holds even for a policy that prefers the owner of a prefix."""
    policy = PolicyName.PREFER_OWNER
    s = scheduler(backend("a", 1), backend("b", 1), policy=policy, limits=LARGE, max_wait_s=999.0)
    s.state.inventory.policy = replace(s.state.inventory.policy, coalesce_above_s=None)
    first = arrive(s, "r", LONG, max_new_tokens=1)
    assert plan_of(first).chosen.slot == A0
    if_it_stayed = plan(request("r2", LONG), s.state.inventory, NOW)
    assert if_it_stayed is not None
    assert if_it_stayed.chosen.wait_for == A0
    s.handle(DRAINING, NOW)

    assert plan_of(arrive(s, "r2", LONG)).chosen.slot == B0


def test_who_leaves_nothing_behind_is_waited_for() -> None:
    """Abandoned slots are waited for until they are known to be idle."""
    s = scheduler(backend("a", 1), coalesce_above_s=None, limits=LARGE)
    arrive(s)
    s.handle(DRAINING, NOW)

    assert names(finish(s, outcome=Outcome.CLIENT_GONE)) == ["Account", "WatchSlot"]
    assert s.handle(fact.quiet(R, 0), NOW) == [Detach(A)]


def test_strangers_who_use_it_are_not_waited_for() -> None:
    s = scheduler(backend("a", 2), idle_save_after_s=None)
    s.handle(fact.found_busy({A0: slot(s, A0).generation}), NOW)
    assert slot(s, A0).phase is Phase.ABANDONED

    assert Detach(A) in s.handle(fact.draining(A), NOW)
    assert not s.state.inventory.jobs


def test_it_may_go_down_before_it_is_done() -> None:
    """Detached only after the request's end is reported: its client is still connected."""
    s = scheduler(backend("a", 1), backend("b", 1), coalesce_above_s=None, limits=LARGE)
    arrive(s)
    s.handle(DRAINING, NOW)

    assert s.handle(fact.backend_down(A), NOW) == []
    assert names(finish(s, outcome=Outcome.BACKEND_ERROR)) == ["Account", "Detach"]


def test_and_come_up_again() -> None:
    s = scheduler(backend("a", 1), coalesce_above_s=None, limits=LARGE)
    arrive(s)
    s.handle(DRAINING, NOW)
    s.handle(fact.backend_up(backend("a", 1), (SlotStatus(0, False, 0, 100),)), NOW)

    assert arrive(s, "r2") == []
    assert names(finish(s, outcome=Outcome.BACKEND_ERROR)) == ["Account", "Detach"]


def test_drained_only_backend_counts_as_down_for_waiters() -> None:
    limits = QueueLimits(no_backend_s=5.0)
    s = scheduler(backend("a", 1), queue=limits, coalesce_above_s=None, limits=LARGE)
    arrive(s)
    s.handle(DRAINING, NOW)
    assert arrive(s, "r2") == []

    assert s.next_wakeup(NOW) == NOW + 5.0
    (reject,) = s.handle(fact.tick(), NOW + 5.0)
    assert isinstance(reject.error, NoBackendError)  # type: ignore[union-attr]


def test_it_may_be_kept_after_all() -> None:
    s = scheduler(backend("a", 2), coalesce_above_s=None, limits=LARGE)
    arrive(s)
    s.handle(DRAINING, NOW)
    assert arrive(s, "r2") == []

    assert names(s.handle(fact.undrained(A), NOW)) == ["Dispatch"]
    assert names(finish(s)) == ["Account"]


def test_it_is_not_tried_out_any_more() -> None:
    s = scheduler(backend("a", 2), coalesce_above_s=None, limits=LARGE)
    arrive(s)
    s.handle(DRAINING, NOW)
    s.handle(fact.probe_due(A), NOW)

    assert slot(s, A1).is_idle


def test_of_one_that_is_removed_nothing_is_kept() -> None:
    s = scheduler(backend("a", 1), backend("b", 1), holding={A0: LONG, B0: run_of(9, 7)})
    s.state.inventory.policy = Policy(PolicyName.STICKY)
    arrive(s, session="x")
    finish(s, prompt_tokens=3, generated_tokens=1)
    arrive(s, "r2", [7] * 9)
    finish(s, "r2", prompt_tokens=9, generated_tokens=1)
    s.state.inventory.reach(slot(s, A0))
    generation = slot(s, A0).generation
    s.handle(DRAINING, NOW)
    assert s.handle(fact.removed(A), NOW) == []

    inventory = s.state.inventory
    assert [one.id for one in inventory.slots] == [B0]
    assert A not in inventory.backends
    assert set(inventory.sticky.values()) <= {B0}
    assert inventory.slots.shared(LONG) == {}

    # Late events of the old backend do not match slots of the new one.
    s.handle(fact.backend_up(backend("a", 1)), NOW)
    assert slot(s, A0).generation >= generation


@pytest.mark.parametrize(
    ("limits", "left"),
    [(SnapshotLimits(max_bytes=1000), 1), (SnapshotLimits(max_tokens=0), 0), (SnapshotLimits(), 2)],
)
def test_what_is_over_the_new_limits_goes(limits: SnapshotLimits, left: int) -> None:
    two = [snapshot("s", [1], 600), snapshot("t", [2], 600)]
    s = scheduler(backend("a", 1), snapshots=two)

    effects = s.handle(fact.configured(Policy(), limits, QueueLimits()), NOW)
    assert [type(effect) for effect in effects] == [Delete] * (2 - left)
    assert len(s.state.inventory.catalog) == left


def test_another_policy_and_another_queue_are_in_force_at_once() -> None:
    s = scheduler(backend("a", 1), coalesce_above_s=None, limits=LARGE)
    for name in ("r", "r2", "r3"):
        s.handle(fact.arrived(request(name)), NOW)
    policy = Policy(PolicyName.LEAST_BUSY)

    (reject,) = s.handle(
        fact.configured(policy, SnapshotLimits(), QueueLimits(max_requests=1)), NOW
    )
    assert isinstance(reject.error, QueueFullError)  # type: ignore[union-attr]
    assert s.state.inventory.policy is policy
    assert B not in s.state.inventory.up


def test_what_is_far_over_the_new_limits_goes_little_by_little() -> None:
    """Next steps are due at once, after other waiting events."""
    s = scheduler(backend("a", 1), snapshots=[snapshot(f"s{n}", [n], 10) for n in range(100)])
    steps = [s.handle(fact.configured(Policy(), SnapshotLimits(max_bytes=300), QueueLimits()), NOW)]
    while s.next_wakeup(NOW) == NOW:
        steps.append(s.handle(fact.tick(), NOW))

    assert [len(effects) for effects in steps] == [32, 32, 6]
    assert {type(effect) for effects in steps for effect in effects} == {Delete}
    assert s.state.inventory.catalog.total_bytes == 300
