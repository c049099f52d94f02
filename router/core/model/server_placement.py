"""Predict the slot that llama-server picks for a server-placed request.

llama-server takes the idle slot with the longest common prefix (llama-server.md section 2.2). A
slot that holds all of the prompt but its last token is picked, unless another holds as much.
"""

from enum import StrEnum

from router.base.tokens import common_prefix, count
from router.base.types import BackendInfo, Prompt, Request
from router.core.model.slots import Resident


class SlotClaim(StrEnum):
    """The slot claim of a request: the way in which it takes slots of a backend."""

    PINNED = "pinned"  # the slot of the router's choice
    STEERED = "steered"  # the server picks the slot where the router has computed the prompt
    SERVER_PLACED = "server_placed"  # the server picks any idle slot
    SEVERAL = "several"  # the server picks several slots
    UNMANAGED = "unmanaged"  # any slots of a backend where the router decides nothing


def slot_claim(request: Request, info: BackendInfo, *, computes_first: bool) -> SlotClaim:
    """Return how a request takes slots of a backend.

    `computes_first`: the policy computes a prompt in a slot before the request is sent.
    """
    if not info.is_managed:
        return SlotClaim.UNMANAGED
    if request.takes_several:
        return SlotClaim.SEVERAL
    if request.pinnable:
        return SlotClaim.PINNED
    steered = computes_first and can_be_steered(request, info)
    return SlotClaim.STEERED if steered else SlotClaim.SERVER_PLACED


def can_be_steered(request: Request, info: BackendInfo) -> bool:
    """Return whether the server places the request and a prefill decides on which slot.

    Not where tenants are kept apart: another tenant's slot could have as much of the prompt. Nor
    where the server would compute it again.
    """
    prompt = request.prompt
    known = prompt.n_tokens > 1 and prompt.is_exact and not request.adapted
    picked = not (request.pinnable or request.takes_several)
    reused = request.reuse and info.extends and info.caches_by_default
    return picked and known and reused and info.is_managed and not request.tenant


def may_hold(held: Resident, prompt: Prompt) -> bool:
    """Return whether a slot may hold that much; unread tokens may be the prompt's rest."""
    common = common_prefix(held.tokens, prompt.tokens)
    if common >= prompt.n_tokens - 1:
        return True
    goes_on = held.may_hold_more or common + held.unread >= prompt.n_tokens - 1
    return goes_on and common == count(held.tokens)


def holds_up(request: Request, first: Request, *, computed: bool) -> bool:
    """Return whether a request, if admitted now, could block `first` at the placement gate.

    `computed`: the leased slot of `first` surely has its prompt.
    """
    if not computed:
        return True  # `first` is sent only when no slot is being prepared
    return request.prompt.is_exact and Resident(request.prompt.tokens).covers(first.prompt)
