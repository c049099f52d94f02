"""Background answers in slices: between two of them the slot may go to another request."""

from collections.abc import Awaitable, Callable
from contextlib import suppress

import structlog
from msgspec.structs import replace

from router.base.errors import BackendError, BackendRefusedError
from router.base.types import Prompt, Request
from router.engine.engine import Engine, Grant
from router.llama import json_offload
from router.llama.attach.monitor import Monitor
from router.llama.client import LlamaClient
from router.llama.replies import IDENTITY
from router.llama.routes import Shape
from router.llama.server_client import RelayedResponse
from router.llama.slices import NO_TEXT, NotSlicedError, SlicedAnswer, can_be_sliced
from router.llama.wire import ParsedRequest
from router.web.api.backend_selection import BackendSelection
from router.web.server.call import Call

log = structlog.get_logger(__name__)

# A server that knows how to go on from a message refuses this; an older one renders it.
_CONTRADICTION = (
    b'{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],'
    b'"continue_final_message":true,"add_generation_prompt":true}'
)

Ask = Callable[[ParsedRequest, bytes], Awaitable[RelayedResponse]]


class Slicing:
    """Decides which answers are generated in slices, and generates them."""

    def __init__(self, engine: Engine, selection: BackendSelection) -> None:
        self._engine = engine
        self._selection = selection
        self._goes_on: dict[str, bool] = {}  # whether a build can go on from a message

    async def begin(self, call: Call, grant: Grant, monitor: Monitor) -> SlicedAnswer | None:
        """Return the answer to generate in slices, perhaps begun elsewhere. None: as one.

        Raises BackendError.
        """
        parsed, request = call.parsed, call.scheduled
        if call.sliced is None:
            if parsed is None or not request.background or call.as_one or not grant.pin:
                return None
            known = request.prompt.is_exact and can_be_sliced(parsed)
            if not known or not await self._is_fit(parsed, monitor):
                return None
            assert monitor.attached is not None
            n_ctx = monitor.attached.props.n_ctx
            call.sliced = SlicedAnswer(parsed, request.prompt.tokens, grant.prefilled, n_ctx)
        call.sliced.begin()
        return call.sliced

    async def _is_fit(self, parsed: ParsedRequest, monitor: Monitor) -> bool:
        """Return whether a server generates the same in slices. Raises BackendError."""
        attached = monitor.attached
        if attached is None or not attached.props.draws_afresh:
            return False
        if parsed.max_new_tokens is None and attached.props.n_predict >= 0:
            return False
        if parsed.shape is not Shape.CHAT:
            return True
        build = attached.props.build_info
        if build not in self._goes_on:
            try:
                await monitor.client.apply_template(_CONTRADICTION)
                self._goes_on[build] = False
            except BackendRefusedError as error:
                self._goes_on[build] = "continue_final_message" in str(error)
        return self._goes_on[build]

    async def generate(
        self, call: Call, sliced: SlicedAnswer, client: LlamaClient, ask: Ask
    ) -> RelayedResponse | None:
        """Generate slice after slice; return the whole answer, or the refusal of the first slice.

        None: the rest is to be submitted anew, because another request needs the slot or the
        slices do not fit together. Raises BackendError.
        """
        while True:
            parsed, raw = sliced.next()
            answer = await ask(parsed, raw)
            if answer.status != 200 and not sliced.n_tokens:
                return answer
            try:
                if answer.status != 200 or answer.header("content-encoding") not in IDENTITY:
                    raise NotSlicedError("a slice was refused")
                body = await answer.read()
                if await json_offload.read(body, sliced.add, body):
                    return answer.with_body(sliced.whole())
                await _end_with_a_character(sliced, client)
            except NotSlicedError as error:
                log.info("answer_not_sliced", request=call.id, reason=str(error))
                call.sliced, call.as_one = None, True
                return None
            if self._engine.must_yield(call.scheduled.id):
                return None

    async def rest(self, call: Call, first: Request) -> Request:
        """Return the request for the rest of a call; for all of it, if that cannot be read."""
        goes_on = call.scheduled.goes_on
        if call.sliced is not None:
            prompt = await self._prompt_of(call, call.sliced, first)
            if prompt.is_exact and prompt.tokens:
                return replace(
                    call.scheduled,
                    prompt=prompt,
                    max_new_tokens=call.sliced.n_left,
                    goes_on=goes_on or call.sliced.n_tokens > 0,
                )
            call.sliced, call.as_one = None, True
        return replace(
            call.scheduled,
            prompt=first.prompt,
            max_new_tokens=first.max_new_tokens,
            goes_on=goes_on or call.as_one,
        )

    async def _prompt_of(self, call: Call, sliced: SlicedAnswer, first: Request) -> Prompt:
        if (tokens := sliced.tokens) is not None:
            return Prompt(tokens)
        with suppress(BackendError):
            prompt, _ = await self._selection.read(
                sliced.so_far(), call.scheduled.model, first.tenant, first.avoid
            )
            return prompt
        return Prompt(unknown="no backend reads it")


async def _end_with_a_character(sliced: SlicedAnswer, client: LlamaClient) -> None:
    """Take back the tokens of a character that is not complete.

    Raises BackendError, NotSlicedError.

    The server answers with U+FFFD in place of its first bytes, and the next slice would begin with
    the others.
    """
    ids, whole = sliced.last_ids(), ""
    for n_tokens in range(len(ids)):
        text = await client.detokenize(ids[: len(ids) - n_tokens])
        whole = whole or text
        if not text.endswith(NO_TEXT):
            if n_tokens:
                sliced.take_back(n_tokens, whole[len(text) :])
            return
