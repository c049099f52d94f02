"""Slot index, checked against a comparison with each slot."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.base.tokens import common_prefix, pack
from router.base.types import RequestId
from router.core.inventory.prefix_index import Holdings
from router.core.model.slots import NO_WORK, Content, Resident, SlotTable, Work
from tests.support.scheduler.build import A0, A1, A, B, tokens

ids = st.lists(st.integers(1, 2), max_size=4).map(pack)


@given(st.data())
def test_it_follows_the_slots_whatever_happens_to_them(data: Any) -> None:
    table, holdings = SlotTable(), Holdings()
    for number in range(data.draw(st.integers(1, 12))):
        backend = data.draw(st.sampled_from([A, B]))
        slots = table.of(backend)
        match data.draw(st.sampled_from(["up", "down", "holds", "leased"])):
            case "up":
                table.add(backend, data.draw(st.integers(1, 3)))
            case "down":
                table.lose(backend)
            case "holds" if slots:
                data.draw(st.sampled_from(slots)).hold(Content(Resident(data.draw(ids))))
            case "leased" if slots and slots[0].is_idle:
                slots[0].lease(RequestId(f"r{number}"), Work(pending=data.draw(ids)))
        prompt = data.draw(ids)

        held = {s.id: s.content.resident.tokens if s.is_idle else s.work.pending for s in table}
        shared = {slot: common_prefix(one, prompt) for slot, one in held.items()}
        assert holdings.shared(table, prompt) == {slot: n for slot, n in shared.items() if n}


def test_a_leased_slot_counts_by_what_its_lease_computes() -> None:
    table = SlotTable()
    table.add(A, 2)
    for slot in table:
        slot.hold(Content(Resident(tokens(1, 2, 3))))
    table[A1].lease(RequestId("r"), NO_WORK)
    table[A1].do(replace(table[A1].work, pending=tokens(1, 5)))

    assert Holdings().shared(table, tokens(1, 2, 4)) == {A0: 2, A1: 1}
