"""Which slot a server picks for a request that cannot be pinned, as far as that can be known.

It takes the idle slot with the longest common prefix (llama-server.md section 2.2). A slot that
holds the prompt but for its last token is that one, unless another holds as much.
"""

from router.base.frozen import dataclass
from router.base.tokens import Tokens, common_prefix, count
from router.base.types import BackendInfo, Prompt, Request
from router.core.model.slots import Resident


@dataclass(frozen=True, slots=True)
class Expected:
    """A request that waits at the gate; whether its prompt was `computed` in the slot we mean."""

    request: Request
    computed: bool


def can_be_steered(request: Request, info: BackendInfo) -> bool:
    """The server picks the slot, and what we put into one decides which."""
    prompt = request.prompt
    known = len(prompt) > 1 and not (prompt.unknown or prompt.n_media or request.adapted)
    placed = not (request.pinnable or request.whole_backend)
    return placed and known and request.reuse and info.generates and info.keeps_idle_slots


def will_hold(tokens: Tokens, prompt: Prompt) -> bool:
    """All but the last token of a prompt are the beginning of what is computed or restored."""
    return common_prefix(tokens, prompt.tokens) >= len(prompt) - 1 > 0


def is_computed(held: Resident, prompt: Prompt) -> bool:
    """A slot has so much of a prompt, for sure."""
    return will_hold(held.tokens, prompt)


def may_hold(held: Resident, prompt: Prompt) -> bool:
    """A slot may have so much of a prompt; what nobody has read may be its rest."""
    common = common_prefix(held.tokens, prompt.tokens)
    if common >= len(prompt) - 1:
        return True
    goes_on = held.unsure or common + held.unread >= len(prompt) - 1
    return goes_on and common == count(held.tokens)


def holds_up(request: Request, first: Expected) -> bool:
    """A request, if it were granted now, could be in the way of one that waits at the gate."""
    if not first.computed:
        return True  # that one goes when nothing is prepared
    prompt, meant = request.prompt, first.request
    foreign = request.tenant != meant.tenant
    if prompt.unknown or prompt.n_media:
        return foreign
    common = common_prefix(prompt.tokens, meant.prompt.tokens)
    return common >= len(meant.prompt) - 1 or (foreign and common == len(prompt))
