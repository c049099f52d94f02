"""Which slots hold, or are computing, something that a prompt begins with."""

from router.core.prefix_index import PrefixIndex
from router.core.slots import Phase, SlotTable
from router.tokens import EMPTY, Tokens
from router.types import BackendId, SlotId, Tenant


class Holdings:
    """An index over the slots of a table, so that a prompt is compared with all of them at once.

    It follows the table: asked, it takes in what has changed since it was asked before. Changes
    are few, and telling that there was none takes a look at each slot and no comparison of tokens.
    """

    def __init__(self) -> None:
        self._index: PrefixIndex[SlotId] = PrefixIndex()
        self._known: dict[BackendId, list[Tokens]] = {}  # what the index has of each slot

    def shared(
        self, slots: SlotTable, tokens: Tokens, tenant: Tenant | None = None
    ) -> dict[SlotId, int]:
        """How many leading tokens of `tokens` each slot of a tenant shares, of any if it is None;
        those that share none are left out. Of a leased slot counts what its lease computes."""
        idle = Phase.IDLE
        for backend, ones in slots.by_backend():
            known = self._known.get(backend)
            if known is None or len(known) != len(ones):
                known = self._resize(backend, len(ones))
            for at, slot in enumerate(ones):
                held = slot.resident.tokens if slot.phase is idle else slot.pending
                if held is not known[at]:
                    self._change(slot.id, known[at], held)
                    known[at] = held
        found = self._index.shares(tokens)
        if tenant is None:
            return dict(found)
        return {name: common for name, common in found if slots[name].whose == tenant}

    def forget(self, backend: BackendId) -> None:
        """A backend has no slots any more."""
        self._resize(backend, 0)
        del self._known[backend]

    def _change(self, slot: SlotId, before: Tokens, held: Tokens) -> None:
        if before:
            self._index.remove(before, slot)
        if held:
            self._index.insert(held, slot)

    def _resize(self, backend: BackendId, n_slots: int) -> list[Tokens]:
        """A backend is new, or came back with another number of slots."""
        for index, before in enumerate(self._known.get(backend, [])):
            self._change(SlotId(backend, index), before, EMPTY)
        self._known[backend] = [EMPTY] * n_slots
        return self._known[backend]
