"""Leases: taken before any work, released once, harmless when stale."""

import pytest
from msgspec.structs import replace

from router.base.errors import StaleLeaseError
from router.base.tokens import EMPTY
from router.base.types import Lease, Tenant
from router.core.model.slots import (
    EMPTY_SLOT,
    NO_WORK,
    TRANSITIONS,
    Content,
    Move,
    Phase,
    Resident,
    Slot,
    SlotTable,
    Work,
)
from tests.support.scheduler.build import A0, A1, B0, R2, A, B, R, tokens

HELD = Content(Resident(tokens(1, 2)))


def slot_in(phase: Phase) -> tuple[Slot, Lease]:
    """Return a slot in this phase, and its last lease."""
    slot = Slot(A0)
    lease = slot.lease(R, NO_WORK)
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


def make(slot: Slot, move: Move, lease: Lease) -> None:
    match move:
        case Move.LEASE:
            slot.lease(R2, NO_WORK)
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
    slot = Slot(A0, content=Content(save_decided=True))
    lease = slot.lease(R, NO_WORK)
    slot.do(Work(pending=tokens(9), sharing=True))

    slot.release(lease, HELD, 5.0)

    assert slot == Slot(A0, generation=1, content=HELD, last_used=5.0)
    assert slot.is_idle


def test_a_lease_is_given_back_once() -> None:
    slot, lease = slot_in(Phase.IDLE)

    with pytest.raises(StaleLeaseError, match="used at generation 1"):
        slot.release(lease, HELD, 1.0)


def test_a_late_lease_says_nothing_about_its_successor() -> None:
    slot, late = slot_in(Phase.IDLE)
    current = slot.lease(R, NO_WORK)

    assert not slot.holds(late)
    with pytest.raises(StaleLeaseError):
        slot.release(late, HELD, 1.0)
    assert slot.holds(current)


def test_a_lost_slot_holds_nothing_and_is_held_by_nobody() -> None:
    slot, lease = slot_in(Phase.RUNNING)
    slot.hold(replace(HELD, savable=False))
    slot.do(Work(pending=tokens(9), sharing=True))

    slot.lose()

    assert not slot.holds(lease)
    assert (slot.content, slot.work) == (Content(savable=False), NO_WORK)


def test_unread_tokens_count() -> None:
    assert len(Resident(tokens(1, 2), unread=3)) == 5


def test_a_table_finds_its_slots() -> None:
    table = SlotTable()
    table.add(A, 2)
    table.add(B, 1)

    assert [slot.id for slot in table] == [A0, A1, B0]
    assert table[A1].id == A1
    assert [slot.id for slot in table.of(B)] == [B0]


def test_a_table_knows_how_many_slots_are_in_which_phase() -> None:
    table = SlotTable()
    assert not table.any_idle()
    bench = table.add(A, 2)
    assert table.any_idle()
    lease = table[A0].lease(R, NO_WORK)
    table[A1].lease(R2, NO_WORK)

    assert bench.phases[Phase.PREPARING] == 2
    assert not table.any_idle()
    table[A0].start(lease)
    assert (bench.phases[Phase.RUNNING], bench.phases[Phase.PREPARING]) == (1, 1)
    bench = table.add(A, 1)
    assert {phase: n for phase, n in bench.phases.items() if n} == {Phase.IDLE: 1}


def test_losing_a_backend_tells_who_was_there() -> None:
    table = SlotTable()
    table.add(A, 2)
    lease = table[A1].lease(R, NO_WORK)

    assert table.lose(A) == [R]
    assert {slot.phase for slot in table} == {Phase.LOST}
    assert not table.holds(lease)
    assert table.lose(B) == []


def test_restart_raises_generations_and_changes_slot_count() -> None:
    table = SlotTable()
    table.add(A, 2)
    first, second = table[A0].lease(R, NO_WORK), table[A1].lease(R2, NO_WORK)

    table.add(A, 1)

    assert not table.holds(first)
    assert not table.holds(second)  # its slot no longer exists
    assert table[A0].lease(R, NO_WORK).generation > first.generation


def test_what_could_be_saved_follows_the_slots() -> None:
    table = SlotTable()
    table.add(A, 2)
    assert table.unsaved() == {}

    for where, now in ((A0, 2.0), (A1, 1.0)):
        table[where].release(table[where].lease(R, NO_WORK), HELD, now)
    assert table.unsaved() == {A: 1.0}

    table[A1].hold(replace(HELD, save_decided=True))
    assert table.unsaved() == {A: 2.0}

    lease = table[A1].lease(R, NO_WORK)
    assert table.unsaved() == {}  # a slot of the backend is in use

    table[A1].release(lease, HELD, 5.0)
    assert table.unsaved() == {A: 2.0}

    table.lose(A)
    assert table.unsaved() == {}

    table.add(A, 1)
    table[A0].hold(HELD)
    assert table.unsaved() == {A: 0.0}

    table.remove(A)
    assert table.unsaved() == {}


def test_leased_slot_shares_what_its_lease_computes() -> None:
    table = SlotTable()
    table.add(A, 3)
    for where in (A0, A1):
        table[where].hold(Content(Resident(tokens(1, 2, 3)), Tenant("x")))
    table[A1].lease(R, NO_WORK)
    table[A1].do(Work(Tenant("y"), pending=tokens(1, 5)))

    assert table.shared(tokens(1, 2, 4)) == {A0: 2, A1: 1}
    assert table.shared(tokens(1, 2, 4), Tenant("x")) == {A0: 2}
    assert table.shared(EMPTY) == table.shared(tokens(9)) == {}
