"""Messages between hosts, as data. The paths are on the peers' address only."""

from msgspec import Struct

from router.core.model.plan import Offered

# Two versions that differ here do not exchange requests.
PROTOCOL = 3

PREFIX = "/peer/"
HELLO = "/peer/hello"
QUOTE = "/peer/quote"
EXPORT = "/peer/export"
PART = "/peer/part"
PURGE = "/peer/purge"
PURGED = "/peer/purged"
# Headers of a forwarded request: the host that forwards it, the request's id there, the caller as
# that host knows it, and the price that was quoted.
HOP = "x-kvferry-hop"
HOP_ID = "x-kvferry-hop-request-id"
HOP_KEY = "x-kvferry-hop-key"
HOP_TENANT = "x-kvferry-hop-tenant"  # the tenant that owns the tokens, where tenants are apart
HOP_CALLER = "x-kvferry-hop-caller"  # the tenant in the configuration, for the log
HOP_CLIENT = "x-kvferry-hop-client"  # what the queue is fair to
HOP_QUOTED = "x-kvferry-hop-quoted"
HOP_ENDS = "x-kvferry-hop-ends"  # servers that ended while they computed it
HOP_MODEL = "x-kvferry-hop-model"  # the model as hosts know it: a client may call it anything
# Where to fetch what the prompt begins with, and what that is: the fields of `Offered`.
HOP_FETCH = "x-kvferry-hop-fetch"
# In the answer to a forwarded request that did not begin: another host may take it.
HOP_REFUSED = "x-kvferry-hop-refused"
# In the answer to a forwarded request that ended a server: no other host may take it.
HOP_SUSPECT = "x-kvferry-hop-suspect"
# No client's header of these names goes on to any server or host.
HOP_HEADERS = frozenset(
    name.encode()
    for name in (
        HOP,
        HOP_ID,
        HOP_KEY,
        HOP_TENANT,
        HOP_CALLER,
        HOP_CLIENT,
        HOP_QUOTED,
        HOP_ENDS,
        HOP_FETCH,
        HOP_MODEL,
    )
)
# In every answer that a host serves: its name.
HOST = "x-kvferry-host"
# In an answer for which that host fetched a state: the host that had it.
FETCHED_FROM = "x-kvferry-fetched-from"


class Served(Struct, frozen=True):
    """One model of a host. `namespace` is empty for a server on demand that was never up."""

    names: tuple[str, ...]
    namespace: str = ""
    generates: bool = True


class Hello(Struct, frozen=True):
    """A host as it describes itself, in an answer or in the directory.

    `incarnation` differs after each start. `proof` proves the fleet secret without telling it.
    """

    name: str
    incarnation: str
    version: str
    proof: str
    url: str = ""
    protocol: int = PROTOCOL
    models: tuple[Served, ...] = ()
    slots: int = 0
    busy: int = 0  # slots that are not idle
    waiting: int = 0  # requests in the queue
    stopping: bool = False
    keeps_apart: bool = False  # tenants
    snapshots: int = 0  # that it could hand out
    told: int = 0  # how often this incarnation has described itself: an older word counts no more
    purges: str = ""  # a digest of the purges that it knows


class QuoteAsk(Struct, frozen=True, array_like=True):
    """A request as far as a quote depends on it. `hashes`: of its prefixes, put together.

    `offered`: what the host `holder` (its incarnation) would hand out for it.
    """

    model: str | None
    namespace: str
    tenant: str
    n_tokens: int
    hashes: bytes
    max_new_tokens: int | None = None
    pinnable: bool = True
    reuse: bool = True
    whole_backend: bool = False
    holder: str = ""
    offered: Offered | None = None
    tasks: int = 1
    answers: int = 1


class QuoteReply(Struct, frozen=True, array_like=True):
    """An offer: see `Quote`. `price_s` None: the host cannot serve the request.

    `offers`: what the host would hand out for it, the best first. `fetched`: the price includes a
    fetch of what the question offered.
    """

    price_s: float | None
    wait_s: float = 0.0
    reused_tokens: int = 0
    source: str = ""
    offers: tuple[Offered, ...] = ()
    fetched: bool = False


class ExportAsk(Struct, frozen=True, array_like=True):
    """A prompt of which the asking host fetches what spares most of it. As in `QuoteAsk`.

    `digest`: as in the offer that it takes.
    """

    namespace: str
    tenant: str
    n_tokens: int
    hashes: bytes
    digest: bytes = b""


class PurgeAsk(Struct, frozen=True, array_like=True):
    """A tenant of which all snapshots are to go, those with a salt too. `note`: the purge's id."""

    tenant: str
    note: str


class PurgeReply(Struct, frozen=True, array_like=True):
    """How many snapshots go, and what could not be reached."""

    count: int
    problem: str | None = None
