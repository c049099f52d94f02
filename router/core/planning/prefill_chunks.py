"""How much of a prompt is computed at once, for others on the same backend and those who come.

llama-server puts up to `--batch-size` tokens of a prompt (2,048, if not told otherwise) into one
batch with whatever else it runs, and nobody gets a token before that batch is over. In pieces,
streams go on after each, and the first token of a prompt that is computed does not wait for
another's whole batch.
"""

from router.base.tokens import Tokens, common_prefix, count
from router.base.types import SlotId
from router.core.fleet.fleet import Fleet
from router.core.model.memory_kinds import goes_back

# The server computes so many in one go, if not told otherwise (`--ubatch-size`): less is slower.
_LEAST = 512
# Alone so much longer: who comes meanwhile waits for it (`core/turns.py`).
_ALONE = 4.0
# What is left over is no piece of its own if it is less than half of one.
_LAST = 1.5


def piece(fleet: Fleet, slot: SlotId, wanted: Tokens) -> int | None:
    """Up to which of the `wanted` tokens to compute for now. None: all of them.

    1. Of kinds that cannot go back, all: the server makes a checkpoint in each piece, and forgets
       an older one for it (llama-server.md section 4.2).
    2. All where each start empties the idle slots (section 0.6).
    3. All where the slot holds a beginning of it and perhaps more, which nobody has measured: a
       piece would cut that off. Where nothing is known of a slot, it was never used as a rule.
    """
    limit_s = fleet.policy.prefill_chunk_s
    info = fleet.infos[slot.backend]
    if limit_s is None or not goes_back(info.memory_kind) or not info.keeps_idle_slots:
        return None
    if not _beside_others(fleet, slot):
        limit_s *= _ALONE
    resident = fleet.slots[slot].resident
    held = common_prefix(resident.tokens, wanted)
    if held == count(resident.tokens):
        if resident.unsure and resident.tokens:
            return None
        held += resident.unread  # an answer that nobody has read yet: not to be cut off
    left = count(wanted) - held
    left_s = fleet.rates[slot.backend].prefill_s(left, held)
    if left_s <= limit_s:
        return None
    most = max(round(left * limit_s / left_s) // _LEAST, 1) * _LEAST
    return held + most if left > _LAST * most else None


def _beside_others(fleet: Fleet, own: SlotId) -> bool:
    """Others on the backend wait for their next token, or for their first."""
    prefilling = fleet.prefilling(own.backend)
    return fleet.running(own.backend) > 0 or any(slot.id != own for slot in prefilling)
