"""What a client wants kept: its saves are protected, and pay more readily."""

from math import inf

import pytest

from router.base.types import MemoryKind, Prompt, RequestId, SnapshotId
from router.core.model.policy import SnapshotLimits
from tests.support.scheduler import fact
from tests.support.scheduler.build import (
    A0,
    BYTES_PER_TOKEN,
    backend,
    rates,
    run_of,
    scheduler,
    snapshot,
)
from tests.support.scheduler.drive import NOW, arrive, finish, prefilled, restored, saved, slot
from tests.support.scheduler.driven import Driven

LONG = run_of(1000)
S1 = SnapshotId("s1")


def until(s: Driven, name: SnapshotId = S1) -> float:
    return s.state.inventory.catalog.protection.until(name)


def answered(keep_s: float = 0.0) -> Driven:
    """Return a scheduler whose only slot holds the prompt of an answered request."""
    s = scheduler(backend("a", 1), coalesce_above_s=None)
    arrive(s, prompt=Prompt(LONG), keep_s=keep_s)
    finish(s, prompt_tokens=1000, generated_tokens=1)
    return s


def idle_save(s: Driven, at: float = NOW) -> None:
    s.handle(fact.tick(), at)
    s.handle(fact.saved(RequestId("save-1"), A0, snapshot("s1", LONG), 0.001), at)


def test_what_an_idle_save_writes_is_protected() -> None:
    s = answered(keep_s=300.0)
    idle_save(s, NOW + 10)
    assert until(s) == NOW + 310


def test_a_key_that_nobody_checks_is_no_owner() -> None:
    s = scheduler(backend("a", 1), coalesce_above_s=None)
    arrive(s, prompt=Prompt(LONG), keep_s=300.0, client="key made up", sender="192.0.2.1")
    finish(s, prompt_tokens=1000, generated_tokens=1)
    assert slot(s, A0).content.keep.owner == "192.0.2.1"


def test_without_a_hint_nothing_is_protected() -> None:
    s = answered()
    idle_save(s)
    assert s.state.inventory.catalog.protection.total_bytes == 0


def test_the_last_request_of_a_slot_decides() -> None:
    s = answered(keep_s=300.0)
    assert slot(s, A0).content.keep.seconds == 300
    arrive(s, "next", prompt=Prompt(run_of(1100)))
    finish(s, "next", prompt_tokens=1100, generated_tokens=1)
    assert slot(s, A0).content.keep.seconds == 0


def test_a_restore_begins_the_time_again() -> None:
    s = scheduler(backend("a", 1), snapshots=[snapshot("s1", LONG)])
    arrive(s, prompt=Prompt(run_of(1100)), keep_s=300.0)
    assert until(s) == NOW + 300
    restored(s, 1000, of="s1")


def test_a_boundary_save_is_protected() -> None:
    s = scheduler(backend("a", 1, memory_kind=MemoryKind.HYBRID), coalesce_above_s=None)
    arrive(s, prompt=Prompt(run_of(905), boundaries=(600, 900)), keep_s=300.0)
    prefilled(s, prompt_tokens=600, cached_tokens=0)
    saved(s, snapshot("s1", run_of(600)))
    assert until(s) == NOW + 300


@pytest.mark.parametrize(("keep_s", "saves"), [(0.0, 0), (300.0, 1)])
def test_a_save_pays_sooner_where_the_prompt_comes_back(keep_s: float, saves: int) -> None:
    s = answered(keep_s=keep_s)
    # 10 s of prefill, 4 s of save and 4 s of restore: too little is spared for an even chance.
    s.state.inventory.backends[A0.backend].rates = rates(prefill_s=0.01, transfer_s=4.0)
    assert len(s.handle(fact.tick(), NOW + 10)) == saves


def test_protection_lapses_before_anything_is_evicted() -> None:
    """Else a snapshot of worth would go in place of one whose time is over."""
    s = scheduler(
        backend("a", 1),
        coalesce_above_s=None,
        limits=SnapshotLimits(max_bytes=2 * 1000 * BYTES_PER_TOKEN, protected_share=1.0),
    )
    catalog = s.state.inventory.catalog
    catalog.add(snapshot("over", run_of(1000, 3)), MemoryKind.FULL, 0.1, until=NOW + 1)
    catalog.add(snapshot("worth", run_of(1000, 2)), MemoryKind.FULL, 9.0)
    arrive(s, prompt=Prompt(LONG))
    finish(s, prompt_tokens=1000, generated_tokens=1)
    idle_save(s, NOW + 100)

    assert SnapshotId("over") not in catalog
    assert SnapshotId("worth") in catalog


def test_what_a_stranger_left_is_not_kept() -> None:
    s = answered(keep_s=inf)
    s.handle(fact.found_busy({A0: slot(s, A0).generation}), NOW)
    (watch,) = s.state.inventory.jobs
    s.handle(fact.quiet(watch, 700), NOW)
    assert slot(s, A0).content.keep.seconds == 0
