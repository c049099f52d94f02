"""A completion from its body to its last byte: parse, tokenize, wait for a slot, relay.

Serves also the other requests that take a slot of the server's choice (embeddings and the like).
The engine chooses the slot.
"""

import asyncio
import contextlib
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import TypedDict

from aiohttp import web
from msgspec.structs import replace

from router.base.clock import wall_ns
from router.base.errors import (
    BackendError,
    BackendLostError,
    BadRequestError,
    NoBackendError,
    RouterError,
    StaleQuoteError,
    SuspectError,
)
from router.base.ports import Attempt, Spawn, Trace, Tracing
from router.base.tasks import spawn
from router.base.types import (
    BackendId,
    Caller,
    Outcome,
    Prompt,
    Reported,
    Request,
    RequestId,
    Tenant,
)
from router.engine.engine import Engine, Grant, Timing
from router.engine.loop_throttle import LoopThrottle
from router.hosts.choice import is_stale
from router.llama import json_offload
from router.llama.answer_counts import AnswerCounts
from router.llama.replies import IDENTITY, read_reply
from router.llama.routes import Route, Shape
from router.llama.server_client import RelayedResponse
from router.llama.wire import ChatPrompt, ParsedRequest, parse_completion
from router.prompts.reader import PromptReader, is_left_to_server
from router.telemetry.decision_log import DecisionLog
from router.web.api import upstream_request
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys, fair_to
from router.web.api.forwarding import Forwarding
from router.web.api.preparation import Preparations
from router.web.api.slot_demand import SlotsAsked
from router.web.api.suspects import Suspects
from router.web.server.error_responses import clients_id, names, session_of
from router.web.server.hop import ENDS, HOP_OF, model_of
from router.web.server.relay import (
    CALLER,
    INLINE_BYTES,
    Capture,
    forward_headers,
    forward_target,
    relay,
)
from router.web.server.settings import Settings
from router.web.server.stream_start import START, StreamStart, head_of

# Times a request is sent at most; again only if its backend failed before the first byte.
_ATTEMPTS = 3


class _From(TypedDict):
    """The sender of a request: the fields of `Request` that name it."""

    tenant: Tenant
    client: str | None
    clients_id: str | None
    caller: Caller | None


@dataclass(slots=True)
class _Exchange:
    """One client request in progress; times are from `perf_counter`."""

    http: web.BaseRequest
    raw: bytes
    request: Request
    shape: Shape | None
    parsed: ParsedRequest | None
    reader: PromptReader | None
    arrived: float
    first_byte: float | None = None
    asked: float = 0.0  # when a slot was requested
    granted: float = 0.0
    trace: Trace | None = None


