"""A call that takes a slot, from its body to its last byte: parse, read, place, send, report.

Completions, and the other requests that take a slot of the server's choice (embeddings and the
like). The engine chooses the slot; `sending` relays the answer, and `reports` tells of its end.
"""

import asyncio
from dataclasses import dataclass, field
from time import perf_counter

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
from router.base.ports import Tracing
from router.base.tasks import spawn
from router.base.types import BackendId, Prompt, Request, RequestId
from router.engine.engine import Engine
from router.hosts.choice import is_stale
from router.llama import json_offload, trial
from router.llama.bodies.filters import NO_FILTERS, Filters
from router.llama.bodies.hints import session_of
from router.llama.multipart import is_form
from router.llama.routes import Shape
from router.llama.wire import InfillPrompt, ParsedRequest, parse_completion
from router.prompts.reader import is_left_to_server
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.api.elsewhere import Elsewhere
from router.web.api.preparation import Preparation
from router.web.api.sending import Sender
from router.web.api.slot_demand import slots_of
from router.web.api.suspects import Suspects
from router.web.server.call import Call
from router.web.server.settings import Settings

# Times a request is sent at most; again only if its backend failed before the first byte.
_ATTEMPTS = 3


def plain_request(call: Call, keys: Keys, model: str | None, unknown: str) -> Request:
    """Return the request of a call whose prompt is not read, and who sent it."""
    hop, salt = call.hop, "" if call.parsed is None else call.parsed.salt
    return Request(
        id=call.id,
        prompt=Prompt(unknown=unknown),
        model=model,
        tenant=keys.tenant(call.caller, salt) if hop is None else hop.tenant,
        client=call.client,
        sender=call.sender if hop is None else f"host {hop.host}",
        clients_id=call.clients_id,
        caller=call.caller,
        body_bytes=len(call.raw),
    )


