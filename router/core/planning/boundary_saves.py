"""Boundary saves: stop a prefill at a boundary, and save its state as a snapshot.

For memory kinds with states that can only be extended. A snapshot of such a kind is of use only if
all of it is a prefix of the prompt. One is therefore needed wherever prompts diverge. Nothing is
computed twice for it: the cost is the saves.
"""

from router.base.tokens import before_media, common_prefix, head
from router.base.types import Request
from router.core.inventory.backend import Backend
from router.core.inventory.inventory import Inventory
from router.core.model.memory_kinds import can_restore, goes_back
from router.core.model.plan import Candidate
from router.core.model.tenancy import namespace_of
from router.core.planning.displacement import can_save


def boundary_saves(
    inventory: Inventory, request: Request, chosen: Candidate
) -> tuple[tuple[int, ...], float]:
    """Return the lengths to stop at, ascending, and the seconds of their saves.

    A length is worth it if the save costs less than a snapshot there is expected to save, weighted
    by the chance that a later prompt asks for it. Candidates:

    1. the boundaries of the messages, or without any the last token but one;
    2. where the prompt diverges from what a snapshot or a slot holds: another prompt has diverged
       there before.
    """
    backend, prompt = inventory.backend_of(chosen.slot), request.prompt
    info, kind = backend.info, backend.info.memory_kind
    if goes_back(kind) or not can_restore(kind) or request.takes_several:
        return (), 0.0
    if not backend.reuses(request):
        return (), 0.0
    rates, catalog = backend.rates, inventory.catalog
    chance, running = inventory.policy.reuse_chance(request.keep_s), backend.slots.running
    # Besides the save: one more request before it, and one more check of a file after it.
    handling_s = 2 * rates.handling_s.value
    namespace = namespace_of(info, request.tenant)
    positions = {*(prompt.boundaries or (len(prompt) - 1,)), _branch(inventory, backend, request)}
    if prompt.n_media:  # the router computes no media: it stops before the first
        text = before_media(prompt.tokens)
        positions = {text, *(at for at in positions if at < text)}
    found: list[int] = []
    cost_s = 0.0
    for position in sorted(positions):
        ahead = chosen.reused_tokens < position < len(prompt)
        if not ahead or not can_save(inventory, backend, position):
            continue
        there = catalog.reach(kind, namespace, head(prompt.tokens, position))
        there = max([there, *found])
        size_bytes = round(position * rates.bytes_per_token.value)
        save_s = rates.save_s(position)
        gain_s = rates.prefill_s(position - there, there) - rates.restore_s(size_bytes)
        if request.warms or save_s * (1 + running) + handling_s < chance * gain_s:
            found.append(position)
            cost_s += save_s + handling_s
    return tuple(found), cost_s


def _branch(inventory: Inventory, backend: Backend, request: Request) -> int:
    """Return how many tokens the prompt shares with anything known of its tenant."""
    tokens, tenant = request.prompt.tokens, request.tenant
    slots = [slot for slot in backend.slots if slot.content.tenant == tenant]
    shared = [common_prefix(slot.content.resident.tokens, tokens) for slot in slots]
    return max([inventory.catalog.covered(namespace_of(backend.info, tenant), tokens), *shared])
