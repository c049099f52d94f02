"""A request that another host forwarded: what that host says of it.

The host is known by its certificate, and its address is the peers' own: on every other address
these headers mean nothing and are dropped.
"""

import re
from dataclasses import dataclass

from aiohttp import web

from router.base.errors import BadRequestError
from router.base.types import NO_TENANT, Caller, RequestId, Tenant
from router.core.model.plan import Offered
from router.hosts.messages import (
    HOP,
    HOP_CALLER,
    HOP_CLIENT,
    HOP_ENDS,
    HOP_FETCH,
    HOP_ID,
    HOP_KEY,
    HOP_MODEL,
    HOP_QUOTED,
    HOP_TENANT,
)
from router.llama.http1 import Header

_ID = re.compile(r"[!-~]{1,64}")


@dataclass(frozen=True, slots=True)
class Hop:
    """One forwarded request.

    `quoted_s` None: it was sent without a quote. `model` None: the one that its body names, if any.
    `ends`: servers that ended while they computed it. `fetch`: a host, by its incarnation, and what
    it would hand out for the prompt.
    """

    host: str
    request: RequestId
    tenant: Tenant = NO_TENANT
    caller: Caller | None = None
    client: str | None = None
    quoted_s: float | None = None
    model: str | None = None
    ends: int = 0
    fetch: tuple[str, Offered] | None = None

    def headers(self) -> list[Header]:
        """Return the headers that tell the next host."""
        told = {
            HOP: self.host,
            HOP_ID: self.request,
            HOP_TENANT: self.tenant,
            HOP_KEY: None if self.caller is None else self.caller.key,
            HOP_CALLER: None if self.caller is None else self.caller.tenant,
            HOP_CLIENT: self.client,
            HOP_QUOTED: None if self.quoted_s is None else f"{self.quoted_s:.6f}",
            HOP_MODEL: self.model,
            HOP_ENDS: str(self.ends) if self.ends else None,
            HOP_FETCH: None if self.fetch is None else _fetch_text(*self.fetch),
        }
        return [(name.encode(), value.encode()) for name, value in told.items() if value]


def hop_of(request: web.BaseRequest) -> Hop:
    """Return the hop of a request on the peers' address. Raises BadRequestError."""
    headers = request.headers
    host, name = headers.get(HOP), headers.get(HOP_ID)
    if not host or name is None or not _ID.fullmatch(name):
        raise BadRequestError("this address is for other hosts of the fleet, not for clients")
    key, tenant = headers.get(HOP_KEY), headers.get(HOP_CALLER)
    try:
        quoted_s = float(headers[HOP_QUOTED]) if HOP_QUOTED in headers else None
        ends = int(headers.get(HOP_ENDS, "0"))
        fetch = _fetch_of(headers[HOP_FETCH]) if HOP_FETCH in headers else None
    except ValueError as error:
        raise BadRequestError(f"{HOP_QUOTED}, {HOP_ENDS} or {HOP_FETCH} is no number") from error
    return Hop(
        host,
        RequestId(name),
        Tenant(headers.get(HOP_TENANT, "")),
        None if key is None or tenant is None else Caller(key, tenant),
        headers.get(HOP_CLIENT),
        quoted_s,
        headers.get(HOP_MODEL),
        ends,
        fetch,
    )


def _fetch_text(holder: str, offered: Offered) -> str:
    numbers = (offered.reused, offered.n_tokens, offered.size_bytes, int(offered.computing))
    digest = offered.digest.hex() or "-"
    return " ".join((holder, *map(str, numbers), f"{offered.ready_s:.6f}", digest))


def _fetch_of(text: str) -> tuple[str, Offered]:
    """Return the fetch that `_fetch_text` wrote. Raises ValueError."""
    holder, *whole, ready_s, digest = text.split(" ")
    reused, n_tokens, size_bytes, computing = map(int, whole)
    offered = Offered(
        reused,
        n_tokens,
        size_bytes,
        float(ready_s),
        bool(computing),
        digest=b"" if digest == "-" else bytes.fromhex(digest),
    )
    if not offered.is_sound:
        raise ValueError("impossible numbers")
    return holder, offered
