"""Whose tokens are whose: the namespace of a tenant, and who must not meet whom in a slot.

A request's tenant is `NOBODY` where tenants are not kept apart. So is what is of unknown origin:
where they are kept apart, no request is ever its owner.
"""

from router.base.tokens import common_prefix, count
from router.base.types import BackendInfo, Namespace, Request, Tenant
from router.core.model.slots import Slot

# In no digest of a model and in no name of a tenant.
_MARK = "@"


def namespace_of(info: BackendInfo, tenant: Tenant) -> Namespace:
    """Where snapshots of a tenant's tokens on this backend belong; it is written into the
    manifest, so a restart does not forget whose they are."""
    return Namespace(f"{info.namespace}{_MARK}{tenant}") if tenant else info.namespace


def model_of(namespace: Namespace) -> Namespace:
    """The same without the tenant: what backends have."""
    return Namespace(namespace.partition(_MARK)[0])


def tenant_of(namespace: Namespace) -> Tenant:
    """Whose it is."""
    return Tenant(namespace.partition(_MARK)[2])


def tempts(slot: Slot, request: Request, *, computed_first: bool) -> bool:
    """The server, which picks the slot itself, may pick this one for another's tokens in it.

    It takes the one with the longest common prefix (llama-server.md section 2.2). That is the slot
    we mean, if the prompt but for its last token is `computed_first` there. What nobody has read
    may be anything; and of a slot that runs, its answer may.
    """
    if slot.whose == request.tenant or not request.reuse:
        return False
    prompt = request.prompt
    if not computed_first or prompt.unknown or prompt.n_media:
        return True
    if slot.is_idle:
        held, goes_on = slot.resident.tokens, slot.resident.unsure or slot.resident.unread > 0
    else:
        held, goes_on = slot.pending, True
    common = common_prefix(held, prompt.tokens)
    return common >= len(prompt) - 1 or (goes_on and common == count(held))


def may_tempt(slot: Slot, request: Request, *, computed_first: bool) -> bool:
    """An idle slot that `tempts` for whatever tokens it has. Emptying it takes time, and that shall
    tell another tenant how long the slot's content was at most, not whether it was the prompt."""
    if slot.whose == request.tenant or not request.reuse:
        return False
    held, prompt = slot.resident, request.prompt
    if not computed_first or prompt.unknown or prompt.n_media:
        return True
    return held.unsure or held.unread > 0 or len(held) >= len(prompt) - 1
