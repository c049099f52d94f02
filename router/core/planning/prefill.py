"""Price the wait for a backend's prefill queue: the seconds computed before a prompt.

`core/execution/prefill_queue.py` decides by the same rank which job computes next. A long prompt is
computed in chunks (`piece`).
"""

from math import inf
from typing import NamedTuple

from router.base.tokens import Tokens, common_prefix, count
from router.base.types import SlotId
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.jobs import InPrefillQueue, RequestJob
from router.core.model.tuning import TUNING


class Ahead(NamedTuple):
    """One prefill that a backend has to compute: its rank, and the seconds left."""

    rank_s: float
    remaining_s: float


def ahead(inventory: Inventory, backend: Backend, now: float) -> list[Ahead]:
    """Return all prefills of the backend, running or waiting."""
    return [part for slot in backend.prefilling for part in slot_ahead(inventory, slot, now)]


def rank(needs_s: float, waited_s: float, *, background: bool = False) -> float:
    """Return the rank of a prefill: the lowest goes first."""
    behind_s = TUNING.background_behind_s if background else 0.0
    return behind_s + needs_s - TUNING.prefill_patience * waited_s


def rank_of(job: RequestJob, needs_s: float, waited_s: float) -> float:
    """Return the rank of a job's prefill."""
    return rank(needs_s, waited_s, background=job.request.background)


def before_s(parts: list[Ahead], rank_s: float) -> float:
    """Return the seconds before a prefill of that rank starts; of equals it goes last."""
    return sum(part.remaining_s for part in parts if part.rank_s <= rank_s)


def remaining_prefill_s(inventory: Inventory, slot: Slot, tokens: Tokens) -> float:
    """Return the seconds that computing `tokens` adds to what the slot holds."""
    n, common = count(tokens), common_prefix(slot.content.resident.tokens, tokens)
    there = inventory.reusable(slot, n, common)
    return slot.backend.rates.prefill_s(n - there, there)


def slot_ahead(inventory: Inventory, slot: Slot, now: float) -> list[Ahead]:
    """Return the work of a slot: the chunk under way, ahead of all; the rest."""
    job = slot.job
    if not (isinstance(job, RequestJob) and job.chunk_until):
        return [prefill_ahead(inventory, slot, now)]
    piece_s, remaining_s = job.chunk_until - now, max(slot.work.busy_until - job.chunk_until, 0.0)
    return [
        Ahead(-inf, max(piece_s, 0.0)),
        Ahead(rank_of(job, remaining_s, job.past_queue_s), remaining_s),
    ]


def prefill_ahead(inventory: Inventory, slot: Slot, now: float) -> Ahead:
    """Return the entry of a prompt of which nothing is being computed now."""
    remaining_s, job = (remaining_prefill_s(inventory, slot, slot.work.pending), slot.job)
    if not isinstance(job, RequestJob):
        return Ahead(rank(remaining_s, 0.0), remaining_s)
    if not isinstance(job.doing, InPrefillQueue):  # a restore brings it as far as was planned
        remaining_s = min(remaining_s, max(slot.work.busy_until - now, 0.0))
    return Ahead(rank_of(job, remaining_s, job.prefill_queue_s(now)), remaining_s)


def piece(inventory: Inventory, slot: SlotId, wanted: Tokens) -> int | None:
    """Return up to which of the `wanted` tokens to compute for now. None: all of them.

    1. All for kinds that cannot go back: the server makes a checkpoint in each chunk, and forgets
       an older one for it (llama-server.md section 4.2).
    2. All where the slot holds a prefix and perhaps more, of unknown length: a chunk would cut that
       off. A slot of which nothing is known was usually never used.
    """
    limit_s = inventory.policy.prefill_chunk_s
    backend = inventory.backends[slot.backend]
    if limit_s is None or not backend.info.memory_kind.goes_back:
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
    return backend.running > 0 or any(slot.id != own for slot in backend.prefilling)
