"""Who a client's request comes from: its key, and the tenant behind it. Without keys, anybody.

Owns what a request without a good key may still do, and how many requests a tenant may have. What
tenants share is the scheduler's business.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from aiohttp import web

from router.base.api_keys import digest_of
from router.base.errors import TenantBusyError, UnauthorizedError
from router.base.ports import Telemetry
from router.base.types import NOBODY, Caller, Tenant
from router.web.server.relay import CALLER, KEYED

# Open on a llama-server with --api-key (server-http.cpp:237-258): these, and its page, whose files
# have names that change with each build. None of its other routes has a dot in its name.
_PUBLIC = frozenset({"/health", "/v1/health"})
_PAGE = re.compile(
    r"/(?:(?:_app/(?:[\w-][\w.-]*/)*)?[\w-][\w.-]*"
    r"\.(?:css|html|ico|js|json|png|svg|webp|woff2?|webmanifest))?"
)
_NO_LIMIT = nullcontext()


@dataclass(frozen=True, slots=True)
class Known:
    """What of the configuration counts here. `callers` by the digest of their key."""

    callers: Mapping[bytes, Caller] = field(default_factory=dict)
    max_requests: Mapping[str, int] = field(default_factory=dict)  # by tenant
    keeps_apart: bool = False


class Keys:
    """Lets requests in. `known` may be replaced: it counts for what comes after."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.known = Known()
        self._telemetry = telemetry
        self._busy: Counter[str] = Counter()

    def admit(self, request: web.BaseRequest) -> None:
        """Note whose request it is. Raises UnauthorizedError.

        1. There are no keys: everybody may.
        2. What a llama-server with a key leaves open. Browsers ask with OPTIONS before they send
           a key. Nobody asks for any of it with a body, which would be read and sent on.
        3. Whoever has a key. The digest is looked up in a table: how long that takes may tell
           something of a digest, from which no key can be made.
        """
        if not self.known.callers:  # (1)
            return
        request[KEYED] = True
        if _is_open(request.method, request.path) and not request.body_exists:  # (2)
            return
        key = _key_of(request)
        caller = self.known.callers.get(digest_of(key)) if key else None
        if caller is None:  # (3)
            self._telemetry.refused_key("wrong" if key else "missing")
            raise UnauthorizedError("Invalid API Key")
        request[CALLER] = caller

    def tenant(self, caller: Caller | None) -> Tenant:
        """Whose tokens a caller's prompts are."""
        if caller is None or not self.known.keeps_apart:
            return NOBODY
        return Tenant(caller.tenant)

    def room(self, caller: Caller | None) -> AbstractContextManager[None]:
        """While a request arrives, waits or runs. Raises TenantBusyError if there are too many."""
        return _NO_LIMIT if caller is None else self._room(caller.tenant)

    @contextmanager
    def _room(self, name: str) -> Iterator[None]:
        limit = self.known.max_requests.get(name)
        if limit is not None and self._busy[name] >= limit:
            self._telemetry.tenant_limited("max_requests")
            raise TenantBusyError(
                f"{limit} requests of this tenant are running or waiting; try again later"
            )
        self._busy[name] += 1
        try:
            yield
        finally:
            self._busy[name] -= 1


def _is_open(method: str, path: str) -> bool:
    looks = method in ("GET", "HEAD")
    return method == "OPTIONS" or (looks and bool(path in _PUBLIC or _PAGE.fullmatch(path)))


def _key_of(request: web.BaseRequest) -> str:
    """As llama-server reads it (server-http.cpp:269-279)."""
    given = request.headers.get("Authorization") or request.headers.get("X-Api-Key") or ""
    return given.removeprefix("Bearer ")
