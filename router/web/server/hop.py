"""A request that another host forwarded: what that host says of it.

The host is known by its certificate, and its address is the peers' own: on every other address
the header means nothing and is dropped.
"""

import re

import msgspec
from aiohttp import web
from msgspec import Struct

from router.base.decoding import UndecodableError, json_decoder
from router.base.errors import BadRequestError
from router.base.types import NO_TENANT, Caller, RequestId, Tenant
from router.core.model.plan import Offered
from router.hosts.messages import HOP
from router.llama.http1 import Header

_ID = re.compile(r"[!-~]{1,64}")


class Hop(Struct, frozen=True, omit_defaults=True):
    """One forwarded request.

    `request` is its id at the host that forwards it. `tenant` owns the tokens, where tenants are
    apart; `caller` is for the log, and `client` what the queue is fair to. `quoted_s` None: it was
    sent without a quote. `model` None: the one that its body names, if any. `ends`: servers that
    ended while they computed it. `fetch`: a host, by its incarnation, and what it would hand out
    for the prompt.
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
        return [(HOP.encode(), msgspec.json.encode(self))]


_decoded = json_decoder(Hop)


def hop_of(request: web.BaseRequest) -> Hop:
    """Return the hop of a request on the peers' address. Raises BadRequestError."""
    try:
        hop = _decoded(request.headers.get(HOP, "").encode(errors="surrogateescape"))
    except UndecodableError as error:
        told = "this address is for other hosts of the fleet, not for clients"
        raise BadRequestError(f"{told} (no usable header {HOP})") from error
    offered = None if hop.fetch is None else hop.fetch[1]
    if not hop.host or not _ID.fullmatch(hop.request) or not (offered is None or offered.is_sound):
        raise BadRequestError(f"{HOP}: it has no host, no id, or impossible numbers")
    return hop
