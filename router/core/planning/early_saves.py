"""Saves before an answer, for prompts that diverge from this one or branch off from it.

A boundary save stops a prefill at a boundary. It is for memory kinds with states that can only be
extended: a snapshot of them is of use only if all of it is a prefix of the prompt, so one is needed
wherever prompts diverge. Nothing is computed twice for it: the cost is the saves.

A branch save saves a whole prompt before its answer is generated. A running slot cannot be saved,
so a second agent that forks from the same history would find only what was saved before.
"""

from router.base.tokens import before_media, common_prefix, count, head
from router.base.types import Request
from router.core.inventory.inventory import Inventory
from router.core.model.backend import Backend, Slot
from router.core.model.jobs import RequestJob
from router.core.model.plan import Candidate
from router.core.model.tenancy import namespace_of
from router.core.model.tuning import TUNING
from router.core.planning.pricing import can_save


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
    backend, prompt = inventory.backends[chosen.slot.backend], request.prompt
    info, kind = backend.info, backend.info.memory_kind
    if kind.goes_back or not kind.can_restore or request.takes_several:
        return (), 0.0
    if not backend.reuses(request):
        return (), 0.0
    rates, catalog = backend.rates, inventory.catalog
    fate, running = inventory.returns.next(request), backend.running
    chance = inventory.reuse_chance(request.keep_s, fate)
    # Besides the save: one more request before it, and one more check of a file after it.
    handling_s = 2 * rates.handling_s.value
    namespace = namespace_of(info, request.tenant)
    positions = {
        *(prompt.boundaries or (prompt.n_tokens - 1,)),
        _branch(inventory, backend, request),
    }
    if prompt.n_media:  # the router computes no media: it stops before the first
        text = before_media(prompt.tokens)
        positions = {text, *(at for at in positions if at < text)}
    found: list[int] = []
    cost_s = 0.0
    for position in sorted(positions):
        ahead = chosen.reused_tokens < position < prompt.n_tokens
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


def branch_save_pays(inventory: Inventory, job: RequestJob) -> bool:
    """Return whether to save the job's slot before its request is sent.

    It pays if the save costs less than what a prompt with the same beginning is expected to gain.
    The request and all running streams wait for the save. The other prompt would compute the
    beginning, or wait for the answer, whichever is shorter. On a disk, where a state is written
    whole, half of it has to be new, and prompts like it have to branch off (docs/adr/0039).
    """
    backend, slot = job.own.backend, job.own
    prompt, rates = job.request.prompt, backend.rates
    held = slot.content.resident.tokens
    cost_s = rates.save_s(count(held)) * (1 + backend.running) + 2 * rates.handling_s.value
    generation_s = rates.generation_s(job.request.max_new_tokens)
    if cost_s >= generation_s:
        return False
    if not (job.knows_slot and job.request.reuse and prompt.is_exact) or not slot.content.savable:
        return False
    if not can_save(inventory, backend, count(held)):
        return False
    shared = common_prefix(held, prompt.tokens)
    # A kind that cannot go back is of use as a whole only.
    if not backend.info.memory_kind.goes_back and shared < count(held):
        return False
    saved = min(inventory.reach(slot), shared)
    if inventory.wears(backend) and 2 * saved > count(held):
        return False
    gain_s = min(rates.prefill_s(shared - saved, saved), generation_s)
    gain_s -= rates.restore_s(round(shared * rates.bytes_per_token.value))
    # The slots are compared with the prompt only where a certain sibling would be worth it.
    return cost_s < gain_s and cost_s < _chance(inventory, backend, slot, job, shared) * gain_s


def _chance(
    inventory: Inventory, backend: Backend, own: Slot, job: RequestJob, shared: int
) -> float:
    """Return the chance that a prompt branches off while the answer is generated.

    Another slot that holds most of this beginning shows that prompts do.
    """
    tokens, tenant = job.request.prompt.tokens, job.request.tenant
    others = (s for s in backend.slots if s.id != own.id and s.content.tenant == tenant)
    for slot in others:
        held = slot.work.pending or slot.content.resident.tokens
        if shared < 2 * common_prefix(held, tokens):
            return inventory.reuse_chance(job.request.keep_s, own.fate)
    return 0.0 if inventory.wears(backend) else TUNING.branch_chance
