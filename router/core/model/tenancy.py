"""Tenants: their namespaces, slots with content that a request must not meet, and their budgets.

A request's tenant is `NO_TENANT` where tenants are not kept apart. Content of unknown origin has
the tenant `NO_TENANT`, too; where tenants are kept apart, no request owns such content.

A budget is tokens in a minute and on a day of UTC. Minutes are of a clock that nobody sets: a step
of the wall time would end one early.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from math import ceil, inf

from msgspec import Struct

from router.base.errors import TenantQuotaError
from router.base.tokens import common_prefix, count
from router.base.types import TENANT_SALT, BackendInfo, Cost, Namespace, Request, Tenant
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


_WINDOWS_S = {"minute": 60, "day": 86400}


class Limits(Struct, frozen=True):
    """Limits of a tenant; None: there is none. Tokens are those that servers compute for it."""

    max_requests: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    reused: float = 0.0  # what a reused token counts, 0 to 1
    background: bool = False  # its requests are served after those of others

    def of(self, window: str) -> int | None:
        """Return the most tokens in a window, "minute" or "day"."""
        return self.tokens_per_minute if window == "minute" else self.tokens_per_day

    def tokens(self, cost: Cost) -> float:
        """Return the tokens that a cost counts."""
        return cost.computed + cost.generated + self.reused * cost.cached


class Budget:
    """The tokens that tenants with limits have used."""

    def __init__(
        self, wall_now: Callable[[], float] = lambda: 0.0, now: Callable[[], float] | None = None
    ) -> None:
        """Set up without limits. `wall_now`: UNIX seconds; `now`: clock seconds, or the same."""
        self.limits: Mapping[str, Limits] = {}  # by tenant
        # What each tenant used on a day, counted since 1970: for a start, or a clock that is set.
        self.costs_of_day: Callable[[int], Mapping[str, Cost]] = lambda _: {}
        self._clocks = {"minute": now or wall_now, "day": wall_now}
        self._used = {window: defaultdict[str, float](float) for window in _WINDOWS_S}
        self._number = dict.fromkeys(_WINDOWS_S, 0)  # of each window, since 1970

    def limit(self, limits: Mapping[str, Limits]) -> None:
        """Replace the limits of all tenants."""
        self.limits = limits
        self.recount()

    def spend(self, tenant: str, cost: Cost) -> None:
        """Count what a request of a tenant has cost."""
        if (limits := self.limits.get(tenant)) is not None:
            self._begin_windows()
            for used in self._used.values():
                used[tenant] += limits.tokens(cost)

    def left(self, tenant: str) -> float:
        """Return the tokens that a tenant may still use now; inf: it has no limit."""
        if (limits := self.limits.get(tenant)) is None:
            return inf
        self._begin_windows()
        most = ((window, limits.of(window)) for window in _WINDOWS_S)
        return min(
            (limit - self._used[window][tenant] for window, limit in most if limit is not None),
            default=inf,
        )

    @property
    def window_left_s(self) -> float:
        """Return the seconds until a window ends."""
        return min(long - self._clocks[window]() % long for window, long in _WINDOWS_S.items())

    def refusal(self, tenant: str) -> TenantQuotaError | None:
        """Return the error for a tenant that has used its tokens; None: it may use some."""
        if self.left(tenant) > 0:
            return None
        found: list[TenantQuotaError] = []
        for window, seconds in _WINDOWS_S.items():
            limit, now = self.limits[tenant].of(window), self._clocks[window]()
            if limit is not None and self._used[window][tenant] >= limit:
                left_s = seconds - now % seconds
                told = f"this tenant has used its {limit} tokens of this {window}"
                again = f"try again in {ceil(left_s)} s"
                found.append(
                    TenantQuotaError(f"{told}; {again}", limit=limit, window=window, left_s=left_s)
                )
        return max(found, key=lambda error: error.left_s)

    def recount(self) -> None:
        """Count what was used on this day anew, as `costs_of_day` has it."""
        used = self._used["day"]
        used.clear()
        for tenant, cost in self.costs_of_day(self._number["day"]).items():
            if (limits := self.limits.get(tenant)) is not None:
                used[tenant] = limits.tokens(cost)

    def _begin_windows(self) -> None:
        for window, seconds in _WINDOWS_S.items():
            if (number := int(self._clocks[window]() // seconds)) != self._number[window]:
                self._number[window] = number
                self._used[window].clear()
                if window == "day":
                    self.recount()
