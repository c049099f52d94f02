"""HTTP client of one llama-server: its control calls.

Raises only BackendError and its subclasses. The engine decides whether a slot action may be sent.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus

from router.base.errors import (
    BackendError,
    BackendLostError,
    BackendRefusedError,
    BackendTimeoutError,
)
from router.base.tokens import Tokens
from router.base.types import BackendId, PrefillProgress, Reported, SlotStatus, Transfer
from router.llama import json_offload, wire
from router.llama import replies as reply
from router.llama.routes import Shape
from router.llama.server_client import Connections, RelayedResponse, ServerClient, Timeouts

_JSON = (b"Content-Type", b"application/json")
# Tokens that are generated where the first is a part of a character, which has up to four bytes.
_WITHIN_A_CHARACTER = 8
# llama-server's metrics are 3 KB.
_MAX_METRICS_BYTES = 256 * 1024


class LlamaClient(ServerClient):
    """`ports.SlotServer` over HTTP, and all other calls to a llama-server."""

    def __init__(
        self,
        backend: BackendId,
        url: str,
        connections: Connections,
        timeouts: Timeouts,
        api_key: str | None = None,
    ) -> None:
        super().__init__(backend, url, connections, timeouts, api_key)
        self._suspect: Callable[[], None] = lambda: None

    def tell_suspicions(self, told: Callable[[], None]) -> None:
        """Call `told` when a call about texts or ids fails or takes longer than `health_s`.

        A refusal is no failure.
        """
        self._suspect = told

    async def health(self) -> None:
        """Return if the server is up and its model is loaded; else raise BackendError."""
        await self._call("GET", "/health", None, self._timeouts.health_s)

    async def props(self, *, soon: bool = False) -> reply.Props:
        """Return the answer to `GET /props`. `soon`: wait no longer than for `/health`."""
        return reply.props_from(await self.props_answer(soon=soon))

    async def models(self) -> reply.ModelsInfo:
        """Return the answer to `GET /v1/models`."""
        return reply.models_from(await self.models_answer())

    async def models_answer(self) -> bytes:
        """Return the raw answer to `GET /v1/models`."""
        return await self._call("GET", "/v1/models", None, self._timeouts.control_s)

    async def lora_adapters(self, *, soon: bool = False) -> bytes:
        """Return the raw answer to `GET /lora-adapters`; it is only compared for equality.

        `soon`: wait no longer than a check of health may take.
        """
        timeout_s = self._timeouts.health_s if soon else self._timeouts.control_s
        return await self._call("GET", "/lora-adapters", None, timeout_s)

    async def metrics(self) -> bytes:
        """Return the raw answer to `GET /metrics`. A server without `--metrics` refuses it."""
        timeout_s = self._timeouts.health_s
        return await self._call("GET", "/metrics", None, timeout_s, _MAX_METRICS_BYTES)

    async def props_answer(self, *, soon: bool = False) -> bytes:
        """Return the raw answer to `GET /props`. `soon`: wait no longer than for `/health`."""
        timeout_s = self._timeouts.health_s if soon else self._timeouts.control_s
        return await self._call("GET", "/props", None, timeout_s)

    async def slots_answer(self) -> bytes:
        """Return the raw answer to `GET /slots`; as `slots`, at most once a second."""
        return await self._call("GET", "/slots", None, self._timeouts.control_s)

    async def slots(self) -> list[SlotStatus]:
        """Return the status of every slot (`GET /slots`).

        More than one poll a second hides abandoned requests from the server (llama-server.md
        section 5.6).
        """
        return reply.slots_from(await self.slots_answer())

    async def tokenize(
        self, content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the ids of `content` as the engine sees them (`POST /tokenize`)."""
        body = wire.tokenize_body(content, add_special=add_special, parse_special=parse_special)
        payload = await self._ask("/tokenize", body)
        return await json_offload.read(payload, reply.ids_from, payload)

    async def detokenize(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens included (`POST /detokenize`)."""
        body = wire.detokenize_body(ids)
        payload = await self._ask("/detokenize", body)
        return reply.text_from(payload)

    async def apply_template(self, body: bytes) -> str:
        """Return the text that a chat body is rendered to (`POST /apply-template`)."""
        return reply.prompt_from(await self._ask("/apply-template", body))

    async def _ask(self, path: str, body: bytes) -> bytes:
        """Post a call about texts or ids, which any server of the model can answer."""
        slow = asyncio.get_running_loop().call_later(self._timeouts.health_s, self._suspect)
        try:
            return await self._call("POST", path, body, self._timeouts.control_s, yields=True)
        except BackendRefusedError:
            raise
        except BackendError:
            self._suspect()
            raise
        finally:
            slow.cancel()

    async def save(self, slot: int, name: str) -> Transfer:
        """Save an idle slot under a flat name in the server's `--slot-save-path`."""
        return await self._transfer("save", slot, name)

    async def restore(self, slot: int, name: str) -> Transfer:
        """Restore a file into an idle slot.

        After a failure the slot is empty (llama-server.md section 0.5).
        """
        return await self._transfer("restore", slot, name)

    async def _transfer(self, action: wire.Action, slot: int, name: str) -> Transfer:
        path = f"/slots/{slot}?action={action}"
        payload = await self._call("POST", path, wire.action_body(name), self._timeouts.action_s)
        return reply.transfer_from(payload, action)

    async def erase(self, slot: int) -> None:
        """Empty an idle slot, or leave one token of no prompt in it.

        A server without `--slot-save-path` erases nothing (llama-server.md section 1.1). On that
        server a prompt of one token, which reuses nothing, replaces the slot's content.
        """
        path, timeout_s = f"/slots/{slot}?action=erase", self._timeouts.action_s
        try:
            await self._call("POST", path, b"{}", timeout_s)
        except BackendRefusedError as error:
            if error.backend_status != HTTPStatus.NOT_IMPLEMENTED:
                raise
            await self.overwrite(slot)

    async def overwrite(self, slot: int) -> None:
        """Replace the content of an idle slot by one computed token."""
        body, timeout_s = wire.overwrite_body(slot), self._timeouts.action_s
        await self._call("POST", "/completion", body, timeout_s)

    async def prefill(
        self,
        slot: int,
        tokens: Tokens,
        *,
        exact: bool = True,
        cache: bool | None = True,
        told: Callable[[PrefillProgress], None] | None = None,
    ) -> Reported:
        """Compute `tokens` in an idle slot, which holds exactly these tokens afterwards.

        Streamed with progress events, so that the server notices a cancelled call at once. Not
        `exact`: the server may shift KV, if it is configured to. `cache`: reuse what the slot
        holds; None: as the server is configured. `told` gets the progress as it comes.
        """
        body = wire.prefill_body(tokens, slot, exact=exact, cache=cache)
        if told is None:
            payload = await self._call("POST", "/completion", body, self._timeouts.first_byte_s)
        else:
            payload = await self._followed("/completion", body, told)
        return reply.read_reply(Shape.COMPLETION, True, payload)

    async def _followed(
        self, path: str, body: bytes, told: Callable[[PrefillProgress], None]
    ) -> bytes:
        """Return a whole streamed answer; tell its progress events as they come."""
        received, read = b"", 0
        try:
            async with (
                asyncio.timeout(self._timeouts.first_byte_s),
                self.relay("POST", path, [_JSON], body) as answer,
            ):
                await _check(answer)
                async for chunk in _unless_lost(answer):
                    received += chunk
                    whole = received.rfind(b"\n\n") + 2
                    for progress in reply.progress_in(received[read:whole]):
                        told(progress)
                    read = max(read, whole)
        except TimeoutError as error:
            raise BackendTimeoutError("the backend did not answer in time") from error
        return received

    async def trial(self, path: str, body: bytes) -> int | None:
        """Send a request until its first progress event; return the tokens that were cached.

        None: the answer has no such event. Raises BackendRefusedError if the server refuses it.
        """
        async with self.relay("POST", path, [_JSON], body, yields=True) as answer:
            await _check(answer)
            received = b""
            async for chunk in answer:
                received += chunk
                whole = received[: received.rfind(b"\n\n") + 2]
                for progress in reply.progress_in(whole):
                    return progress.n_cached
        return None

    async def fingerprint(self, slot: int, prompt: Tokens | wire.Shown) -> list[tuple[int, float]]:
        """Return the likeliest tokens after `prompt` and their log probabilities, best first.

        If the next token is a part of a character, those of the first one that is none.
        """
        found: list[tuple[int, float]] = []
        shown = isinstance(prompt, wire.Shown)  # an encoder may take a minute
        timeout_s = self._timeouts.first_byte_s if shown else self._timeouts.action_s
        for n_predict in (1, _WITHIN_A_CHARACTER):
            body = wire.fingerprint_body(prompt, slot, n_predict)
            payload = await self._call("POST", "/completion", body, timeout_s)
            found = reply.top_logprobs_from(payload)
            if found:
                break
        return found

    async def placed(self, tokens: Tokens) -> int:
        """Compute `tokens` in a slot of the server's choice; return its index."""
        body = wire.unplaced_body(tokens)
        payload = await self._call("POST", "/completion", body, self._timeouts.action_s)
        return reply.slot_from(payload)

    async def infill(self, slot: int, parts: wire.InfillPrompt) -> reply.InfillAnswer:
        """Compute an infill prompt in a slot. Raises BackendRefusedError if the model has none."""
        body = wire.infill_body(parts, slot)
        return reply.infill_from(await self._call("POST", "/infill", body, self._timeouts.action_s))


async def _unless_lost(answer: RelayedResponse) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer to the router itself. Raises BackendLostError if they end."""
    try:
        async for chunk in answer:
            yield chunk
    except BackendLostError:
        raise
    except BackendError as error:
        raise BackendLostError("the backend went down with the request") from error


async def _check(answer: RelayedResponse) -> None:
    """Raise BackendRefusedError if an answer is an error."""
    if answer.status >= HTTPStatus.BAD_REQUEST:
        told = reply.error_message_from(await answer.read()) or f"HTTP {answer.status}"
        raise BackendRefusedError(told, backend_status=answer.status)
