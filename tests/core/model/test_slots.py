"""Leases: taken before any work, released once, harmless when stale."""

import pytest
from msgspec.structs import replace

from router.base.errors import StaleLeaseError
from router.base.tokens import EMPTY
from router.base.types import Tenant
from router.core.model.backend import Backend, LeaseHolder, Slot
from router.core.model.slots import (
    EMPTY_SLOT,
    NO_WORK,
    TRANSITIONS,
    Content,
    Move,
    Phase,
    Resident,
    Work,
)
from tests.support.scheduler.build import (
    A0,
    A1,
    B0,
    R2,
    A,
    B,
    R,
    backend,
    inventory,
    leased,
    tokens,
)

HELD = Content(Resident(tokens(1, 2)))


def slot_in(phase: Phase) -> tuple[Slot, LeaseHolder]:
    """Return a slot in this phase, and its last lease."""
    slot = Slot(A0, Backend(backend()))
    lease = leased(slot, R, NO_WORK)
    match phase:
        case Phase.IDLE:
            slot.release(lease, EMPTY_SLOT, 0.0)
        case Phase.RUNNING:
            slot.start(lease)
        case Phase.ABANDONED:
            slot.abandon(lease)
        case Phase.LOST:
            slot.lose()
        case Phase.PREPARING:
            pass
    assert slot.phase is phase
    return slot, lease


def make(slot: Slot, move: Move, lease: LeaseHolder) -> None:
    match move:
        case Move.LEASE:
            leased(slot, R2, NO_WORK)
        case Move.START:
            slot.start(lease)
        case Move.ABANDON:
            slot.abandon(lease)
        case Move.RELEASE:
            slot.release(lease, EMPTY_SLOT, 0.0)
        case Move.LOSE:
            slot.lose()


@pytest.mark.parametrize("move", Move)
@pytest.mark.parametrize("phase", Phase)
def test_the_table_is_the_life_of_a_slot(phase: Phase, move: Move) -> None:
    slot, lease = slot_in(phase)

    if move in TRANSITIONS[phase]:
        make(slot, move, lease)
        assert slot.phase is TRANSITIONS[phase][move]
    else:
        with pytest.raises(StaleLeaseError):
            make(slot, move, lease)
        assert slot.phase is phase


def test_every_phase_can_be_lost_and_only_idle_is_leased() -> None:
    assert all(moves[Move.LOSE] is Phase.LOST for moves in TRANSITIONS.values())
    assert [p for p, moves in TRANSITIONS.items() if Move.LEASE in moves] == [Phase.IDLE]


def test_a_released_slot_holds_what_it_was_released_with() -> None:
    slot = Slot(A0, Backend(backend()), content=Content(save_decided=True))
    lease = leased(slot, R, NO_WORK)
    slot.do(Work(pending=tokens(9), sharing=True))
    slot.note_reach((slot.backend.info, 0, 2))

    slot.release(lease, HELD, 5.0)

    assert (slot.content, slot.work, slot.last_used) == (HELD, NO_WORK, 5.0)
    assert slot.reached is None, "it was of the former content"
    assert slot.is_idle
    assert slot.job is None


def test_a_lease_is_given_back_once() -> None:
    slot, lease = slot_in(Phase.IDLE)

    with pytest.raises(StaleLeaseError, match="not leased to r"):
        slot.release(lease, HELD, 1.0)


def test_a_late_lease_says_nothing_about_its_successor() -> None:
    slot, late = slot_in(Phase.IDLE)
    current = leased(slot, R, NO_WORK)

    assert slot.job is not late
    with pytest.raises(StaleLeaseError):
        slot.release(late, HELD, 1.0)
    assert slot.job is current


def test_a_lost_slot_holds_nothing_and_is_held_by_nobody() -> None:
    slot, _ = slot_in(Phase.RUNNING)
    slot.hold(replace(HELD, savable=False))
    slot.do(Work(pending=tokens(9), sharing=True))

    slot.lose()

    assert slot.job is None
    assert (slot.content, slot.work) == (Content(savable=False), NO_WORK)


def test_unread_tokens_count() -> None:
    assert len(Resident(tokens(1, 2), unread=3)) == 5


def test_a_table_finds_its_slots() -> None:
    table = inventory(backend("a", 2), backend("b", 1)).slots

    assert [slot.id for slot in table] == [A0, A1, B0]
    assert table[A1].id == A1
    assert [slot.id for slot in table.of(B)] == [B0]


def test_a_backend_knows_how_many_slots_are_in_which_phase() -> None:
    made = inventory(backend("a", 2))
    table, there = made.slots, made.backends[A]
    assert table.any_idle()
    lease = leased(table[A0], R, NO_WORK)
    leased(table[A1], R2, NO_WORK)

    assert there.phases[Phase.PREPARING] == 2
    assert not table.any_idle()
    table[A0].start(lease)
    assert (there.phases[Phase.RUNNING], there.phases[Phase.PREPARING]) == (1, 1)
    there.attach(1)
    assert {phase: n for phase, n in there.phases.items() if n} == {Phase.IDLE: 1}


def test_losing_a_backend_ends_its_leases() -> None:
    made = inventory(backend("a", 2))
    lease = leased(made.slots[A1], R, NO_WORK)
    made.lose(A)

    assert {slot.phase for slot in made.slots} == {Phase.LOST}
    assert lease.own.job is None


def test_restart_raises_generations_and_changes_slot_count() -> None:
    made = inventory(backend("a", 2))
    first, second = leased(made.slots[A0], R, NO_WORK), leased(made.slots[A1], R2, NO_WORK)

    made.backends[A].attach(1)

    assert first.own.job is second.own.job is None
    assert len(made.slots.of(A)) == 1
    assert made.slots[A0].generation >= first.own.generation
    assert made.slots[A0] is not first.own


def test_what_could_be_saved_follows_the_slots() -> None:
    made = inventory(backend("a", 2))
    table, there = made.slots, made.backends[A]
    assert there.unsaved == []

    for where in (A0, A1):
        table[where].hold(HELD)
    assert there.unsaved == [table[A0], table[A1]]

    table[A1].hold(replace(HELD, save_decided=True))
    assert there.unsaved == [table[A0]]

    lease = leased(table[A1], R, NO_WORK)
    assert there.unsaved == [], "a slot of the backend is in use"

    table[A1].release(lease, HELD, 5.0)
    assert there.unsaved == [table[A0], table[A1]]

    there.gate.holder = R
    assert there.unsaved == []


def test_leased_slot_shares_what_its_lease_computes() -> None:
    table = inventory(backend("a", 3)).slots
    for where in (A0, A1):
        table[where].hold(Content(Resident(tokens(1, 2, 3)), Tenant("x")))
    leased(table[A1], R, NO_WORK)
    table[A1].do(Work(Tenant("y"), pending=tokens(1, 5)))

    assert table.shared(tokens(1, 2, 4)) == {A0: 2, A1: 1}
    assert table.shared(tokens(1, 2, 4), Tenant("x")) == {A0: 2}
    assert table.shared(EMPTY) == table.shared(tokens(9)) == {}
