"""Identify the client of a request by its key, and the key's tenant; without keys, accept all.

Decides what a request without a valid key may still do, and limits the requests of a tenant. What
tenants share is decided in the scheduler.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from router.base.api_keys import digest_of
from router.base.errors import TenantBusyError, UnauthorizedError
from router.base.ports import Telemetry
from router.base.types import NO_TENANT, Caller, Tenant
from router.core.model.tenancy import Budget, salted
from router.llama.routes import PUBLIC
from router.web.server.call import Call

# The page of a llama-server with --api-key is open, as its public routes are. The names of its
# files change with each build; no other route of llama-server has a dot in its name.
_PAGE = re.compile(
    r"/(?:(?:_app/(?:[\w-][\w.-]*/)*)?[\w-][\w.-]*"
    r"\.(?:css|html|ico|js|json|png|svg|webp|woff2?|webmanifest))?"
)


@dataclass(frozen=True, slots=True)
class Known:
    """The configuration of keys. `callers` is by the digest of the key."""

    callers: Mapping[bytes, Caller] = field(default_factory=dict)
    keeps_apart: bool = False


class Keys:
    """The check of keys and of tenant limits. A replaced `known` counts for later requests."""

    def __init__(self, telemetry: Telemetry, budget: Budget) -> None:
        self.known = Known()
        self._budget = budget
        self._telemetry = telemetry
        self._busy: Counter[str] = Counter()

    def admit(self, call: Call) -> None:
        """Note the caller of a call. Raises UnauthorizedError.

        1. Without configured keys every request is accepted.
        2. Routes that a llama-server with a key leaves open, and OPTIONS, which browsers send
           before a key. No body is accepted there: it would be read and passed on.
        3. Requests with a valid key. The time of the table look-up may reveal something about a
           digest, but no key can be made from a digest.
        """
        if not self.known.callers:  # (1)
            return
        request, call.keyed = call.http, True
        if _is_open(request.method, request.path) and not request.body_exists:  # (2)
            return
        key = _key_of(request)
        caller = self.known.callers.get(digest_of(key)) if key else None
        if caller is None:  # (3)
            self._telemetry.refused_key("wrong" if key else "missing")
            raise UnauthorizedError("Invalid API Key")
        call.caller = caller

    def tenant(self, caller: Caller | None, salt: str = "") -> Tenant:
        """Return the tenant that owns the tokens of a caller's prompts.

        With a `salt` it is another one for each, where tenants are kept apart.
        """
        if caller is None or not self.known.keeps_apart:
            return NO_TENANT
        return salted(caller.tenant, salt)

    def has_tenant(self, name: str) -> bool:
        """Return whether a tenant has keys, and is kept apart from others."""
        return self.known.keeps_apart and any(
            caller.tenant == name for caller in self.known.callers.values()
        )

    def is_background(self, caller: Caller | None) -> bool:
        """Return whether the requests of a caller's tenant are served after all others."""
        limits = None if caller is None else self._budget.limits.get(caller.tenant)
        return limits is not None and limits.background

    @contextmanager
    def room(self, caller: Caller | None, *, costs: bool = True) -> Iterator[None]:
        """Count a request of the tenant while it arrives, waits or runs.

        Raises TenantBusyError if the tenant has too many, TenantQuotaError if its tokens are used
        and the request `costs` some.
        """
        if caller is None:
            yield
            return
        name = caller.tenant
        limits = self._budget.limits.get(name)
        most = None if limits is None else limits.max_requests
        if most is not None and self._busy[name] >= most:
            raise TenantBusyError(
                f"{most} requests of this tenant are running or waiting; try again later"
            )
        if costs and (refusal := self._budget.refusal(name)) is not None:
            raise refusal
        self._busy[name] += 1
        try:
            yield
        finally:
            self._busy[name] -= 1


def _is_open(method: str, path: str) -> bool:
    reads = method in ("GET", "HEAD")
    return method == "OPTIONS" or (reads and bool(path in PUBLIC or _PAGE.fullmatch(path)))


def _key_of(request: web.BaseRequest) -> str:
    """Return the key, read as llama-server reads it (server-http.cpp:269-279)."""
    given = request.headers.get("Authorization") or request.headers.get("X-Api-Key") or ""
    return given.removeprefix("Bearer ")