@dataclass(slots=True, eq=False)
class Completions:
    """Serves the calls that take a slot."""

    _engine: Engine
    _selection: BackendSelection
    _sender: Sender
    _settings: Settings
    _keys: Keys
    _suspects: Suspects
    _elsewhere: Elsewhere
    _tracing: Tracing | None = None
    _accepted: trial.Accepted = field(default_factory=trial.Accepted)

    async def serve(self, call: Call) -> web.StreamResponse:
        """Serve a call at the first place that can. Raises RouterError."""
        there, error = self._elsewhere, None
        try:
            await self._parse(call)
            for place in (there.if_only_there, self._read, there.if_sooner, self._here):
                if (answer := await place(call)) is not None:
                    return answer
            raise AssertionError("this host always answers, or raises")
        except RouterError as told:
            error = told.outcome
            raise
        finally:
            self._selection.no_longer_waits(call.id)
            call.sink.end()
            if call.trace is not None:
                call.trace.end(perf_counter() - call.arrived, error)

    # -- parse -----------------------------------------------------------------------------------

    async def _parse(self, call: Call) -> None:
        """Read the fields of a body. Raises BadRequestError, SuspectError."""
        call.arrived = perf_counter()
        # A form is an object of strings to the server: no slot can be written into it.
        if call.route.shape and not is_form(call.content_type):
            # A host before has filtered the body of a forwarded request.
            filters = self._settings.filters if call.hop is None else NO_FILTERS
            parsed, call.raw = await json_offload.read(
                call.raw, _parsed, call, call.route.shape, filters
            )
            call.name_model(parsed.model)
            call.parsed = replace(parsed, model=call.model)
        else:
            asked = await json_offload.read(
                call.raw, slots_of, call.raw, call.content_type, call.route
            )
            call.name_model(self._settings.model_of(asked.model))
            call.tasks = asked.tasks
        # A suspect is sent alone.
        ends = self._suspects.check(call.raw, call.parsed)
        call.ends = max(ends, 0 if call.hop is None else call.hop.ends)
        if call.parsed is not None and call.parsed.stream:
            call.sink.expect_stream(call.parsed, call.names(), self._settings)

    # -- read ------------------------------------------------------------------------------------

    async def _read(self, call: Call) -> web.StreamResponse | None:
        """Read the prompt. An answer: a peer served the call sooner. Raises RouterError."""
        answer = await self._until_read(call)
        if answer is None:
            if call.parsed is not None:  # the price of other requests is a guess
                self._check_quote(call)
            self._begin_trace(call)
        return answer

    async def _until_read(self, call: Call) -> web.StreamResponse | None:
        """Wait for a backend that can read the prompt, and read it.

        An answer: meanwhile only a peer could serve the call, and did. Where peers refuse it, it
        goes on waiting. Raises NoBackendError after `queue.no_backend_wait`, and QueueFullError.
        """
        await self.describe(call)
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._engine.state.queue.limits.no_backend_s
        # With LoRA adapters the prompt is not read.
        while call.reader is None and call.parsed is not None and not call.parsed.lora:
            if not self._selection.can_wait_for_reader(call.model):
                break
            late: NoBackendError | None = None
            try:
                is_there = await self._until_reader(call)
            except NoBackendError as error:
                is_there, late = False, error
            if not is_there:
                try:
                    if (answer := await self._elsewhere.if_only_there(call)) is not None:
                        return answer
                except NoBackendError as error:
                    if clock.time() >= deadline:
                        raise late or error from None
            if late is not None:
                raise late
            await self.describe(call)
        return None

    async def _until_reader(self, call: Call) -> bool:
        """Wait for a backend that can read the prompt. False: only a peer can serve it now."""

        async def leave() -> None:
            await self._elsewhere.until_only_there(call)
            limit.reschedule(asyncio.get_running_loop().time())

        try:
            async with asyncio.timeout(None) as limit:
                leaving = spawn(leave(), name=f"other hosts {call.id}")
                try:
                    await self._selection.wait_for_reader(call.model, call.id)
                finally:
                    leaving.cancel()
        except TimeoutError:
            return False
        return True

    async def describe(self, call: Call) -> None:
        """Set the request for the scheduler, and its reader. Raises ModelNotFoundError."""
        if self._selection.is_attaching:
            await self._selection.until_attached()
        model, parsed = self._selection.resolve(call.model), call.parsed
        request = plain_request(call, self._keys, model, "not a completion")
        if parsed is None:
            call.request = self._not_a_completion(call, request)
            return
        avoid, tenant = self._selection.without_kv(model), request.tenant
        call.reader = None
        if parsed.lora:
            # KV computed with an adapter is another model's (llama-server.md section 1.7).
            prompt = Prompt(unknown="the request selects its own LoRA adapter")
        else:
            prompt, call.reader = await self._selection.read(parsed, model, tenant, avoid)
        call.request = replace(
            request,
            prompt=prompt,
            max_new_tokens=parsed.max_new_tokens,
            pinnable=parsed.pinnable,
            server_picks=parsed.pinnable and is_left_to_server(parsed, prompt, call.reader, tenant),
            tasks=parsed.tasks,
            answers=parsed.answers,
            reuse=parsed.cache_prompt,
            streams=parsed.stream,
            adapted=parsed.lora,
            shifts=parsed.shifts,
            slot_hint=parsed.slot_hint,
            avoid=avoid,
            may_leave=self._elsewhere.exists,
            session=session_of(call.http.headers, parsed.body, tenant),
            keep_s=parsed.hints.keep_s,
            fills=isinstance(parsed.prompt_source, InfillPrompt),
            background=parsed.background or self._keys.is_background(call.caller),
        )

    def _not_a_completion(self, call: Call, request: Request) -> Request:
        stateless, pick = call.route.stateless, self._selection
        avoid = pick.avoided_for_embeddings if stateless else pick.without_kv
        return replace(
            request,
            pinnable=False,
            tasks=call.tasks,
            max_new_tokens=None if call.route.shape else 0,  # a form has a completion
            reuse=not stateless,
            avoid=avoid(request.model),
            may_leave=self._elsewhere.exists,
        )

    def _check_quote(self, call: Call) -> None:
        """Raise StaleQuoteError if a peer was quoted a far lower price for a call."""
        hop = call.hop
        if hop is None or hop.quoted_s is None:  # `is_quoted`
            return
        quote = self._elsewhere.quote(call)
        if is_stale(hop.quoted_s, None if quote is None else quote.price_s):
            now = "cannot be served" if quote is None else f"would take {quote.price_s:.3f} s"
            raise StaleQuoteError(f"quoted {hop.quoted_s:.3f} s; by now it {now}")

    def _begin_trace(self, call: Call) -> None:
        if self._tracing is None:
            return
        ns = wall_ns() - round((perf_counter() - call.arrived) * 1e9)
        http, request = call.http, call.scheduled
        call.trace = self._tracing.begin(http.path, http.headers, request.id, request.model, ns)

    # -- place and send --------------------------------------------------------------------------

    async def _here(self, call: Call) -> web.StreamResponse:
        """Serve a call here; elsewhere if its backends fail before the first byte."""
        while True:
            try:
                return await self._attempts(call)
            except (NoBackendError, BackendError) as error:  # nothing was sent
                if (answer := await self._elsewhere.if_sooner(call)) is not None:
                    return answer
                is_last = isinstance(error, BackendError) or not call.scheduled.may_leave
                if is_last or call.is_quoted:
                    raise
            self._try_anew(call, replace(call.scheduled, may_leave=False))

    async def _attempts(self, call: Call) -> web.StreamResponse:
        """Wait for a slot and send; retry if the backend fails before the first byte.

        Retry on another backend. If there is none, retry on the same backend if it comes back
        within `queue.no_backend_wait`, like any request that arrives while it is down; or on
        another host.
        """
        first, failures = call.scheduled, 0
        if call.ends:
            call.request = self._selection.alone(first, None)
        while True:
            backend: BackendId | None = None
            is_suspect = False
            try:
                call.asked = perf_counter()
                preparation = Preparation(call, self._selection, self._suspects, self._accepted)
                grant = await self._engine.submit(call.scheduled, preparation)
                self._selection.no_longer_waits(call.id)
                call.granted = perf_counter()
                backend = grant.lease.slot.backend
                answer = await self._sender.send(call, grant)
                if answer.status == 200:
                    preparation.accepted()
                return answer
            except BackendError as error:
                if error.backend is not None:  # the backend failed before the grant
                    backend = error.backend
                    self._selection.doubt(backend)
                is_suspect = self._is_suspect(call, error, backend)
                failures += 1
                if failures == _ATTEMPTS:
                    raise
            finally:
                self._suspects.over(call.scheduled.id)
            elsewhere = await self._anew(call, first, backend, is_suspect=is_suspect)
            if elsewhere is not None:
                return elsewhere
            self._try_anew(call, call.scheduled)

    def _try_anew(self, call: Call, request: Request) -> None:
        """Set the request of another attempt: a late event of one must not count for the next."""
        call.attempts += 1
        call.request = replace(request, id=RequestId(f"{call.id}.{call.attempts}"))

    async def _anew(
        self, call: Call, first: Request, backend: BackendId | None, *, is_suspect: bool
    ) -> web.StreamResponse | None:
        """Set the request of the next attempt. An answer: another host served the call."""
        request = replace(call.scheduled, avoid=first.avoid)
        if is_suspect:
            request = self._selection.alone(request, backend)
        if backend is not None and self._selection.others(backend, request):
            request = replace(request, avoid=request.avoid | {backend})
        elif backend is not None:
            await self._selection.check_again(backend)  # instead of three failures in a row
            answer = await self._elsewhere.if_sooner(call)
            if answer is not None:
                return answer
        if call.reader is None and call.parsed is not None:  # it could not be read before
            answer = await self._until_read(call)
            if answer is not None:
                return answer
            alone = request.whole_backend
            request = replace(call.scheduled, avoid=request.avoid, whole_backend=alone)
        call.request = request
        return None

    def _is_suspect(self, call: Call, error: BackendError, backend: BackendId | None) -> bool:
        """Return whether a call may have ended a server, and is to be sent alone.

        Raises SuspectError if it is the second server.
        """
        if backend is None or not isinstance(error, BackendLostError):
            return False
        if not self._sender.is_to_blame(call, backend):
            return False
        if call.ends > 1:
            raise SuspectError(call.ends) from error
        return True


def _parsed(call: Call, shape: Shape, filters: Filters) -> tuple[ParsedRequest, bytes]:
    """Parse a body; return the bytes to send, too.

    Raises BadRequestError, which names a content type that explains the error.

    Any content type is accepted for JSON: llama-server does not check it either.
    """
    try:
        return parse_completion(shape, call.raw, filters)
    except BadRequestError as error:
        content_type = call.http.content_type
        if content_type in ("application/json", "application/octet-stream", "text/plain"):
            raise
        raise BadRequestError(
            f"{error}; the content type is {content_type}, send application/json"
        ) from error