class Completions:
    """The handlers of all requests that take a slot."""

    def __init__(
        self,
        engine: Engine,
        selection: BackendSelection,
        decision_log: DecisionLog,
        spawn: Spawn,
        settings: Settings,
        keys: Keys,
        throttle: LoopThrottle,
        suspects: Suspects,
        tracing: Tracing | None = None,
        forwarding: Forwarding | None = None,
    ) -> None:
        """Set up the handlers. `forwarding` None: there are no other hosts."""
        self._forwarding = forwarding
        self._keys = keys
        self._throttle = throttle
        self._engine = engine
        self._decision_log = decision_log
        self._selection = selection
        self._spawn = spawn
        self._settings = settings
        self._tracing = tracing
        self._suspects = suspects
        self._preparations = Preparations(selection, suspects)

    async def completion(
        self, http: web.BaseRequest, shape: Shape, raw: bytes, request_id: RequestId
    ) -> web.StreamResponse:
        """Serve a completion route. Raises RouterError."""
        arrived = perf_counter()
        parsed = await json_offload.read(raw, _parsed, http, shape, raw)
        self._check(http, raw, parsed)
        if HOP_OF in http:
            parsed = replace(parsed, model=model_of(http, parsed.model))
        there, answer = self._forwarding, None
        if parsed.stream:
            http[START] = StreamStart(http, parsed, names(http, request_id), self._settings)
        try:
            if there is not None and there.must_leave(http, parsed.model):
                answer = await there.away(http, raw, parsed, request_id, parsed.model)
            while answer is None:
                if there is not None:
                    answer = await there.rather_than_load(http, raw, parsed, request_id)
                    if answer is not None:
                        break
                read = await self._read(http, raw, parsed, request_id)
                if read is None:
                    continue
                self._check_quote(http, read[0])
                answer = await self._serve(
                    _Exchange(http, raw, read[0], shape, parsed, read[1], arrived)
                )
        finally:
            self._selection.no_longer_waits(request_id)
            if (start := http.get(START)) is not None:
                start.end()
        return answer

    async def _read(
        self, http: web.BaseRequest, raw: bytes | None, parsed: ParsedRequest, request_id: RequestId
    ) -> tuple[Request, PromptReader | None] | None:
        """Wait for a backend that can read the prompt, then `describe`. Raises RouterError.

        None: meanwhile a peer would serve the request sooner. `raw` None: peers are not asked.
        """
        request, reader = await self.describe(http, parsed, request_id)
        while reader is None and not parsed.lora:  # with LoRA adapters the prompt is not read
            if not self._selection.can_wait_for_reader(parsed.model):
                break
            if not await self._until_reader(http, raw, parsed, request_id):
                return None
            request, reader = await self.describe(http, parsed, request_id)
        return request, reader

    async def _until_reader(
        self, http: web.BaseRequest, raw: bytes | None, parsed: ParsedRequest, request_id: RequestId
    ) -> bool:
        """Wait for a backend that can read the prompt. False: a peer would serve it sooner."""
        there = self._forwarding
        if there is None or raw is None or HOP_OF in http:
            await self._selection.wait_for_reader(parsed.model, request_id)
            return True

        async def ask_peers() -> None:
            await there.until_rather_elsewhere(http, raw, parsed, request_id)
            limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as limit:
                asking = spawn(ask_peers(), name=f"ask again {request_id}")
                try:
                    await self._selection.wait_for_reader(parsed.model, request_id)
                finally:
                    asking.cancel()
        except TimeoutError:
            return False
        return True

    async def describe(
        self, http: web.BaseRequest, parsed: ParsedRequest, request_id: RequestId
    ) -> tuple[Request, PromptReader | None]:
        """Return a completion for the scheduler, and its reader. Raises ModelNotFoundError."""
        model = self._selection.resolve(parsed.model)
        origin, avoid = self._from(http), self._selection.without_kv(model)
        reader: PromptReader | None = None
        if parsed.lora:
            # KV computed with an adapter is another model's (llama-server.md section 1.7).
            prompt = Prompt(unknown="the request selects its own LoRA adapter")
        else:
            prompt, reader = await self._selection.read(parsed, model, origin["tenant"], avoid)
        request = Request(
            id=request_id,
            prompt=prompt,
            model=model,
            max_new_tokens=parsed.max_new_tokens,
            pinnable=parsed.pinnable,
            server_picks=parsed.pinnable
            and is_left_to_server(parsed, prompt, reader, origin["tenant"]),
            whole_backend=parsed.whole_backend,
            reuse=parsed.cache_prompt,
            streams=parsed.stream,
            adapted=parsed.lora,
            shifts=parsed.shifts,
            slot_hint=parsed.slot_hint,
            avoid=avoid,
            **origin,
            session=session_of(http),
        )
        return request, reader

    async def other(
        self,
        http: web.BaseRequest,
        raw: bytes,
        request_id: RequestId,
        asked: SlotsAsked,
        route: Route,
    ) -> web.StreamResponse:
        """Serve a server-placed request that is no completion. Raises RouterError."""
        self._check(http, raw, None)
        there, named = self._forwarding, model_of(http, asked.model)
        if there is not None and there.must_leave(http, named):
            answer = await there.away(http, raw, None, request_id, named)
            if answer is not None:
                return answer
        stateless = route.stateless
        model = self._selection.resolve(named)
        request = Request(
            id=request_id,
            prompt=Prompt(unknown="not a completion"),
            model=model,
            pinnable=False,
            whole_backend=asked.many or (asked.in_form and stateless),
            max_new_tokens=0,
            reuse=not stateless,
            avoid=self._selection.avoided_for_embeddings(model)
            if stateless
            else self._selection.without_kv(model),
            **self._from(http),
        )
        arrived = perf_counter()
        return await self._serve(_Exchange(http, raw, request, None, None, None, arrived))

    def _check(self, http: web.BaseRequest, raw: bytes, parsed: ParsedRequest | None) -> None:
        """Note whether a request is suspect: it is sent alone then. Raises SuspectError."""
        hop = http.get(HOP_OF)
        ends = max(self._suspects.check(raw, parsed), 0 if hop is None else hop.ends)
        if ends:
            http[ENDS] = ends

    def _check_quote(self, http: web.BaseRequest, request: Request) -> None:
        """Raise StaleQuoteError if a peer was quoted a far lower price for a request."""
        hop = http.get(HOP_OF)
        if hop is None or hop.quoted_s is None:
            return
        quote = self._engine.quote(request)
        if is_stale(hop.quoted_s, None if quote is None else quote.price_s):
            now = "cannot be served" if quote is None else f"would take {quote.price_s:.3f} s"
            raise StaleQuoteError(f"quoted {hop.quoted_s:.3f} s; by now it {now}")

    def _from(self, http: web.BaseRequest) -> _From:
        caller, hop = http.get(CALLER), http.get(HOP_OF)
        return {
            "tenant": self._keys.tenant(caller) if hop is None else hop.tenant,
            "client": fair_to(http) if hop is None else hop.client,
            "clients_id": clients_id(http),
            "caller": caller,
        }

    async def _serve(self, exchange: _Exchange) -> web.StreamResponse:
        if self._tracing is None:
            return await self._serve_untraced(exchange)
        http, arrived = exchange.http, exchange.arrived
        ns = wall_ns() - round((perf_counter() - arrived) * 1e9)
        request = exchange.request
        trace = self._tracing.begin(http.path, http.headers, request.id, request.model, ns)
        exchange.trace, error = trace, None
        try:
            return await self._serve_untraced(exchange)
        except RouterError as told:
            error = told.outcome
            raise
        finally:
            trace.end(perf_counter() - arrived, error)

    async def _serve_untraced(self, exchange: _Exchange) -> web.StreamResponse:
        """Serve a request on the host that is soonest; here, if no other takes it."""
        answer = await self._elsewhere(exchange)
        if answer is not None:
            return answer
        try:
            return await self._serve_here(exchange)
        except (NoBackendError, BackendError):  # nothing was sent; another host may be up
            answer = await self._elsewhere(exchange)
            if answer is None:
                raise
            return answer

    async def _elsewhere(self, exchange: _Exchange) -> web.StreamResponse | None:
        """Serve a request on another host if that is sooner. None: it is served here."""
        if self._forwarding is None:
            return None
        return await self._forwarding.instead(
            exchange.http, exchange.raw, exchange.request, exchange.parsed
        )

    async def _serve_here(self, exchange: _Exchange) -> web.StreamResponse:
        """Wait for a slot and send; retry if the backend fails before the first byte.

        Retry on another backend. If there is none, retry on the same backend if it comes back
        within `queue.no_backend_wait`, like any request that arrives while it is down; or on
        another host.
        """
        first = exchange.request
        if exchange.http.get(ENDS):
            exchange.request = self._selection.alone(first, None)
        for attempt in range(1, _ATTEMPTS + 1):
            backend: BackendId | None = None
            try:
                exchange.asked = perf_counter()
                preparation = self._preparations.of(
                    exchange.http, exchange.raw, exchange.parsed, exchange.request
                )
                grant = await self._engine.submit(exchange.request, preparation)
                self._selection.no_longer_waits(first.id)
                exchange.granted = perf_counter()
                backend = grant.lease.slot.backend
                response = await self._send(exchange, grant)
                if response.status == HTTPStatus.OK:
                    preparation.accepted()
                return response
            except BackendError as error:
                if error.backend is not None:  # the backend failed before the grant
                    backend = error.backend
                    self._selection.doubt(backend)
                alone = self._is_lost(exchange, error, backend)
                if attempt == _ATTEMPTS:
                    raise
            finally:
                self._suspects.over(exchange.request.id)
            anew = replace(exchange.request, avoid=first.avoid)
            if alone:
                anew = self._selection.alone(anew, backend)
            if backend is not None and self._selection.others(backend, anew):
                anew = replace(anew, avoid=anew.avoid | {backend})
            elif backend is not None:
                await self._selection.check_again(backend)  # instead of three failures in a row
                answer = await self._elsewhere(exchange)
                if answer is not None:
                    return answer
            exchange.request = await self._anew(exchange, anew, first.id, attempt + 1)
        raise AssertionError("unreachable")

    def _is_lost(self, exchange: _Exchange, error: BackendError, backend: BackendId | None) -> bool:
        """Return whether a request may have ended a server, and is to be sent alone.

        Raises SuspectError if it is the second server.
        """
        if backend is None or not isinstance(error, BackendLostError):
            return False
        if not self._is_to_blame(exchange, backend):
            return False
        if exchange.http[ENDS] > 1:
            raise SuspectError(exchange.http[ENDS]) from error
        return True

    def _is_to_blame(self, exchange: _Exchange, backend: BackendId) -> bool:
        http, request = exchange.http, exchange.request.id
        before = http.get(ENDS, 0)
        ends = self._suspects.blame(request, backend, exchange.raw, exchange.parsed, before)
        http[ENDS] = before if ends is None else ends
        return ends is not None

    async def _anew(
        self, exchange: _Exchange, request: Request, first: RequestId, attempt: int
    ) -> Request:
        """Return a request for its next attempt, read if it could not be read before.

        The request gets a new id: a late event of one attempt must not count for the next.
        """
        if exchange.reader is None and exchange.parsed is not None:
            read = await self._read(exchange.http, None, exchange.parsed, first)
            assert read is not None
            exchange.reader = read[1]
            request = replace(read[0], avoid=request.avoid)
        return replace(request, id=RequestId(f"{first}.{attempt}"))

    async def _send(self, exchange: _Exchange, grant: Grant) -> web.StreamResponse:
        """Relay one admitted request; the grant is used up on return and on exception."""
        backend = grant.lease.slot.backend
        monitor = self._selection.monitors.get(backend)
        if monitor is None:  # a server on demand that has ended since the grant
            timing = Timing(None, 0.0)
            self._engine.finish(exchange.request.id, Outcome.BACKEND_ERROR, Reported(), timing)
            raise BackendError("the backend went down")
        capture = Capture()
        outcome = Outcome.BACKEND_ERROR
        upstream: RelayedResponse | None = None

        def first_byte() -> None:
            exchange.first_byte = perf_counter()
            if grant.plan.prefill_first and exchange.request.streams:
                told = partial(self._engine.begun, exchange.request.id)
                asyncio.get_running_loop().call_soon(self._throttle.call, told)

        self._suspects.sent(exchange.request.id, backend)
        try:
            headers, target = forward_headers(exchange.http), forward_target(exchange.http)
            if exchange.trace is not None:
                headers = exchange.trace.inject(headers)
            body = upstream_request.body(
                grant, exchange.raw, exchange.parsed, saved=monitor.saves, caches=monitor.caches
            )
            chosen, at = grant.plan.chosen, grant.lease.slot
            own = names(exchange.http, exchange.request.id)
            own |= upstream_request.headers(at, chosen.source, chosen.reused_tokens)
            method, on_head = exchange.http.method, head_of(exchange.http, own)
            async with monitor.client.relay(
                method, target, headers, body, yields=True, on_head=on_head
            ) as upstream:
                response, outcome = await relay(
                    exchange.http,
                    upstream,
                    own,
                    self._settings,
                    capture,
                    first_byte,
                    self._throttle,
                    self._counts(exchange, grant, upstream),
                )
                if outcome is Outcome.BACKEND_ERROR:  # in the middle of the answer
                    self._is_to_blame(exchange, backend)
                return response
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        finally:
            if outcome is Outcome.BACKEND_ERROR:
                self._selection.doubt(backend)
            ok = outcome is Outcome.OK and upstream is not None and upstream.status == 200
            finish = partial(
                self._finish,
                exchange,
                grant,
                outcome,
                capture,
                readable=upstream if ok else None,
                ended=perf_counter(),
            )
            if exchange.trace is not None:
                finish()
            elif outcome in (Outcome.OK, Outcome.REFUSED):
                # uvloop sends what was written at the end of this event-loop iteration. The next
                # iteration finishes the request, before anything that the client sends later.
                asyncio.get_running_loop().call_soon(self._throttle.call, finish)
            else:
                self._throttle.call(finish)

    def _counts(
        self, exchange: _Exchange, grant: Grant, upstream: RelayedResponse
    ) -> AnswerCounts | None:
        """Return the correction of an answer's counts. None: it is sent on as it comes."""
        if exchange.shape is None or grant.prefilled is None or not grant.prefilled.tokens:
            return None
        if not self._settings.corrects_counts or upstream.status != 200:
            return None
        if upstream.header("content-encoding") not in IDENTITY:
            return None
        return AnswerCounts(exchange.shape, grant.prefilled)

    def _finish(
        self,
        exchange: _Exchange,
        grant: Grant,
        outcome: Outcome,
        capture: Capture,
        *,
        readable: RelayedResponse | None,
        ended: float,
    ) -> None:
        """Report the end. Awaits nothing, so that a cancellation cannot skip it."""
        reported, whole = Reported(), True
        if readable is not None and exchange.shape is not None and exchange.parsed is not None:
            one_object = capture.complete and not exchange.parsed.stream
            whole = one_object or capture.size_bytes <= INLINE_BYTES
            reported = read_reply(
                exchange.shape,
                exchange.parsed.stream,
                capture.chunks if whole else capture.ends(INLINE_BYTES // 2),
                readable.header("content-encoding"),
                complete=whole,
            )
        total_s = ended - exchange.arrived
        ttft_s = None
        if exchange.first_byte is not None:
            ttft_s = exchange.first_byte - exchange.arrived
            if exchange.parsed is not None and not exchange.parsed.stream:
                ttft_s = reported.first_token_s(ttft_s)
        if exchange.trace is not None:
            exchange.trace.attempt(_attempt(exchange, grant, outcome, reported, ended))
        timing = Timing(ttft_s, total_s)
        rest = None if whole else capture
        then = partial(self._over, exchange, grant, outcome, reported, rest)
        self._engine.finish(exchange.request.id, outcome, reported, timing, then)

    def _over(
        self,
        exchange: _Exchange,
        grant: Grant,
        outcome: Outcome,
        reported: Reported,
        capture: Capture | None,
    ) -> None:
        source = exchange.parsed.prompt_source if exchange.parsed is not None else None
        if isinstance(source, ChatPrompt) and not source.media:
            self._decision_log.keep_chat(exchange.request.id, source.body, len(exchange.raw))
        if outcome is Outcome.OK and exchange.reader is not None:
            self._spawn(
                self._learn(exchange, grant, reported, capture),
                name=f"learn {exchange.request.id}",
            )

    async def _learn(
        self, exchange: _Exchange, grant: Grant, reported: Reported, capture: Capture | None
    ) -> None:
        """Read the answer's token ids, and compare the tokenizer's count with the backend's."""
        prompt, parsed, reader = exchange.request.prompt, exchange.parsed, exchange.reader
        if prompt.unknown or prompt.n_media or parsed is None or reader is None:
            return
        if reported.prompt_tokens is not None and not parsed.whole_backend:
            await reader.compare(parsed, len(prompt), reported.prompt_tokens)
        if capture is not None and capture.complete:
            reported = await asyncio.to_thread(
                read_reply, parsed.shape, parsed.stream, capture.chunks
            )
        answer = reported.generated
        if answer is None and reported.text:
            with contextlib.suppress(BackendError):  # the backend is gone; a save reads the ids too
                answer = await reader.answer(reported.text)
        if answer:
            self._engine.answer_read(grant.lease, prompt.tokens, answer)


def _attempt(
    exchange: _Exchange, grant: Grant, outcome: Outcome, reported: Reported, ended: float
) -> Attempt:
    """Return one attempt for the trace. For an unstreamed answer the first byte is the last."""
    arrived, first, chosen = exchange.arrived, exchange.first_byte, grant.plan.chosen
    return Attempt(
        slot=grant.lease.slot,
        source=chosen.source,
        planned_tokens=chosen.reused_tokens,
        asked_s=exchange.asked - arrived,
        waited_s=grant.waited_s,
        granted_s=exchange.granted - arrived,
        first_byte_s=None if first is None else first - arrived,
        ended_s=ended - arrived,
        outcome=outcome,
        reported=reported.with_prefill(grant.prefilled),
    )


def _parsed(http: web.BaseRequest, shape: Shape, raw: bytes) -> ParsedRequest:
    """Parse a body. Raises BadRequestError, which names a content type that explains the error.

    Any content type is accepted for JSON: llama-server does not check it either.
    """
    try:
        return parse_completion(shape, raw)
    except BadRequestError as error:
        if http.content_type in ("application/json", "application/octet-stream", "text/plain"):
            raise
        raise BadRequestError(
            f"{error}; the content type is {http.content_type}, send application/json"
        ) from error
