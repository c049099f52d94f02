"""The one handler of all requests: who may ask what, and which part answers.

Everything that llama-server answers, the router answers as the server does. The router's own
routes are under `/kvferry/` and `/metrics`.
"""

from dataclasses import dataclass
from functools import partial

import structlog
from aiohttp import web

from router.base import tasks
from router.base.errors import (
    ForbiddenError,
    FramingError,
    NotFoundError,
    RouterError,
    TenantLimitError,
    UpgradeError,
)
from router.base.ports import Telemetry
from router.base.types import RequestId
from router.engine.loop_throttle import LoopThrottle
from router.hosts.messages import HOP
from router.hosts.messages import PREFIX as PEERS
from router.llama import json_offload
from router.llama.routes import is_misspelled, normal_path, why_forbidden
from router.telemetry.decision_log import DecisionLog
from router.telemetry.hosts_metrics import HostsMetrics
from router.web.admin.routes import Audience, OwnRoutes, is_own
from router.web.api.client_keys import Keys
from router.web.api.completions import Completions
from router.web.api.monitors import MonitorRoutes
from router.web.api.passing import Passing
from router.web.api.slot_demand import model_of
from router.web.fleet.peer_routes import PeerRoutes
from router.web.server.call import Call
from router.web.server.error_responses import (
    error_response,
    open_to_browsers,
    preflight,
    request_id,
)
from router.web.server.hop import hop_of
from router.web.server.inbound import Bodies, check_head, check_origin, expects, sender
from router.web.server.listener import Listener
from router.web.server.settings import Settings

log = structlog.get_logger(__name__)

UPSTREAM = "/upstream/"


@dataclass(frozen=True, slots=True)
class OtherHosts:
    """The side of a fleet that other hosts ask. `name`: of this host."""

    name: str
    routes: PeerRoutes
    metrics: HostsMetrics


