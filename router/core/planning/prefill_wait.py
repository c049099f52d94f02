"""Price the wait for a backend's prefill queue: the seconds computed before a prompt.

`core/execution/prefill_queue.py` decides by the same rank which job computes next.
"""

from math import inf
from typing import NamedTuple

from router.base.tokens import Tokens, common_prefix, count
from router.core.inventory.backend import Backend
from router.core.inventory.inventory import Inventory
from router.core.model.jobs import InPrefillQueue, RequestJob
from router.core.model.slots import Slot
from router.core.model.tuning import TUNING


class Ahead(NamedTuple):
    """One prefill that a backend has to compute: its rank, and the seconds left."""

    rank_s: float
    remaining_s: float


def ahead(inventory: Inventory, backend: Backend, now: float) -> list[Ahead]:
    """Return all prefills of the backend, running or waiting."""
    return [part for slot in backend.slots.prefilling for part in slot_ahead(inventory, slot, now)]


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
    return inventory.backends[slot.id.backend].rates.prefill_s(n - there, there)


def slot_ahead(inventory: Inventory, slot: Slot, now: float) -> list[Ahead]:
    """Return the work of a slot: the chunk under way, ahead of all; the rest."""
    job = inventory.job_in(slot)
    if not (isinstance(job, RequestJob) and job.chunk_until):
        return [prefill_ahead(inventory, slot, now)]
    piece_s, remaining_s = job.chunk_until - now, max(slot.work.busy_until - job.chunk_until, 0.0)
    return [
        Ahead(-inf, max(piece_s, 0.0)),
        Ahead(rank_of(job, remaining_s, job.past_queue_s), remaining_s),
    ]


def prefill_ahead(inventory: Inventory, slot: Slot, now: float) -> Ahead:
    """Return the entry of a prompt of which nothing is being computed now."""
    remaining_s, job = (
        remaining_prefill_s(inventory, slot, slot.work.pending),
        inventory.job_in(slot),
    )
    if not isinstance(job, RequestJob):
        return Ahead(rank(remaining_s, 0.0), remaining_s)
    if not isinstance(job.doing, InPrefillQueue):  # a restore brings it as far as was planned
        remaining_s = min(remaining_s, max(slot.work.busy_until - now, 0.0))
    return Ahead(rank_of(job, remaining_s, job.prefill_queue_s(now)), remaining_s)
