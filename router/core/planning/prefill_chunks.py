"""Prefill chunks: how much of a prompt is computed at once beside other requests.

llama-server puts up to `--batch-size` tokens of a prompt (2,048 by default) into one batch with
whatever else it runs. No client gets a token before that batch is over. With chunks, streams go on
after each one, and the first token of a computed prompt does not wait for another's whole batch.
"""

from router.base.tokens import Tokens, common_prefix, count
from router.base.types import SlotId
from router.core.inventory.backend import Backend
from router.core.inventory.inventory import Inventory
from router.core.model.memory_kinds import goes_back
from router.core.model.tuning import TUNING


def piece(inventory: Inventory, slot: SlotId, wanted: Tokens) -> int | None:
    """Return up to which of the `wanted` tokens to compute for now. None: all of them.

    1. All for kinds that cannot go back: the server makes a checkpoint in each chunk, and forgets
       an older one for it (llama-server.md section 4.2).
    2. All where the slot holds a prefix and perhaps more, of unknown length: a chunk would cut that
       off. A slot of which nothing is known was usually never used.
    """
    limit_s = inventory.policy.prefill_chunk_s
    backend = inventory.backends[slot.backend]
    if limit_s is None or not goes_back(backend.info.memory_kind):
        return None
    if not _beside_others(backend, slot):
        limit_s *= TUNING.chunk_alone
    resident = inventory.slots[slot].content.resident
    held = common_prefix(resident.tokens, wanted)
    if held == count(resident.tokens):
        if resident.may_hold_more and resident.tokens:
            return None
        held += resident.unread  # an unread answer must not be cut off
    remaining = count(wanted) - held
    remaining_s = backend.rates.prefill_s(remaining, held)
    if remaining_s <= limit_s:
        return None
    most = (
        max(round(remaining * limit_s / remaining_s) // TUNING.chunk_least, 1) * TUNING.chunk_least
    )
    return held + most if remaining > TUNING.chunk_last * most else None


def _beside_others(backend: Backend, own: SlotId) -> bool:
    """Return True if others on the backend wait for their next token, or their first."""
    slots = backend.slots
    return slots.running > 0 or any(slot.id != own for slot in slots.prefilling)
