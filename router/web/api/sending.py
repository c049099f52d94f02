"""An admitted call is sent to its slot, and the answer relayed; its end is reported once."""

import asyncio
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from aiohttp import web

from router.base.errors import BackendError
from router.base.types import BackendId, Outcome, OwnPrefill, SlotId, Source
from router.core.model.effects import AnswerEnd
from router.engine.engine import Engine, Grant
from router.engine.loop_throttle import LoopThrottle
from router.llama.answer_counts import AnswerCounts
from router.llama.attach.monitor import Monitor
from router.llama.http1 import OnHead, Response
from router.llama.replies import IDENTITY
from router.llama.server_client import Relaying
from router.llama.wire import ParsedRequest, kept_in_place, pin_slot, strip_slot
from router.web.api.backend_selection import BackendSelection
from router.web.api.reports import End, Reports
from router.web.api.suspects import Suspects
from router.web.server.call import Call
from router.web.server.relay import Capture, relay
from router.web.server.settings import Settings


@dataclass(slots=True, eq=False)
class Sender:
    """Sends calls to backends of this host."""

    _engine: Engine
    _selection: BackendSelection
    _suspects: Suspects
    _settings: Settings
    _throttle: LoopThrottle
    _reports: Reports

    async def send(self, call: Call, grant: Grant) -> web.StreamResponse:
        """Relay one admitted call; the grant is used up on return and on exception.

        Raises BackendError before the first byte of the answer.
        """
        request, backend = call.scheduled, grant.lease.slot.backend
        monitor = self._selection.monitors.get(backend)
        if monitor is None:  # a server on demand that has ended since the grant
            self._engine.finish(request.id, AnswerEnd(Outcome.BACKEND_ERROR))
            raise BackendError("the backend went down")
        capture = Capture()
        outcome = Outcome.BACKEND_ERROR
        upstream: Response | None = None

        def on_begun() -> None:
            if grant.plan.prefill_first and request.streams:
                told = partial(self._engine.begun, request.id)
                asyncio.get_running_loop().call_soon(self._throttle.call, told)

        self._suspects.sent(request.id, backend)
        try:
            chosen, at = grant.plan.chosen, grant.lease.slot
            own = call.names() | slot_headers(at, chosen.source, chosen.reused_tokens)
            async with self._asked(call, grant, monitor, call.sink.on_head(own)) as upstream:
                counts = self._counts(call, grant.prefilled, upstream)
                answer, outcome = await relay(
                    call, upstream, own, self._settings, self._throttle, capture, counts, on_begun
                )
                if outcome is Outcome.BACKEND_ERROR:  # in the middle of the answer
                    self.is_to_blame(call, backend)
                return answer
        except asyncio.CancelledError:
            outcome = Outcome.CLIENT_GONE
            raise
        finally:
            if outcome is Outcome.BACKEND_ERROR:
                self._selection.doubt(backend)
            ok = outcome is Outcome.OK and upstream is not None and upstream.status == 200
            encoding = upstream.header("content-encoding") if ok and upstream is not None else None
            end = End(request, grant, outcome, capture, ok, encoding, perf_counter())
            report = partial(self._reports.finish, call, end)
            if call.trace is not None:
                report()
            elif outcome in (Outcome.OK, Outcome.REFUSED):
                # uvloop sends what was written at the end of this event-loop iteration. The next
                # iteration finishes the request, before anything that the client sends later.
                asyncio.get_running_loop().call_soon(self._throttle.call, report)
            else:
                self._throttle.call(report)

    def _asked(
        self, call: Call, grant: Grant, monitor: Monitor, on_head: OnHead | None
    ) -> Relaying:
        """Return the function that sends the call to its slot."""
        headers, target, method = call.forwarded_headers(), call.target, call.http.method
        if call.trace is not None:
            headers = call.trace.inject(headers)
        saved, caches = monitor.saves, monitor.caches
        body = body_for(grant, call.raw, call.parsed, saved=saved, caches=caches)
        return monitor.client.relay(method, target, headers, body, yields=True, on_head=on_head)

    def is_to_blame(self, call: Call, backend: BackendId) -> bool:
        """Return whether a backend that ended did so with this call, and count it then."""
        request = call.scheduled.id
        ends = self._suspects.blame(request, backend, call.raw, call.parsed, call.ends)
        if ends is not None:
            call.ends = ends
        return ends is not None

    def _counts(
        self, call: Call, prefilled: OwnPrefill | None, upstream: Response
    ) -> AnswerCounts | None:
        """Return the correction of an answer's counts. None: it is sent on as it comes."""
        parsed, settings = call.parsed, self._settings
        if parsed is None or upstream.status != 200:
            return None
        own = prefilled if settings.corrects_counts and prefilled is not None else OwnPrefill()
        creation = settings.tells_creation and parsed.hints.keep_s > 0
        hides = parsed.counts_asked is not None
        encoded = upstream.header("content-encoding") not in IDENTITY
        if not (own.tokens or creation or hides) or encoded:
            return None
        return AnswerCounts(parsed.shape, own, tells_creation=creation, hides_timings=hides)


def body_for(
    grant: Grant,
    raw: bytes,
    parsed: ParsedRequest | None,
    *,
    saved: bool = False,
    caches: bool = True,
) -> bytes:
    """Return the client's body, pinned to the leased slot if the grant says so.

    Without `parsed` the body is unchanged. `saved`: the slot may become a state file afterwards.
    Not `caches`: the server reuses nothing unless the request says so (--no-cache-prompt).
    """
    if parsed is None:
        return raw
    more = kept_in_place(parsed.body) if saved else {}
    if not caches and "cache_prompt" not in parsed.body and not parsed.lora:
        more["cache_prompt"] = True
    if (fields := parsed.counts_asked) is not None:
        more["response_fields"] = fields
    slot = grant.lease.slot.index
    if parsed.lora:
        # No KV in the slot was computed with these adapters, though the server may assume so.
        return pin_slot(raw, parsed.body, slot if grant.pin else -1, cache_prompt=False, **more)
    if grant.pin:
        return pin_slot(raw, parsed.body, slot, **more)
    return strip_slot(raw, parsed.body, **more)


def slot_headers(slot: SlotId, source: Source, reused_tokens: int) -> dict[str, str]:
    """Return the answer's headers: backend, slot, source and reused tokens."""
    return {
        "x-kvferry-backend": slot.backend,
        "x-kvferry-slot": str(slot.index),
        "x-kvferry-source": source,
        "x-kvferry-reused-tokens": str(reused_tokens),
    }
