"""Tenants: the namespace of a tenant, and slots with content that a request must not meet.

A request's tenant is `NO_TENANT` where tenants are not kept apart. Content of unknown origin has
the tenant `NO_TENANT`, too; where tenants are kept apart, no request owns such content.
"""

from router.base.tokens import common_prefix, count
from router.base.types import TENANT_SALT, BackendInfo, Namespace, Request, Tenant
from router.core.model.backend import Slot

# Occurs in no digest of a model and in no name of a tenant.
_MARK = "@"


def namespace_of(info: BackendInfo, tenant: Tenant) -> Namespace:
    """Return the namespace of a tenant's snapshots on this backend.

    The record of a state file has the namespace, so the tenant of a snapshot survives a restart.
    """
    return tenanted(info.namespace, tenant)


def tenanted(model: Namespace, tenant: Tenant) -> Namespace:
    """Return the namespace of a tenant's snapshots of a model."""
    return Namespace(f"{model}{_MARK}{tenant}") if tenant else model


def model_of(namespace: Namespace) -> Namespace:
    """Return the namespace without its tenant, as backends have it."""
    return Namespace(namespace.partition(_MARK)[0])


def facts_of(name: Namespace) -> str:
    """Return the part of a namespace that is equal on all hosts, however they measured."""
    return name.partition(":")[0].partition(".")[0]


def is_foreign(one: Namespace, other: Namespace) -> bool:
    """Return whether two namespaces are of one model with different settings."""
    return model_of(one) != model_of(other) and facts_of(one) == facts_of(other)


def salted(tenant: str, salt: str) -> Tenant:
    """Return the tenant of prompts with a `cache_salt`; without one the tenant itself."""
    return Tenant(f"{tenant}{TENANT_SALT}{salt}" if salt else tenant)


def is_of(owner: str, named: str) -> bool:
    """Return whether a tenant, or `NAME@TENANT`, names an owner, or it is that with a salt."""
    return owner == named or owner.startswith(f"{named}{TENANT_SALT}")


def tenant_of(namespace: Namespace) -> Tenant:
    """Return the tenant of a namespace."""
    return Tenant(namespace.partition(_MARK)[2])


def attracts(slot: Slot, request: Request, *, computed_first: bool) -> bool:
    """Return whether the server may pick this slot for another tenant's tokens in it.

    The server takes the slot with the longest common prefix (llama-server.md section 2.2).
    `computed_first`: the leased slot holds all of the prompt but its last token, so it is picked
    unless another slot holds as much. Unread tokens may be anything, and so may the answer of a
    running slot.
    """
    if slot.offered_tenant == request.tenant or not request.reuse:
        return False
    prompt = request.prompt
    if not computed_first or not prompt.is_exact:
        return True
    if slot.is_idle:
        held, goes_on = (
            slot.content.resident.tokens,
            slot.content.resident.may_hold_more or slot.content.resident.unread > 0,
        )
    else:
        held, goes_on = slot.work.pending, True
    common = common_prefix(held, prompt.tokens)
    return common >= prompt.n_tokens - 1 or (goes_on and common == count(held))


def may_attract(slot: Slot, request: Request, *, computed_first: bool) -> bool:
    """Return whether an idle slot could `attracts` with any tokens of its length.

    Emptying the slot takes time, which another tenant can measure. The time may tell at most the
    length of the slot's content, not whether the content was the prompt.
    """
    if slot.offered_tenant == request.tenant or not request.reuse:
        return False
    held, prompt = slot.content.resident, request.prompt
    if not computed_first or not prompt.is_exact:
        return True
    return held.may_hold_more or held.unread > 0 or len(held) >= prompt.n_tokens - 1
