"""The routes: requests that take a slot, that pass through, and that a client must not make.

Everything that llama-server answers, the router answers with the same bytes. The router's own
routes are under `/kvferry/` and `/metrics`.
"""

import asyncio
import contextlib
import posixpath
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import structlog
from aiohttp import web

from router.base import tasks
from router.base.errors import (
    BackendError,
    ForbiddenError,
    FramingError,
    ModelNotFoundError,
    NoBackendError,
    NotFoundError,
    OriginError,
    RouterError,
)
from router.base.ports import Telemetry
from router.base.types import Caller, RequestId
from router.core.model.servers import ServerPhase
from router.engine.loop_throttle import LoopThrottle
from router.hosts.messages import HOP
from router.hosts.messages import PREFIX as PEERS
from router.llama.client import LlamaClient
from router.llama.multipart import is_form
from router.llama.replies import error_of, knows_no_answer, merge_models, with_status
from router.llama.routes import Route, is_misspelled, route_of, why_forbidden
from router.llama.server_client import RelayedResponse
from router.telemetry.decision_log import DecisionLog
from router.telemetry.hosts_metrics import HostsMetrics
from router.web.admin.actions import BACKENDS, OperatorActions
from router.web.admin.guard import Guard
from router.web.admin.live import Live
from router.web.admin.page import PREFIX, StaticFile, to_page
from router.web.admin.requests import PATH as REQUESTS
from router.web.admin.requests import Requests
from router.web.admin.routes import HEALTH, METRICS, AdminRoute, Audience, OwnRoutes, is_own
from router.web.admin.servers import PATH as SERVERS
from router.web.admin.servers import ServerRoutes
from router.web.admin.snapshots import PATH as SNAPSHOTS
from router.web.admin.snapshots import Snapshots
from router.web.admin.status import StatusRoutes
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys, fair_to
from router.web.api.completions import Completions
from router.web.api.forwarding import Forwarding
from router.web.api.peer_routes import PeerRoutes
from router.web.api.slot_demand import model_asked, slots_asked
from router.web.server import origins
from router.web.server.bodies import Bodies, expects
from router.web.server.error_responses import (
    clients_id,
    error_response,
    json_response,
    names,
    open_to_browsers,
    request_id,
)
from router.web.server.framing_checks import check_head
from router.web.server.hop import HOP_OF, HOST_NAME, hop_of, model_of
from router.web.server.listener import Listener
from router.web.server.relay import (
    CALLER,
    KEYED,
    STARTED,
    Capture,
    forward_headers,
    forward_target,
    relay,
)
from router.web.server.settings import Settings
from router.web.server.stream_start import START, StreamStart

log = structlog.get_logger(__name__)

# A server lists its models in milliseconds, however busy its slots are.
_MODELS_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """The other hosts, as the routes need them."""

    forwarding: Forwarding
    routes: PeerRoutes
    metrics: HostsMetrics


