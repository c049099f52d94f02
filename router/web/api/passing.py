"""Calls that take no slot: passed to a server as they are, or answered for several servers."""

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from aiohttp import web

from router.base.errors import (
    BackendError,
    BackendTimeoutError,
    ModelNotFoundError,
    NoBackendError,
    NotFoundError,
)
from router.core.model.servers import ServerPhase
from router.engine.loop_throttle import LoopThrottle
from router.llama.client import LlamaClient
from router.llama.http1 import Response
from router.llama.listings import Listed, merge_models, with_names, with_status
from router.llama.replies import knows_no_answer
from router.web.api.backend_selection import BackendSelection
from router.web.api.elsewhere import Elsewhere
from router.web.server.call import Call
from router.web.server.error_responses import OWN_HEADERS, json_response, open_to_browsers
from router.web.server.relay import relay
from router.web.server.settings import Settings

# A server lists its models in milliseconds, however busy its slots are.
_MODELS_WITHIN_S = 2.0
_PAGE = ("/", "/index.html")


@dataclass(slots=True, eq=False)
class Passing:
    """Serves the calls that take no slot."""

    _selection: BackendSelection
    _settings: Settings
    _throttle: LoopThrottle
    _elsewhere: Elsewhere

    async def serve(self, call: Call) -> web.StreamResponse:
        """Serve a call as its route says. `call.model` is set. Raises RouterError."""
        if call.route.controls and call.http.method == "POST":
            return await self._control(call)
        return await self._pass(call)

    async def _pass(self, call: Call) -> web.StreamResponse:
        """Forward a call as it is to a backend that fits.

        If the backend fails before it answers, and the call cannot have changed anything, try
        another backend.
        """
        answer = await self._elsewhere.if_only_there(call)
        if answer is not None:
            return answer
        if self._selection.is_attaching:
            await self._selection.until_attached()
        model = self._selection.resolve(call.model)
        looks = call.http.method in ("GET", "HEAD")
        try:
            # A look must not load a model: programs ask for /health and /props all the time.
            if call.upstream is not None or not (looks or call.route.unknown):
                await self._selection.until_usable(model, call.id)
            elif call.route.tells_health and self._selection.servers:
                return open_to_browsers(call.http, json_response({"status": "ok"}))
            try:
                clients = self._selection.fitting(model)
            except NoBackendError:
                if call.http.path in _PAGE and looks:
                    return self._page(call)
                if call.route.unknown:
                    raise NotFoundError("File Not Found") from None
                raise
            return await self._pass_to(clients if looks or call.route.reads else clients[:1], call)
        finally:
            self._selection.no_longer_waits(call.id)

    def _page(self, call: Call) -> web.Response:
        """Return a page for a browser while no server can show its own."""
        if self._settings.shows_page:  # a relative target: a proxy may have put a path before it
            headers = OWN_HEADERS | {"Location": "kvferry/", "Cache-Control": "no-store"}
            return web.Response(status=302, headers=headers)
        told = "kvferry is ready; the first request loads a model (GET /v1/models lists them).\n"
        return open_to_browsers(call.http, web.Response(text=told, headers=OWN_HEADERS))

    async def _pass_to(self, clients: list[LlamaClient], call: Call) -> web.StreamResponse:
        for client in clients:
            try:
                async with self._sent(call, client) as upstream:
                    return await self._relayed(call, client, upstream)
            except BackendError:
                self._selection.doubt(client.id)
                if client is clients[-1]:
                    raise
        raise AssertionError("unreachable")

    async def _control(self, call: Call) -> web.StreamResponse:
        """Forward a call that names an answer in progress.

        Try one backend after the other, until one is writing that answer.
        """
        try:
            clients = self._selection.all_up(self._selection.resolve(call.model))
        except (NoBackendError, ModelNotFoundError):
            answer = await self._elsewhere.control(call)
            if answer is None:
                raise
            return answer
        *others, last = clients
        for client in others:
            with contextlib.suppress(BackendError):
                async with self._sent(call, client) as upstream:
                    if not knows_no_answer(await self._whole(upstream)):
                        return await self._relayed(call, client, upstream)
        try:
            async with self._sent(call, last) as upstream:
                if knows_no_answer(await self._whole(upstream)):
                    answer = await self._elsewhere.control(call)
                    if answer is not None:
                        return answer
                return await self._relayed(call, last, upstream)
        except BackendError:
            answer = await self._elsewhere.control(call)
            if answer is None:
                raise
            return answer

    async def _whole(self, upstream: Response) -> bytes:
        """Return a short answer. Raises BackendError if it does not come to its end."""
        try:
            async with asyncio.timeout(self._settings.limits.idle_timeout_s):
                return await upstream.read()
        except TimeoutError as error:
            raise BackendTimeoutError("the backend did not end its answer") from error

    def _sent(self, call: Call, client: LlamaClient) -> AbstractAsyncContextManager[Response]:
        headers = call.forwarded_headers(resumable=self._settings.passthrough)
        return client.relay(call.http.method, call.target, headers, call.raw or None, yields=True)

    async def _relayed(
        self, call: Call, client: LlamaClient, upstream: Response
    ) -> web.StreamResponse:
        own = call.names() | {"x-kvferry-backend": client.id, "x-kvferry-source": "none"}
        return (await relay(call, upstream, own, self._settings, self._throttle))[0]

    async def models(self, call: Call) -> web.StreamResponse:
        """Return the models of all backends. Raises RouterError.

        With one model it gives its server's own answer. A model is left out if none of its
        servers answers.
        """
        models = self._selection.for_each_model()
        servers = self._selection.servers
        there: list[bytes] = []
        if call.hop is None:
            there = await self._elsewhere.models(_MODELS_WITHIN_S)
        named = [name for name, one in self._settings.filters.items() if one.model is not None]
        if len(models) < 2 and not there and not servers and not named:
            return await self._pass(call)
        told = await asyncio.gather(*(_models_of(clients) for clients in models))
        answers = [answer for answer in told if answer is not None] + there
        if not answers and not servers:
            raise BackendError("no backend lists its models")
        # Of the replicas of a model, one that is up says most.
        ordered = sorted(servers, key=lambda server: server.phase is ServerPhase.UP)
        found = {
            one.spec.models: Listed(one.phase, one.spec.n_ctx, one.spec.n_slots) for one in ordered
        }
        listed = with_status(merge_models(answers), found)
        listed = with_names(listed, named)
        return open_to_browsers(call.http, json_response(listed, headers=call.names()))


async def _models_of(clients: Sequence[LlamaClient]) -> bytes | None:
    """Return the answer of the first backend that gives one; None if none does."""
    for client in clients:
        with contextlib.suppress(BackendError, TimeoutError):
            async with asyncio.timeout(_MODELS_WITHIN_S):
                return await client.get("/v1/models")
    return None
