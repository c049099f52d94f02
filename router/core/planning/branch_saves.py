"""Branch saves: save a prompt before its answer is generated, for prompts that branch off from it.

A running slot cannot be saved. A second agent that forks from the same history while the first
still answers would find only what was saved before.
"""

from router.base.tokens import common_prefix, count
from router.core.inventory.backend import Backend
from router.core.inventory.inventory import Inventory
from router.core.model.jobs import RequestJob
from router.core.model.memory_kinds import goes_back
from router.core.model.policy import Policy
from router.core.model.slots import Slot
from router.core.model.tuning import TUNING
from router.core.planning.displacement import can_save


def branch_save_pays(inventory: Inventory, job: RequestJob) -> bool:
    """Return whether to save the job's slot before its request is sent.

    It pays if the save costs less than what a prompt with the same beginning is expected to gain.
    The request and all running streams wait for the save. The other prompt would compute the
    beginning, or wait for the answer, whichever is shorter.
    """
    backend, slot = inventory.backend_of(job.slot), inventory.slots[job.slot]
    prompt, rates = job.request.prompt, backend.rates
    held = slot.content.resident.tokens
    cost_s = rates.save_s(count(held)) * (1 + backend.slots.running) + 2 * rates.handling_s.value
    generation_s = rates.generation_s(job.request.max_new_tokens)
    if cost_s >= generation_s:
        return False
    if not (job.knows_slot and job.request.reuse and prompt.is_exact) or not slot.content.savable:
        return False
    if not can_save(inventory, backend, count(held)):
        return False
    shared = common_prefix(held, prompt.tokens)
    # A kind that cannot go back is of use as a whole only.
    if not goes_back(backend.info.memory_kind) and shared < count(held):
        return False
    saved = min(inventory.reach(slot), shared)
    gain_s = min(rates.prefill_s(shared - saved, saved), generation_s)
    gain_s -= rates.restore_s(round(shared * rates.bytes_per_token.value))
    # The slots are compared with the prompt only where a certain sibling would be worth it.
    return (
        cost_s < gain_s and cost_s < _chance(inventory.policy, backend, slot, job, shared) * gain_s
    )


def _chance(policy: Policy, backend: Backend, own: Slot, job: RequestJob, shared: int) -> float:
    """Return the chance that a prompt branches off while the answer is generated.

    Another slot that holds most of this beginning shows that prompts do.
    """
    tokens, tenant = job.request.prompt.tokens, job.request.tenant
    others = (s for s in backend.slots if s.id != own.id and s.content.tenant == tenant)
    for slot in others:
        held = slot.work.pending or slot.content.resident.tokens
        if shared < 2 * common_prefix(held, tokens):
            return policy.reuse_chance(job.request.keep_s)
    return TUNING.branch_chance
