"""The end of a call that was sent: what its answer says, to the engine, the trace and the log."""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from router.base.errors import BackendError
from router.base.ports import Attempt, Spawn
from router.base.types import BackendId, Outcome, Prompt, Reported, Request
from router.core.model.effects import AnswerEnd
from router.engine.engine import Engine, Grant
from router.llama.attach.monitor import Monitor
from router.llama.replies import (
    IDENTITY,
    events_in,
    read_reply,
    read_usage,
    tokens_seen,
    with_counts,
)
from router.llama.several_replies import asked_in, read_totals, telling
from router.llama.wire import ParsedRequest
from router.prompts.reader import PromptReader
from router.web.server.call import Call
from router.web.server.relay import INLINE_BYTES, Capture

_BROKEN = (Outcome.CLIENT_GONE, Outcome.BACKEND_ERROR)
_USAGE_WITHIN = 4096  # bytes of either end of an answer of embeddings, or of an error
# Of one task, while others are computed; what is wrong with a body is found before any begins.
_OF_ONE_TASK = re.compile(rb'"exceed_context_size_error"|"code":\s*500')


@dataclass(frozen=True, slots=True)
class End:
    """The end of one attempt. `ok`: its answer is whole and has status 200.

    `request` is that of this attempt: when the end is reported, the call may have the next one.
    """

    request: Request
    grant: Grant
    outcome: Outcome
    capture: Capture
    ok: bool
    encoding: str | None
    ended: float  # by `perf_counter`


@dataclass(slots=True, eq=False)
class Reports:
    """Tells of ends, and learns from answers."""

    _engine: Engine
    _monitors: Mapping[BackendId, Monitor]
    _spawn: Spawn

    def finish(self, call: Call, end: End) -> None:
        """Report an end. Awaits nothing, so that a cancellation cannot skip it."""
        capture, parsed = end.capture, call.parsed
        one_object = capture.complete and (parsed is None or not parsed.stream)
        whole = not end.ok or one_object or capture.size_bytes <= INLINE_BYTES
        several = (call.tasks if parsed is None else parsed.tasks) > 1
        reported = _reported(call, end, whole=whole, several=several)
        partly = several and not end.ok and _OF_ONE_TASK.search(_ends_of(capture)) is not None
        ttft_s = None
        if call.first_byte is not None:
            ttft_s = call.first_byte - call.arrived
            if parsed is not None and not parsed.stream:
                ttft_s = reported.first_token_s(ttft_s)
        if call.trace is not None:
            call.trace.attempt(_attempt(call, end, reported))
        ended = AnswerEnd(end.outcome, reported, ttft_s, end.ended - call.arrived, partly)
        then = partial(self._over, call, end, reported, None if whole else end.capture)
        self._engine.finish(end.request.id, ended, then)

    def _over(self, call: Call, end: End, reported: Reported, rest: Capture | None) -> None:
        parsed, request = call.parsed, end.request
        if parsed is None:
            return
        if end.outcome is Outcome.OK and call.reader is not None:
            self._spawn(
                self._learn(parsed, call.reader, request.prompt, end.grant, reported, rest),
                name=f"learn {request.id}",
            )

    async def _learn(
        self,
        parsed: ParsedRequest,
        reader: PromptReader,
        prompt: Prompt,
        grant: Grant,
        reported: Reported,
        rest: Capture | None,
    ) -> None:
        """Read the answer's token ids, and compare the tokenizer's count with the backend's.

        `rest`: the answer, where only its two ends have been read.
        """
        if prompt.unknown:
            return
        if reported.prompt_tokens is not None and parsed.tasks == 1 and not prompt.n_media:
            backend, cached = grant.lease.slot.backend, reported.cached_tokens
            monitor = self._monitors.get(backend)
            ahead = 0 if grant.prefilled is None else grant.prefilled.tokens
            meant = max(grant.plan.chosen.reused_tokens, ahead)
            misread = await reader.compare(
                parsed,
                len(prompt),
                reported.prompt_tokens,
                server=None if monitor is None else monitor.client,
                lost=cached is not None and cached < meant // 2,
            )
            if misread:
                self._engine.misread(backend, always=reader.differs(backend))
        if rest is not None and rest.complete:
            reported = await asyncio.to_thread(read_reply, parsed.shape, parsed.stream, rest.chunks)
        answer = reported.generated
        if answer is None and reported.text:
            with contextlib.suppress(BackendError):  # the backend is gone; a save reads the ids too
                answer = await reader.answer(reported.text)
        if answer:
            self._engine.answer_read(grant.lease, prompt.tokens, answer)


def _ends_of(capture: Capture) -> bytes:
    return b"".join(capture.ends(_USAGE_WITHIN))


def _reported(call: Call, end: End, *, whole: bool, several: bool) -> Reported:
    """Return what an answer says, or what came of it. `whole`, as of `_read`."""
    capture, parsed = end.capture, call.parsed
    is_read, reported = end.ok and end.encoding in IDENTITY, Reported()
    if end.ok and parsed is not None:
        reported = _read(parsed, end, whole=whole)
    elif is_read:
        reported = read_usage(_ends_of(capture))
    if reported.generated_tokens is not None or call.route.stateless:
        return reported
    if parsed is not None and parsed.stream and (end.ok or end.outcome in _BROKEN):
        # The server's totals come last: it has failed, or its client has gone.
        seen = tokens_seen(capture.chunks, capture.size_bytes)
        return replace(reported, generated_tokens=seen)
    if is_read and (capture.complete or not several):
        parts = capture.chunks if several else capture.ends(INLINE_BYTES // 2)
        return with_counts(reported, parts, several=several)
    return reported


def _read(parsed: ParsedRequest, end: End, *, whole: bool) -> Reported:
    """Return what an answer says. `whole`: all of it is short enough to be read here."""
    capture = end.capture
    if parsed.tasks == 1 or end.encoding not in IDENTITY:
        chunks = capture.chunks if whole else capture.ends(INLINE_BYTES // 2)
        return read_reply(parsed.shape, parsed.stream, chunks, end.encoding, complete=whole)
    if not (parsed.stream or capture.complete):
        return Reported()  # its two ends may read as an object of one task
    raw = b"".join(capture.chunks)
    events = events_in(telling(raw) if parsed.stream else raw, parsed.stream)
    reported = read_totals(parsed.shape, events, asked_in(parsed))
    if parsed.stream and not capture.complete:  # a task may have ended in what was not kept
        seen = tokens_seen(capture.chunks, capture.size_bytes)
        return replace(reported, generated_tokens=max(reported.generated_tokens or 0, seen))
    return reported


def _attempt(call: Call, end: End, reported: Reported) -> Attempt:
    """Return one attempt for the trace. For an unstreamed answer the first byte is the last."""
    arrived, first, chosen = call.arrived, call.first_byte, end.grant.plan.chosen
    return Attempt(
        slot=end.grant.lease.slot,
        source=chosen.source,
        planned_tokens=chosen.reused_tokens,
        asked_s=call.asked - arrived,
        waited_s=end.grant.waited_s,
        granted_s=call.granted - arrived,
        first_byte_s=None if first is None else first - arrived,
        ended_s=end.ended - arrived,
        outcome=end.outcome,
        reported=reported.with_prefill(end.grant.prefilled),
    )