@dataclass(slots=True, eq=False)
class App:
    """The handler of every request of every client; owns no state but its arguments."""

    _keys: Keys
    _completions: Completions
    _passing: Passing
    _monitors: MonitorRoutes
    own: OwnRoutes
    _decision_log: DecisionLog
    _telemetry: Telemetry
    _settings: Settings
    _bodies: Bodies
    _throttle: LoopThrottle
    _hosts: OtherHosts | None = None

    def listener(self, side: Audience) -> Listener:
        """Return the protocol factory for an address. Needs a running loop.

        A request is cancelled when its client disconnects.
        """
        handle = partial(self._handle, side)
        return Listener(
            handle, self._settings, self._refused, self._throttle, for_peers=side is Audience.PEERS
        )

    def _refused(self, name: RequestId, error: RouterError) -> None:
        self._telemetry.rejected(name, error.outcome, str(error))

    async def _handle(self, side: Audience, request: web.BaseRequest) -> web.StreamResponse:
        """Serve a request, and give each error the router's own shape.

        1. RouterError: an answer that the router gives on purpose.
        2. ConnectionError: the client disconnected while the router sent its answer.
        3. Any other: a bug. The client gets no details; a partial answer must not look complete.
        """
        host = None if self._hosts is None else self._hosts.name
        call = Call(request, request_id(), host, sender(request, self._settings))
        try:
            return await self._answer(side, call)
        except RouterError as error:
            return await self._reject(call, error)
        except ConnectionError:
            raise
        except Exception as error:  # noqa: BLE001 - the top of every request: logged, counted
            return self._fail(call, error)
        finally:
            self._bodies.release(call)

    async def _answer(self, side: Audience, call: Call) -> web.StreamResponse:
        request, path = call.http, call.http.path
        check_head(request)
        if side is Audience.PEERS:
            return await self._answer_peer(call)
        is_upstream = path.startswith(UPSTREAM)
        check_origin(request, self._settings, loads=is_upstream)
        if self._hosts is not None and _is_for_peers(path):
            raise NotFoundError("there is nothing at this path")
        own = self.own.find(call, side)
        if own is None:
            self._keys.admit(call)
        if is_upstream and own is None:
            self._go_upstream(call)
        expects(call.http)  # an unknown one is refused before any work
        return await (self._answer_client(call) if own is None else own(call))

    def _go_upstream(self, call: Call) -> None:
        """Make a call what `/upstream/MODEL/PATH` stands for, as llama-swap reads it.

        Raises NotFoundError.
        """
        rest = call.http.path.removeprefix(UPSTREAM)
        names = set().union(*self._monitors.selection.names())
        name = max((n for n in names if f"{rest}/".startswith(f"{n}/")), key=len, default=None)
        if name is None:
            raise NotFoundError("model not found")
        path = rest.removeprefix(name) or "/"
        if is_own(path) or _is_for_peers(path) or path.startswith(UPSTREAM):
            raise NotFoundError("there is nothing at this path")
        url = call.http.rel_url.with_path(path, keep_query=True)
        call.ask_upstream(name, call.http.clone(rel_url=url))
        check_head(call.http)

    async def _answer_peer(self, call: Call) -> web.StreamResponse:
        """Answer a peer: one of its own calls, or a request that it forwards.

        A request with the header of a hop is a client's, whatever its path.
        """
        assert self._hosts is not None
        path = call.http.path
        if path.startswith(PEERS) and HOP not in call.http.headers:
            call.is_trusted = True
            await self._bodies.read(call)
            return await self._hosts.routes.answer(call)
        if is_own(path) or _is_for_peers(path):
            raise NotFoundError("there is nothing at this path")
        hop = hop_of(call.http)
        call.hop, call.id, call.caller = hop, hop.request, hop.caller
        call.keyed = hop.caller is not None
        self._hosts.metrics.received(hop.host)
        return await self._answer_client(call)

    async def _answer_client(self, call: Call) -> web.StreamResponse:
        """Answer a request for llama-server, as its route says."""
        method, path, route = call.http.method, call.http.path, call.route
        if call.http.headers.get("Upgrade", "").lower() == "websocket":
            raise UpgradeError("there are no WebSockets here: use HTTP/1.1")
        if is_misspelled(path):
            raise NotFoundError("there is nothing at this path")
        may_take_slot = method == "POST" and not self._settings.passthrough
        # A forwarded request was counted where its client is.
        loads = method == "POST" or call.upstream is not None
        counted = call.caller if call.hop is None and loads else None
        if route.controls:  # of an answer that is counted
            counted = None
        if may_take_slot and (route.shape or route.takes_slot):
            with self._keys.room(counted):  # before the body, which takes memory
                await self._bodies.read(call)
                return await self._completions.serve(call)
        if reason := why_forbidden(method, path):
            raise ForbiddenError(reason)
        if method == "OPTIONS" and path.startswith(
            "/"
        ):  # a question of browsers, without a key: it loads no model
            return preflight(call.http)
        if route.lists_models and method == "GET":
            return await self._passing.models(call)
        with self._keys.room(counted, costs=False):
            return await self._pass(call, may_take_slot=may_take_slot)

    async def _pass(self, call: Call, *, may_take_slot: bool) -> web.StreamResponse:
        await self._bodies.read(call)
        # As llama-server's router mode does: a body names the model, and the query of a GET.
        asked = call.http.query.get("model") or None
        if may_take_slot:
            asked = await json_offload.read(call.raw, model_of, call.raw, call.content_type)
        call.name_model(self._settings.model_of(asked))
        if call.http.method in ("GET", "HEAD"):
            if call.route.lists_slots:
                return await self._monitors.slots(call)
            if call.route.tells_props and (told := await self._monitors.props(call)):
                return told
        return await self._passing.serve(call)

    async def _reject(self, call: Call, error: RouterError) -> web.StreamResponse:
        self._tell(call, error, str(error))
        response = error_response(error, call.id, call.clients_id)
        if isinstance(error, FramingError):
            response.force_close()
        open_to_browsers(call.http, response)
        return await call.sink.fail(response)

    def _fail(self, call: Call, error: Exception) -> web.StreamResponse:
        log.error("request_failed", request_id=call.id, exc_info=error)
        tasks.failures["request"] += 1
        told = RouterError("an error inside the router; see its log for this request's id")
        self._tell(call, told, type(error).__name__)
        begun = call.sink.begun
        if begun is not None:
            call.sink.abort()
            return begun
        return open_to_browsers(call.http, error_response(told, call.id, call.clients_id))

    def _tell(self, call: Call, error: RouterError, why: str) -> None:
        """Tell telemetry and the decision log of a rejection.

        Operators' requests are not for every reader of the decision log. Where keys are configured,
        a request without a key is left out: the log has limited room, and such requests must not
        push others out of it.
        """
        caller = call.caller
        if isinstance(error, TenantLimitError):
            self._telemetry.tenant_limited(error.limit_name)
        self._telemetry.rejected(call.id, error.outcome, why, call.clients_id, caller)
        if is_own(call.http.path):
            return
        if caller is not None or not self._keys.known.callers:
            self._decision_log.rejected(call.id, error.outcome, why, caller)


def _is_for_peers(path: str) -> bool:
    """Return whether a decoded path is one of the calls between hosts, however it is spelled."""
    return (normal_path(path) + "/").startswith(PEERS)
