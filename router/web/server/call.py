"""One request of a client, made once at its head, for all that serve it until its end.

`Completions.serve` names the stages of a request that takes a slot, in their order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from aiohttp import web

from router.base.errors import BadRequestError
from router.base.ports import Trace
from router.base.types import Caller, Request, RequestId
from router.hosts.messages import FETCHED_FROM, HOP, HOST
from router.llama.http1 import Header
from router.llama.routes import Route, route_of
from router.llama.wire import ParsedRequest
from router.prompts.reader import PromptReader
from router.web.server.error_responses import clients_id, id_headers
from router.web.server.hop import Hop
from router.web.server.relayed_response import HOP_BY_HOP, named_in_connection
from router.web.server.sink import Sink

# A compressed body has been decoded.
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-encoding",
    b"expect",
    HOP.encode(),
}
# This header makes the server go on after its client disconnected (llama-server.md section 5.6).
_RESUMABLE = {b"x-conversation-id"}
_KEYS = frozenset({b"authorization", b"x-api-key"})


@dataclass(slots=True, eq=False)
class Call:
    """A request and what is known of it. Times are from `perf_counter`."""

    # -- from the head
    http: web.BaseRequest
    id: RequestId
    host: str | None = None  # the name of this host, in a fleet
    sender: str | None = None  # the address of the client
    hop: Hop | None = None  # another host forwarded the request
    is_trusted: bool = False  # of an operator, or a call of another host
    keyed: bool = False  # clients have keys: one in the request is for the router
    upstream: str | None = None  # the model that the path named; it is loaded for a look, too
    caller: Caller | None = None  # the owner of the key, if the request needed one
    named: str = ""  # behind the fixed part of a path of the router's own
    route: Route = field(init=False)
    sink: Sink = field(init=False)
    arrived: float = field(default_factory=perf_counter)
    # -- from the body
    raw: bytes = b""
    held_bytes: int = 0  # of memory for the body (`Bodies`)
    let_go: Callable[[], None] = lambda: None  # of a large body, once its answer has begun
    parsed: ParsedRequest | None = None  # of a completion
    tasks: int = 1  # of another request that takes a slot, or several
    model: str | None = None  # as the client named it, or hosts know it
    ends: int = 0  # servers that ended while they computed it, here and on hosts before
    # -- from the prompt; replaced for each attempt
    request: Request | None = None
    reader: PromptReader | None = None
    trace: Trace | None = None
    fetched_from: str | None = None  # the host, or tier, that had what the prompt begins with
    attempts: int = 1
    # -- of the last attempt
    asked: float = 0.0  # when a slot was requested
    granted: float = 0.0
    first_byte: float | None = None

    def __post_init__(self) -> None:
        """Look up the route. A call has the sink of its client from the start."""
        self.route = route_of(self.http.path)
        self.sink = Sink(self.http)

    def ask_upstream(self, model: str, request: web.BaseRequest) -> None:
        """Take another request in place of this one, for a model that its path named."""
        self.upstream, self.http = model, request
        self.route, self.sink = route_of(request.path), Sink(request)

    @property
    def is_quoted(self) -> bool:
        """Return whether another host sent it here for the price that this one had quoted."""
        return self.hop is not None and self.hop.quoted_s is not None

    @property
    def scheduled(self) -> Request:
        """Return the request for the scheduler, once the prompt was read."""
        assert self.request is not None, "the prompt comes first"
        return self.request

    @property
    def content_type(self) -> str:
        """Return the Content-Type of the body, as it came."""
        return self.http.headers.get("Content-Type", "")

    @property
    def clients_id(self) -> str | None:
        """Return the client's own id of the request; None: none that fits a log line."""
        return clients_id(self.http)

    @property
    def client(self) -> str | None:
        """Return the fairness key: the tenant, else the sender; of a forwarded call, from there."""
        return self.fair_to if self.hop is None else self.hop.client

    @property
    def fair_to(self) -> str | None:
        """Return the fairness key of a call at this host: its tenant, else its sender.

        The sender is its key, or its address without one. The key is hashed: none is kept as it is.
        """
        if self.caller is not None:
            return f"tenant {self.caller.tenant}"
        key = self.http.headers.get("authorization") or self.http.headers.get("x-api-key")
        return self.sender if key is None else f"key {hash(key):x}"

    @property
    def target(self) -> str:
        """Return path and query for a server, as they came. Raises BadRequestError.

        A target may also be a whole URL, as for a forward proxy; its host is ignored.
        """
        raw = self.http.raw_path
        if not raw.startswith("/"):
            raw = self.http.rel_url.raw_path_qs
        if not raw.startswith("/"):
            raise BadRequestError("the request target is not a path")
        return raw

    def name_model(self, named: str | None) -> None:
        """Set the model: the one that the client named, unless a host before knows it better."""
        known = self.upstream if self.hop is None else self.hop.model
        self.model = named if known is None else known

    def names(self, *, here: bool = True) -> dict[str, str]:
        """Return the headers of an answer with the id of the attempt, and the client's id.

        In a fleet also the host, if the call is served `here`.
        """
        ours = self.id if self.request is None else self.request.id
        headers = id_headers(ours, self.clients_id)
        if here and self.host is not None:
            headers[HOST] = self.host
        if here and self.fetched_from is not None:
            headers[FETCHED_FROM] = self.fetched_from
        return headers

    def forwarded_headers(self, *, resumable: bool = False) -> list[Header]:
        """Return the client's headers as a server gets them.

        Where clients have keys, they are for the router and left out. `resumable`: the client may
        ask for a stream that goes on without it.
        """
        omitted: frozenset[bytes] | set[bytes] = _NOT_FORWARDED
        if not resumable:
            omitted = omitted | _RESUMABLE
        if self.keyed:
            omitted = omitted | _KEYS
        if "Connection" in self.http.headers:
            omitted = omitted | named_in_connection(self.http.raw_headers)
        return [header for header in self.http.raw_headers if header[0].lower() not in omitted]
