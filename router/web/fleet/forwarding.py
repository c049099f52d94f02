"""Send a request to the host of the fleet that serves it soonest.

Each host prices the request with its own planner; nothing is reserved, so the host that gets it may
still refuse it before it begins. Whatever goes wrong with peers, the request is served here if it
can be (docs/hosts.md).
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from http import HTTPStatus
from time import perf_counter

from aiohttp import web
from msgspec.structs import replace

from router.base.errors import BackendError, ModelNotFoundError, NoBackendError
from router.base.types import Namespace, Outcome, Request, RequestId
from router.core.model.plan import Offered, Quote
from router.engine.engine import Engine
from router.engine.held_prefixes import HeldPrefixes
from router.engine.loop_throttle import LoopThrottle
from router.hosts.choice import Undecided, dear_above_s, is_worth_asking, ranked_for
from router.hosts.messages import HOP_REFUSED, HOP_SUSPECT
from router.hosts.peer import Peer
from router.hosts.peers import Peers, Usable
from router.llama.http1 import Response
from router.llama.replies import knows_no_answer, read_reply
from router.llama.server_client import Relaying
from router.llama.wire import ParsedRequest
from router.telemetry.decision_log import DecisionLog, HostsAsked
from router.telemetry.hosts_metrics import HostsMetrics
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.api.completions import plain_request
from router.web.api.elsewhere import Elsewhere
from router.web.api.suspects import Suspects
from router.web.fleet.asking import Asking, Sought, Ways
from router.web.fleet.fetching import Fetching, Way
from router.web.server.call import Call
from router.web.server.hop import Hop
from router.web.server.relay import INLINE_BYTES, Capture, relay
from router.web.server.settings import Settings

# The part of a body that a conversation keeps: the peer that reads it remembers its tokens.
_BODY_BEGINNING = 1024
_MOST_REFUSALS = 3
_MOST_UNREAD = 3  # peers that are tried for a call that is not read here
_LEAST_S = 1e-6  # of a quote, in a header
_CONTROL_LIMIT_S = 10.0  # one peer after the other is asked


@dataclass(slots=True, eq=False)
class Forwarding(Elsewhere):
    """Asks and forwards for this host, `name`."""

    exists = True
    name: str
    peers: Peers
    _asking: Asking
    _fetching: Fetching
    _held: HeldPrefixes
    _engine: Engine
    _selection: BackendSelection
    _keys: Keys
    _settings: Settings
    _throttle: LoopThrottle
    _decision_log: DecisionLog
    _metrics: HostsMetrics
    _suspects: Suspects
    _sent: int = 0
    _undecided: Undecided = field(default_factory=Undecided)

    # -- which model, and where it is ------------------------------------------------------------

    def serves_here(self, model: str | None) -> bool:
        """Return whether a backend that is up, or that can be started, has a model."""
        if self._engine.state.stopping:
            return False
        return self._is_up(model) or bool(self._selection.servers.of(model))

    def _is_up(self, model: str | None) -> bool:
        return any(one.answers_to(model) for one in self._engine.state.inventory.taking())

    def _must_leave(self, call: Call) -> bool:
        """Return whether only a peer can serve a call. Raises ModelNotFoundError.

        A call that a peer has forwarded stays, and one for a model that is here: it waits here.
        """
        if call.hop is not None:
            return False
        name, own = self._name(call.model), self._selection.names()
        if self.serves_here(name):
            return False
        if self.peers.usable(name):
            return True
        if name is not None and self.peers.knows(name):
            return not any(name in names for names in own)
        if own or self._selection.monitors:
            return False
        self._check_name(name)
        return True

    def _name(self, model: str | None) -> str | None:
        """Return the name by which hosts know the model that a client names.

        As llama-server does, a host with one model takes any name for it, and no name; so does a
        front where all peers have one. To other hosts it has to be one of the model's own names.
        """
        own = self._selection.names()
        if model is not None and (any(model in names for names in own) or self.peers.knows(model)):
            return model
        models = own or self.peers.models()
        if not models or any(names != models[0] for names in models):
            return model
        names = sorted(models[0])
        return next((name for name in names if self.peers.usable(name)), names[0])

    def _check_name(self, name: str | None) -> None:
        known = self.peers.models()
        if name is not None and len(known) > 1 and not self.peers.knows(name):
            listed = ", ".join(sorted(set().union(*known)))
            raise ModelNotFoundError(
                f"no host serves the model {name!r}; available models: {listed}"
            )

    # -- requests with a prompt ------------------------------------------------------------------

    async def if_sooner(self, call: Call) -> web.StreamResponse | None:
        """Serve a call on a host that is cheaper. None: serve it here.

        Does not await where nothing is to be gained, which is the usual case. If all that were
        cheaper refuse, as after many requests at once, they are asked once more: by now a host may
        be computing the prompt. What another host has quoted stays; what it could not read goes on
        once more.
        """
        if call.is_quoted:
            await self._fetch_for_hop(call)
            return None
        name = self._name(call.scheduled.model)
        for _ in range(2):
            peers = self.peers.usable(name)
            others = peers or self.peers.drained() or self._fetching.has_cold
            sought = self._sought(call, name, peers) if others else None
            if sought is None:
                return None
            takes_s = 0.0 if sought.own is None else sought.own.price_s - sought.own.wait_s
            with self._undecided.counted(call.scheduled.id, name, sought.first, takes_s):
                ways = await self._asking.ways(sought, peers)
            answer = await self._at_best(sought, peers, ways)
            if answer is not None or not ways.quoted:
                return answer
            if sought.own is None and call.hop is None:  # it cannot stay, and no quote holds
                return await self._sent_unread(call, peers)
        return None

    def _sought(self, call: Call, name: str | None, peers: Usable) -> Sought | None:
        """Return a call as one that looks for a host. None: it need not."""
        request = call.scheduled
        cost_s = self._asking.cost_s(peers)
        if self._engine.is_surely_cheap(request, dear_above_s(cost_s)):
            return None
        own = self._engine.quote(request)
        if not is_worth_asking(own, len(request.prompt), cost_s):
            return None
        sought = Sought(call, request, name, own, _beginning(call.raw))
        if not request.prompt.unknown:  # else it is quoted as if it were short
            sought.n_tokens = len(request.prompt)
        if (namespace := self._namespace(request)) is not None:
            sought.namespace = namespace
            sought.hashes = self._held.hashes(namespace, request.tenant, request.prompt.tokens)
        if own is not None:
            waits_s = self._undecided.before_s(name, sought.first) / self._n_servers(request.model)
            sought.own = replace(own, price_s=own.price_s + waits_s, wait_s=own.wait_s + waits_s)
        return sought

    def _namespace(self, request: Request) -> Namespace | None:
        """Return the namespace of a request whose tokens are known."""
        if request.prompt.unknown:
            return None
        return self._selection.namespace_of(request.model) or None

    def quote(self, call: Call) -> Quote | None:
        """Return the quote of a call here, also with the fetch that its hop proposes."""
        request, hop = call.scheduled, call.hop
        own = self._engine.quote(request)
        if hop is None or hop.fetch is None:
            return own
        way = self._fetching.way(request, own, *hop.fetch)
        return own if way is None else way.quote

    async def _fetch_for_hop(self, call: Call) -> None:
        """Fetch what the host before has found for a forwarded call, if that still pays."""
        request, hop = call.scheduled, call.hop
        namespace = self._namespace(request)
        if hop is None or hop.fetch is None or namespace is None:
            return
        way = self._fetching.way(request, self._engine.quote(request), *hop.fetch)
        if way is not None:
            hashes = self._held.hashes(namespace, request.tenant, request.prompt.tokens)
            await self._fetch(call, hashes, way)

    async def _fetch(self, call: Call, hashes: Sequence[bytes], way: Way) -> str | None:
        """Fetch a state for a call; return the host that had it. None: it did not come."""
        if not await self._fetching.fetch(call.scheduled, hashes, way):
            return None
        call.fetched_from = way.holder.name
        return way.holder.name

    def _n_servers(self, model: str | None) -> int:
        return max(sum(info.answers_to(model) for info in self._engine.state.inventory.taking()), 1)

    async def until_only_there(self, call: Call) -> None:
        """Wait until another host has the model of a call that waits here for a backend."""
        while not (self._must_leave(call) or self._loaded_there(call)):
            await self.peers.until_checked()

    async def if_only_there(self, call: Call) -> web.StreamResponse | None:
        """Serve a call unread where its model is, if that is not here. None: serve it here.

        Of a model that could be loaded here, only where it is loaded. Else waits for a peer as long
        as a request may wait for a backend (`queue.no_backend_wait`). A request that all peers have
        refused three times is refused: it may be what breaks them. Raises RouterError.
        """
        if (loaded := self._loaded_there(call)) is not None:
            return await self._sent_unread(call, loaded)
        if not self._must_leave(call):
            return None
        loop, refusals = asyncio.get_running_loop(), 0
        deadline = loop.time() + self._engine.state.queue.limits.no_backend_s
        while refusals < _MOST_REFUSALS:
            model = self._name(call.model)  # a host may come up, and know another name
            if usable := self.peers.usable(model):
                if (answer := await self._sent_unread(call, usable)) is not None:
                    return answer
                refusals += 1
            if self._engine.state.stopping:
                raise NoBackendError("the router is stopping")
            try:
                async with asyncio.timeout_at(deadline):
                    await self.peers.until_checked()
            except TimeoutError:
                break
            if self.serves_here(model):
                return None
        raise NoBackendError("no host of the fleet that serves this model can take the request")

    def _loaded_there(self, call: Call) -> Usable | None:
        """Return the peers that have the model of a completion loaded, which is not loaded here."""
        model = self._name(call.model)
        if call.parsed is None or call.hop is not None or not self._selection.servers.of(model):
            return None
        if self._is_up(model):
            return None
        usable = self.peers.usable(model)
        found = [key for key, peer in usable.peers.items() if peer.has_loaded(model)]
        return usable.only(found) if found else None

    async def _sent_unread(self, call: Call, usable: Usable) -> web.StreamResponse | None:
        """Forward a call to a peer that can read it, and may forward it once more.

        The same peer for each turn of a conversation; the next ones if that refuses.
        """
        request = plain_request(call, self._keys, None, "read by no backend here")
        beginning = _beginning(call.raw)
        sought = Sought(call, request, self._name(call.model), None, beginning)
        told = HostsAsked(own=None, offers=())
        for key in ranked_for(usable.peers, beginning)[:_MOST_UNREAD]:
            peer = usable.peers[key]
            answer = await self._forward(sought, peer, None, told, None)
            if answer is not None:
                return answer
            told = replace(told, refused=(*told.refused, peer.name))
        self._decision_log.note_hosts(request.id, told)
        return None

    # -- any request -----------------------------------------------------------------------------

    async def models(self, within_s: float) -> list[bytes]:
        """Return the lists of models of peers that have one which is not here."""
        found: list[Peer] = []
        known = self._selection.names()
        for peer in self.peers.all():
            names_there = [frozenset(served.names) for served in peer.models]
            if peer.is_usable and any(those not in known for those in names_there):
                known += names_there
                found.append(peer)
        told = await asyncio.gather(*(self._models_of(peer, within_s) for peer in found))
        return [answer for answer in told if answer is not None]

    async def _models_of(self, peer: Peer, within_s: float) -> bytes | None:
        hop = Hop(self.name, RequestId("models"))
        with suppress(BackendError, TimeoutError):
            async with (
                asyncio.timeout(within_s),
                peer.relay("GET", "/v1/models", hop.headers(), None, yields=True) as upstream,
            ):
                if upstream.status == HTTPStatus.OK:
                    return await upstream.read()
        return None

    async def control(self, call: Call) -> web.StreamResponse | None:
        """Forward a call about an answer in progress to the host that writes it. None: none."""
        if call.hop is not None:
            return None
        model = call.model
        if model is not None:  # a client that controls an answer names its id alone
            model = self._name(model)
        for peer in self.peers.usable(model).peers.values():
            hop = Hop(self.name, RequestId(f"{call.id}.c"), client=call.fair_to, model=model)
            with suppress(BackendError, TimeoutError):
                async with asyncio.timeout(_CONTROL_LIMIT_S), _sent_on(call, peer, hop) as upstream:
                    if _is_refusal(upstream) or knows_no_answer(await upstream.read()):
                        continue
                    return (await self._relay(call, upstream))[0]
        return None

    async def _relay(
        self, call: Call, upstream: Response, capture: Capture | None = None
    ) -> tuple[web.StreamResponse, Outcome]:
        """Pass the answer of a peer to the client. Raises BackendError before the first byte."""
        names = call.names(here=False)
        return await relay(call, upstream, names, self._settings, self._throttle, capture)

    # --------------------------------------------------------------------------------------------

    async def _at_best(
        self, sought: Sought, usable: Usable, ways: Ways
    ) -> web.StreamResponse | None:
        """Forward to the cheapest host that takes the request. None: none does."""
        if ways.fetch is not None:
            holder = await self._fetch(sought.call, sought.hashes, ways.fetch)
            if holder is not None:
                self._decision_log.note_hosts(
                    sought.request.id, replace(ways.told, fetched_from=holder)
                )
                return None
            ways = self._asking.without_fetch(sought, usable, ways)
        told = ways.told
        for key, quoted_s in ways.quoted.items():
            if quoted_s is None and sought.call.hop is not None:
                continue  # two hosts without a quote would send it to and fro
            peer = usable.peers[key]
            answer = await self._forward(sought, peer, quoted_s, told, ways.fetches.get(key))
            if answer is not None:
                return answer
            told = replace(told, refused=(*told.refused, peer.name))
        self._decision_log.note_hosts(sought.request.id, told)
        return None

    async def _forward(
        self,
        sought: Sought,
        peer: Peer,
        quoted_s: float | None,
        told: HostsAsked,
        fetch: tuple[str, Offered] | None,
    ) -> web.StreamResponse | None:
        """Forward a request. None: the peer refused it or failed before the first byte."""
        call, request = sought.call, sought.request
        self._sent += 1
        hop = Hop(
            host=self.name,
            # Another one each time: the peer may still be at work for an earlier attempt.
            request=RequestId(f"{request.id}.h{self._sent}"),
            tenant=request.tenant,
            caller=request.caller,
            client=call.client,
            quoted_s=None if quoted_s is None else max(quoted_s, _LEAST_S),
            model=sought.model,
            ends=call.ends,
            fetch=fetch,
        )
        begun = perf_counter()
        capture = Capture()
        outcome = Outcome.BACKEND_ERROR
        status, encoding = 0, None
        try:
            async with _sent_on(call, peer, hop) as upstream:
                status, encoding = upstream.status, upstream.header("content-encoding")
                if (ends := upstream.header(HOP_SUSPECT)) is not None and ends.isdecimal():
                    self._suspects.told(call.raw, call.parsed, int(ends))
                if _is_refusal(upstream):
                    outcome = Outcome.REFUSED
                    return None
                response, outcome = await self._relay(call, upstream, capture)
                if outcome is not Outcome.BACKEND_ERROR:  # else one of its servers died
                    peer.forwarded(ok=True)
        except BackendError:
            peer.forwarded(ok=False)
            return None
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        finally:
            self._metrics.forwarded(peer.name, outcome)
            first = call.first_byte
            if first is not None or outcome is Outcome.CLIENT_GONE:
                took_s = None if first is None else first - begun
                parsed = call.parsed
                is_good = outcome is Outcome.OK and status == HTTPStatus.OK
                if took_s is not None and parsed is not None and is_good:
                    took_s = _first_token_s(parsed, took_s, capture, encoding)
                    if took_s is not None and quoted_s is not None:
                        peer.trust.note(quoted_s, took_s)
                self._decision_log.forwarded(
                    request.id, outcome, replace(told, served_by=peer.name), took_s, request.caller
                )
        return response


def _first_token_s(
    parsed: ParsedRequest, took_s: float, capture: Capture, encoding: str | None
) -> float | None:
    """Return when the first token was ready, if the first byte came at `took_s`. None: not told."""
    if parsed.stream:
        return took_s
    if not capture.complete or capture.size_bytes > INLINE_BYTES:
        return None
    reported = read_reply(parsed.shape, False, capture.chunks, encoding)
    return None if reported.generated_s is None else reported.first_token_s(took_s)


def _beginning(raw: bytes) -> bytes:
    """Return a digest of what the bodies of a conversation have in common."""
    return blake2b(raw[:_BODY_BEGINNING], digest_size=8).digest()


def _sent_on(call: Call, peer: Peer, hop: Hop) -> Relaying:
    """Send a client's request to a peer, as `ServerClient.relay` does."""
    headers = [*call.forwarded_headers(), *hop.headers()]
    on_head = call.sink.on_head(call.names(here=False))
    return peer.relay(
        call.http.method, call.target, headers, call.raw or None, yields=True, on_head=on_head
    )


def _is_refusal(upstream: Response) -> bool:
    """Return whether the peer did not begin: its price rose, or it cannot serve the request."""
    if upstream.header(HOP_REFUSED) is not None:
        return True
    if upstream.header(HOP_SUSPECT) is not None:
        return False  # it ended a server there: it would end the next one here
    return upstream.status in (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE)