class App:
    """The handler of every request of every client; owns no state but its arguments."""

    def __init__(
        self,
        *,
        keys: Keys,
        completions: Completions,
        admin: StatusRoutes,
        guard: Guard,
        snapshots: Snapshots,
        requests: Requests,
        decision_log: DecisionLog,
        live: Live,
        page: Mapping[str, StaticFile],
        selection: BackendSelection,
        telemetry: Telemetry,
        settings: Settings,
        operations: OperatorActions,
        servers: ServerRoutes,
        throttle: LoopThrottle,
        hosts: OtherHosts | None = None,
    ) -> None:
        """Set up the handler. `hosts` None: there are no other hosts."""
        self._hosts = hosts
        self._keys = keys
        self._completions = completions
        self._admin = admin
        self._snapshots = snapshots
        self._decision_log = decision_log
        self._page = page
        self._selection = selection
        self._telemetry = telemetry
        self._settings = settings
        self._throttle = throttle
        self._bodies = Bodies(settings, _sender)
        self.own = OwnRoutes(
            [
                AdminRoute("GET", METRICS, self._metrics),
                AdminRoute("GET", HEALTH, self._health),
                AdminRoute("GET", "/kvferry/state", self._state),
                AdminRoute("POST", "/kvferry/plan", self._plan),
                AdminRoute("POST", "/kvferry/reload", operations.reload),
                AdminRoute("POST", f"{BACKENDS}{{name}}/{{action}}", operations.backend),
                AdminRoute("GET", SERVERS, servers.all),
                AdminRoute("GET", f"{SERVERS}/{{name}}/log", servers.log),
                AdminRoute("POST", f"{SERVERS}/{{name}}/{{action}}", servers.act),
                AdminRoute("GET", SNAPSHOTS, snapshots.all),
                AdminRoute("POST", f"{SNAPSHOTS}/purge", self._purge),
                AdminRoute("GET", f"{SNAPSHOTS}/{{id}}", snapshots.one),
                AdminRoute("DELETE", f"{SNAPSHOTS}/{{id}}", snapshots.one),
                AdminRoute("GET", REQUESTS, requests.recent),
                AdminRoute("GET", f"{REQUESTS}/{{id}}", requests.one),
                AdminRoute("GET", "/kvferry/events", live.events),
                AdminRoute("GET", PREFIX.rstrip("/"), to_page),
                *(AdminRoute("GET", path, self._static) for path in page),
            ],
            guard,
            self._brief_health,
        )

    def listener(self, side: Audience) -> Listener:
        """Return the protocol factory for an address. Needs a running loop.

        A request is cancelled when its client disconnects.
        """
        handle = partial(self._handle, side)
        return Listener(
            handle,
            self._settings,
            self._refused,
            self._throttle,
            for_peers=side is Audience.PEERS,
        )

    def _refused(self, name: RequestId, error: RouterError) -> None:
        self._telemetry.rejected(name, error.outcome, str(error))

    async def _handle(self, side: Audience, request: web.BaseRequest) -> web.StreamResponse:
        """Give the request an id, and each error the router's own shape.

        1. RouterError: an answer that the router gives on purpose.
        2. ConnectionError: the client disconnected while the router sent its answer.
        3. Any other: a bug. The client gets no details; a partial answer must not look complete.
        """
        name = request_id()
        if self._hosts is not None:
            request[HOST_NAME] = self._hosts.forwarding.name
        try:
            return await self._answered(side, request, name)
        finally:
            self._bodies.release(request)

    async def _answered(
        self, side: Audience, request: web.BaseRequest, name: RequestId
    ) -> web.StreamResponse:
        try:
            check_head(request)
            path = request.path
            if side is Audience.PEERS:
                return await self._from_peer(request, path, name)
            origins.check(request, self._settings)
            if self._hosts is not None and _is_for_peers(path):
                raise NotFoundError("there is nothing at this path")
            own = self.own.find(request, path, side)
            if own is None:
                self._keys.admit(request)
            expects(request)  # an unknown one is refused before any work
            if own is not None:
                return await own(request, name)
            return await self._any(request, path, name)
        except RouterError as error:
            caller = request.get(CALLER)
            self._telemetry.rejected(name, error.outcome, str(error), clients_id(request), caller)
            # Operators' requests are not for every reader of the decision log.
            if not is_own(request.path):
                self._note(name, error, str(error), caller)
            response = error_response(error, name, clients_id(request))
            start: StreamStart | None = request.get(START)
            if start is not None and (stream := await start.hand_over()) is not None:
                assert isinstance(response.body, bytes)
                await start.fail(error_of(response.body, error.status))
                return stream
            if isinstance(error, FramingError):
                response.force_close()
            if isinstance(error, OriginError):
                return response
            return open_to_browsers(request, response)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the top of every request: logged, counted
            return self._failed(request, name, error)

    def _failed(
        self, request: web.BaseRequest, name: RequestId, error: Exception
    ) -> web.StreamResponse:
        log.error("request_failed", request_id=name, exc_info=error)
        tasks.failures["request"] += 1
        told = RouterError("an error inside the router; see its log for this request's id")
        self._telemetry.rejected(name, told.outcome, type(error).__name__, clients_id(request))
        self._note(name, told, type(error).__name__, request.get(CALLER))
        start: StreamStart | None = request.get(START)
        started: web.StreamResponse | None = request.get(STARTED)
        if started is None and start is not None:
            started = start.stream
        if started is None:
            return open_to_browsers(request, error_response(told, name, clients_id(request)))
        if request.transport is not None:
            request.transport.abort()
        return started

    def _note(self, name: RequestId, error: RouterError, why: str, caller: Caller | None) -> None:
        """Record a rejection in the decision log.

        Where keys are configured, a request without a key is left out: the log has limited room,
        and such requests must not push others out of it.
        """
        if caller is not None or not self._keys.known.callers:
            self._decision_log.rejected(name, error.outcome, why, caller)

    async def _from_peer(
        self, request: web.BaseRequest, path: str, name: RequestId
    ) -> web.StreamResponse:
        """Answer a peer: one of its own calls, or a request that it forwards.

        A request with the header of a hop is a client's, whatever its path.
        """
        assert self._hosts is not None
        if path.startswith(PEERS) and HOP not in request.headers:
            raw = await self._bodies.read(request)
            return await self._hosts.routes.answer(request, path, raw, name)
        if is_own(path) or _is_for_peers(path):
            raise NotFoundError("there is nothing at this path")
        hop = hop_of(request)
        request[HOP_OF] = hop
        if hop.caller is not None:
            request[KEYED] = True
            request[CALLER] = hop.caller
        self._hosts.metrics.received(hop.host)
        return await self._any(request, path, hop.request)

    async def _any(
        self, request: web.BaseRequest, path: str, name: RequestId
    ) -> web.StreamResponse:
        if is_misspelled(path):
            raise NotFoundError("there is nothing at this path")
        route = route_of(path)
        may_take_slot = request.method == "POST" and not self._settings.passthrough
        if may_take_slot and (route.shape or route.takes_slot):
            # A forwarded request was counted where its client is.
            counted = None if HOP_OF in request else request.get(CALLER)
            with self._keys.room(counted):  # before the body, which takes memory
                return await self._takes_slots(request, route, name)
        if reason := why_forbidden(request.method, path):
            raise ForbiddenError(reason)
        if route.lists_models and request.method == "GET":
            return await self._models(request, name)
        raw = await self._bodies.read(request)
        # As llama-server's router mode does: a body names the model, and the query of a GET.
        named = request.query.get("model") or None
        model = model_of(request, await model_asked(request, raw) if may_take_slot else named)
        if route.controls and request.method == "POST":
            return await self._control(request, name, raw, model)
        return await self._pass(request, name, raw, model)

    async def _takes_slots(
        self, request: web.BaseRequest, route: Route, name: RequestId
    ) -> web.StreamResponse:
        raw = await self._bodies.read(request)
        # A form is an object of strings to the server: no slot can be written into it.
        if route.shape and not is_form(request.headers.get("Content-Type", "")):
            return await self._completions.completion(request, route.shape, raw, name)
        asked = await slots_asked(request, raw, route)
        return await self._completions.other(request, raw, name, asked, route)

    async def _metrics(self, request: web.BaseRequest, _: RequestId) -> web.StreamResponse:
        return await self._admin.metrics(request)

    async def _health(self, _request: web.BaseRequest, _: RequestId) -> web.StreamResponse:
        return await self._admin.health(brief=False)

    async def _brief_health(self, _request: web.BaseRequest, _: RequestId) -> web.StreamResponse:
        return await self._admin.health(brief=True)

    async def _state(self, request: web.BaseRequest, _: RequestId) -> web.StreamResponse:
        return await self._admin.state(request)

    async def _plan(self, request: web.BaseRequest, name: RequestId) -> web.StreamResponse:
        return await self._admin.plan(request, await self._bodies.read(request), name)

    async def _purge(self, request: web.BaseRequest, _: RequestId) -> web.StreamResponse:
        return await self._snapshots.purge(request, await self._bodies.read(request))

    async def _static(self, request: web.BaseRequest, _: RequestId) -> web.StreamResponse:
        return self._page[request.path].answer(request)

    async def _pass(
        self, request: web.BaseRequest, name: RequestId, raw: bytes, model: str | None
    ) -> web.StreamResponse:
        """Forward a request as it is to a backend that fits. Raises RouterError.

        If the backend fails before it answers, and the request cannot have changed anything, try
        another backend.
        """
        there = None if self._hosts is None else self._hosts.forwarding
        if there is not None and there.must_leave(request, model):
            answer = await there.away(request, raw, None, name, model)
            if answer is not None:
                return answer
        model = self._selection.resolve(model)
        try:
            # A look must not load a model: programs ask for /health and /props all the time.
            if request.method not in ("GET", "HEAD"):
                await self._selection.until_usable(model, name)
            elif route_of(request.path).tells_health and self._selection.servers:
                return open_to_browsers(request, json_response({"status": "ok"}))
            return await self._pass_to(self._selection.fitting(model), request, name, raw)
        finally:
            self._selection.no_longer_waits(name)

    async def _pass_to(
        self, clients: list[LlamaClient], request: web.BaseRequest, name: RequestId, raw: bytes
    ) -> web.StreamResponse:
        if request.method not in ("GET", "HEAD") and not route_of(request.path).reads:
            del clients[1:]
        for client in clients:
            try:
                async with self._sent(request, raw, client) as upstream:
                    return await self._relayed(request, name, client, upstream)
            except BackendError:
                self._selection.doubt(client.id)
                if client is clients[-1]:
                    raise
        raise AssertionError("unreachable")

    async def _control(
        self, request: web.BaseRequest, name: RequestId, raw: bytes, model: str | None
    ) -> web.StreamResponse:
        """Forward a request that names an answer in progress. Raises RouterError.

        Try one backend after the other, until one is writing that answer.
        """
        there = None if self._hosts is None else self._hosts.forwarding
        try:
            *others, last = self._selection.all_up(self._selection.resolve(model))
        except (NoBackendError, ModelNotFoundError):
            answer = None if there is None else await there.control(request, raw, name, model)
            if answer is None:
                raise
            return answer
        for client in others if there is None else [*others, last]:
            with contextlib.suppress(BackendError):
                async with self._sent(request, raw, client) as upstream:
                    if not knows_no_answer(await upstream.read()):
                        return await self._relayed(request, name, client, upstream)
        if there is not None:
            answer = await there.control(request, raw, name, model)
            if answer is not None:
                return answer
        async with self._sent(request, raw, last) as upstream:
            return await self._relayed(request, name, last, upstream)

    def _sent(
        self, request: web.BaseRequest, raw: bytes, client: LlamaClient
    ) -> AbstractAsyncContextManager[RelayedResponse]:
        headers = forward_headers(request, resumable=self._settings.passthrough)
        target = forward_target(request)
        return client.relay(request.method, target, headers, raw or None, yields=True)

    async def _relayed(
        self,
        request: web.BaseRequest,
        name: RequestId,
        client: LlamaClient,
        upstream: RelayedResponse,
    ) -> web.StreamResponse:
        response, _ = await relay(
            request,
            upstream,
            names(request, name) | {"x-kvferry-backend": client.id, "x-kvferry-source": "none"},
            self._settings,
            Capture(),
            lambda: None,
            self._throttle,
        )
        return response

    async def _models(self, request: web.BaseRequest, name: RequestId) -> web.StreamResponse:
        """Return the models of all backends. Raises RouterError.

        A fleet with one model gives its server's own answer. A model is left out if none of its
        servers answers.
        """
        models = self._selection.for_each_model()
        servers = self._selection.servers
        there: list[bytes] = []
        if self._hosts is not None and HOP_OF not in request:
            there = await self._hosts.forwarding.models(_MODELS_WITHIN_S)
        if len(models) < 2 and not there and not servers:
            return await self._pass(request, name, b"", None)
        told = await asyncio.gather(*(_models_of(clients) for clients in models))
        answers = [answer for answer in told if answer is not None] + there
        if not answers and not servers:
            raise BackendError("no backend lists its models")
        # Of the replicas of a model, one that is up says most.
        ordered = sorted(servers, key=lambda server: server.phase is ServerPhase.UP)
        listed = with_status(merge_models(answers), {s.models: s.phase for s in ordered})
        merged = json_response(listed, headers=names(request, name))
        return open_to_browsers(request, merged)


def _is_for_peers(path: str) -> bool:
    """Return whether a decoded path is one of the calls between hosts, however it is spelled."""
    return (posixpath.normpath("/" + path.lstrip("/")) + "/").startswith(PEERS)


async def _models_of(clients: Sequence[LlamaClient]) -> bytes | None:
    """Return the answer of the first backend that gives one; None if none does."""
    for client in clients:
        with contextlib.suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_MODELS_WITHIN_S):
                return await client.models_answer()
    return None


def _sender(request: web.BaseRequest) -> str | None:
    """Return what a body counts for: on a forwarded request, its client at the other host."""
    hop = request.get(HOP_OF)
    return fair_to(request) if hop is None else hop.client
