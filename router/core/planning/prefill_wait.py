"""Price the wait for the prefill queue of a backend: what is computed before a prompt, in seconds.

Reads slots only. Which job computes next is decided in `core/execution/prefill_queue.py`, by the
same rank.
"""

from math import inf
from typing import NamedTuple

from router.base.tokens import Tokens, common_prefix, count
from router.base.types import BackendId
from router.core.fleet.fleet import Fleet
from router.core.model.slots import Slot

# A second in line counts for so much of a second to compute: a piece may take twice as long as
# predicted before another goes on that was equal.
PATIENCE = 0.5


class Ahead(NamedTuple):
    """Something that a backend has to compute, and its place among others."""

    rank_s: float
    left_s: float


def ahead(fleet: Fleet, backend: BackendId, now: float) -> list[Ahead]:
    """All prompts that the backend has in hand, or in line."""
    return [part for slot in fleet.prefilling(backend) for part in slot_ahead(fleet, slot, now)]


def rank(needs_s: float, waited_s: float) -> float:
    """Who has less goes first."""
    return needs_s - PATIENCE * waited_s


def before_s(parts: list[Ahead], rank_s: float) -> float:
    """Seconds until the turn of a prompt of that rank; of equals, who is there goes first."""
    return sum(part.left_s for part in parts if part.rank_s <= rank_s)


def seconds_left(fleet: Fleet, slot: Slot, tokens: Tokens) -> float:
    """What computing these takes on top of what the slot holds of them."""
    n, common = count(tokens), common_prefix(slot.resident.tokens, tokens)
    there = fleet.reusable(slot, n, common)
    return fleet.rates[slot.id.backend].prefill_s(n - there, there)


def slot_ahead(fleet: Fleet, slot: Slot, now: float) -> list[Ahead]:
    """What a slot has to compute: what it computes at this moment, before all others; the rest."""
    if not slot.piece_until:
        return [prefill_ahead(fleet, slot, now)]
    piece_s, rest_s = slot.piece_until - now, max(slot.busy_until - slot.piece_until, 0.0)
    return [Ahead(-inf, max(piece_s, 0.0)), Ahead(rank(rest_s, slot.stood_s), rest_s)]


def prefill_ahead(fleet: Fleet, slot: Slot, now: float) -> Ahead:
    """Of a prompt of which nothing is computed at this moment."""
    left_s = seconds_left(fleet, slot, slot.pending)
    if slot.stands_since is None:  # a file is restored, which brings it as far as was planned
        left_s = min(left_s, max(slot.busy_until - now, 0.0))
    return Ahead(rank(left_s, stood_s(slot, now)), left_s)


def stood_s(slot: Slot, now: float) -> float:
    return slot.stood_s + (now - slot.stands_since if slot.stands_since is not None else 0.0)
