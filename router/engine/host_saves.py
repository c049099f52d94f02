"""Saves of slots that another host asks for: waited for, and withdrawn with the last that waits."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from router.base.types import SlotId
from router.core.inventory.inventory import Inventory
from router.core.model.slots import NO_WORK


@dataclass(slots=True)
class _Awaited:
    """The next save of a slot, and how many wait for it."""

    over: asyncio.Event = field(default_factory=asyncio.Event)
    n_waiting: int = 0


@dataclass(slots=True)
class HostSaves:
    """The slots whose saves other hosts wait for. `ask` and `withdraw` tell the scheduler."""

    ask: Callable[[SlotId], None]
    withdraw: Callable[[SlotId], None]
    inventory: Inventory
    _awaited: dict[SlotId, _Awaited] = field(default_factory=dict)

    async def save(self, slot: SlotId) -> None:
        """Save a slot, once it is computed; return after its next save, if there ever is one.

        Nothing is computed for cancelled calls alone.
        """
        awaited = self._awaited.setdefault(slot, _Awaited())
        awaited.n_waiting += 1
        try:
            self.ask(slot)
            if self.is_under_way(slot):
                await awaited.over.wait()
        finally:
            awaited.n_waiting -= 1
            if not awaited.n_waiting and self._awaited.get(slot) is awaited:
                del self._awaited[slot]
                self.withdraw(slot)

    def is_under_way(self, slot: SlotId) -> bool:
        """Return whether a slot is being saved, or will be when its prefill is over."""
        slots = self.inventory.slots.of(slot.backend)
        work = slots[slot.index].work if slot.index < len(slots) else NO_WORK
        return work.for_host or len(work.saving) > 0

    def saved(self, slot: SlotId) -> None:
        """Note that a save of a slot is over, well or badly."""
        if (awaited := self._awaited.pop(slot, None)) is not None:
            awaited.over.set()
