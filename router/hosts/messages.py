"""Messages between hosts, as data. The paths are on the peers' address only."""

from msgspec import Struct

from router.core.model.plan import Offered, Quote

# Two versions that differ here do not exchange requests.
PROTOCOL = 5

PREFIX = "/peer/"
HELLO = "/peer/hello"
QUOTE = "/peer/quote"
EXPORT = "/peer/export"
PART = "/peer/part"
PURGE = "/peer/purge"
PURGED = "/peer/purged"
# Of a forwarded request: what its host says of it, as JSON (`web/server/hop.py`).
HOP = "x-kvferry-hop"
# In the answer to a forwarded request that did not begin: another host may take it.
HOP_REFUSED = "x-kvferry-hop-refused"
# In the answer to a forwarded request that ended a server: no other host may take it.
HOP_SUSPECT = "x-kvferry-hop-suspect"
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
    """What a host says to a question for a quote. By default nothing, or not in time.

    `quote` None: the host cannot serve the request. `offers`: what it would hand out for it, the
    best first.
    """

    quote: Quote | None = None
    offers: tuple[Offered, ...] = ()


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
