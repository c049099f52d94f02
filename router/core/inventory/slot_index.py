"""Index over slots: which of them hold or compute tokens that a prompt begins with."""

from dataclasses import dataclass

from router.base.tokens import EMPTY, Tokens
from router.base.types import BackendId, SlotId, Tenant
from router.core.inventory.prefix_index import PrefixIndex
from router.core.model.slots import BackendSlots, Phase, SlotTable


class Holdings:
    """An index over the slots of a table, to compare a prompt with all of them at once.

    A query first takes in the changes since the last query. Changes are few, and finding none
    takes one comparison per backend.
    """

    def __init__(self) -> None:
        self._index: PrefixIndex[SlotId] = PrefixIndex()
        self._known: dict[BackendId, _Known] = {}

    def shared(
        self, slots: SlotTable, tokens: Tokens, tenant: Tenant | None = None
    ) -> dict[SlotId, int]:
        """Return the number of leading tokens that each slot of `tenant` shares; None: any tenant.

        Slots that share none are left out. A leased slot counts with what its lease computes.
        """
        self.catch_up(slots)
        found = self._index.shares(tokens)
        if tenant is None:
            return dict(found)
        return {name: common for name, common in found if slots[name].offered_tenant == tenant}

    def catch_up(self, slots: SlotTable) -> None:
        """Take in the changes of the table, so that the next query need not wait for it."""
        idle = Phase.IDLE
        for backend, bench in slots.benches():
            known = self._known.get(backend)
            if known is None or known.bench is not bench:
                known = self._anew(backend, bench)
            elif known.changes == bench.changes:
                continue
            known.changes, tokens_of = bench.changes, known.tokens
            for at, slot in enumerate(bench):
                held = slot.content.resident.tokens if slot.phase is idle else slot.work.pending
                if held is not tokens_of[at]:
                    self._change(slot.id, tokens_of[at], held)
                    tokens_of[at] = held

    def forget(self, backend: BackendId) -> None:
        """Drop the slots of a backend."""
        known = self._known.pop(backend, None)
        for index, before in enumerate(known.tokens if known else ()):
            self._change(SlotId(backend, index), before, EMPTY)

    def _anew(self, backend: BackendId, bench: BackendSlots) -> "_Known":
        """Start the entry of a backend that is new or came back."""
        self.forget(backend)
        known = self._known[backend] = _Known(bench, -1, [EMPTY] * len(bench.slots))
        return known

    def _change(self, slot: SlotId, before: Tokens, held: Tokens) -> None:
        if before:
            self._index.remove(before, slot)
        if held:
            self._index.insert(held, slot)


@dataclass(slots=True)
class _Known:
    """The indexed tokens of each slot of a backend, and `BackendSlots.changes` at that time."""

    bench: BackendSlots
    changes: int
    tokens: list[Tokens]
