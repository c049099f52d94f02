"""HTTP client of one llama-server: its control calls.

Raises only BackendError and its subclasses. The engine decides whether a slot action may be sent.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Literal

import orjson

from router.base.errors import BackendError, BackendRefusedError
from router.base.tokens import EMPTY, Tokens, pack, unpack
from router.base.types import PrefillProgress, Reported, SlotStatus, Transfer
from router.llama import json_offload
from router.llama import replies as reply
from router.llama.routes import Shape
from router.llama.server_client import ServerClient, refuse
from router.llama.wire import InfillPrompt, Shown

_JSON = (b"Content-Type", b"application/json")
# Tokens that are generated where the first is a part of a character, which has up to four bytes.
_WITHIN_A_CHARACTER = 8
# llama-server's metrics are 3 KB.
_MAX_METRICS_BYTES = 256 * 1024


class LlamaClient(ServerClient):
    """`ports.SlotServer` over HTTP, and all other calls to a llama-server."""

    async def get(self, path: str, *, soon: bool = False, max_bytes: int | None = None) -> bytes:
        """Return the raw answer to a GET. `soon`: wait no longer than a check of health may take.

        More than one poll of the slots a second hides abandoned requests from the server
        (llama-server.md section 5.6).
        """
        timeout_s = self._timeouts.health_s if soon else self._timeouts.control_s
        return await self._call("GET", path, None, timeout_s, max_bytes)

    async def health(self) -> None:
        """Return if the server is up and its model is loaded; else raise BackendError."""
        await self.get("/health", soon=True)

    async def props(self, *, soon: bool = False) -> reply.Props:
        """Return the answer to `GET /props`. `soon`: wait no longer than for `/health`."""
        return reply.props_from(await self.get("/props", soon=soon))

    async def models(self) -> reply.ModelsInfo:
        """Return the answer to `GET /v1/models`."""
        return reply.models_from(await self.get("/v1/models"))

    async def metrics(self) -> bytes:
        """Return the raw answer to `GET /metrics`. A server without `--metrics` refuses it."""
        return await self.get("/metrics", soon=True, max_bytes=_MAX_METRICS_BYTES)

    async def slots(self) -> list[SlotStatus]:
        """Return the status of every slot (`GET /slots`)."""
        return reply.slots_from(await self.get("/slots"))

    async def tokenize(
        self, content: str | list[str | int], *, add_special: bool, parse_special: bool
    ) -> list[int]:
        """Return the ids of `content` as the engine sees them (`POST /tokenize`)."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        payload = await self._ask("/tokenize", orjson.dumps(body))
        return await json_offload.read(payload, reply.ids_from, payload)

    async def detokenize(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens included (`POST /detokenize`)."""
        told = await self._ask("/detokenize", orjson.dumps({"tokens": ids}))
        return reply.field_from(told, "POST /detokenize", "content", str)

    async def apply_template(self, body: bytes) -> str:
        """Return the text that a chat body is rendered to (`POST /apply-template`)."""
        told = await self._ask("/apply-template", body)
        return reply.field_from(told, "POST /apply-template", "prompt", str)

    async def _ask(self, path: str, body: bytes) -> bytes:
        """Post a call about texts or ids, which any server of the model can answer."""
        slow = asyncio.get_running_loop().call_later(self._timeouts.health_s, self.on_suspicion)
        try:
            return await self._call("POST", path, body, self._timeouts.control_s, yields=True)
        except BackendRefusedError:
            raise
        except BackendError:
            self.on_suspicion()
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

    async def _transfer(self, action: Literal["save", "restore"], slot: int, name: str) -> Transfer:
        path, body = f"/slots/{slot}?action={action}", orjson.dumps({"filename": name})
        payload = await self._call("POST", path, body, self._timeouts.action_s)
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
        """Replace the content of an idle slot by one computed token of any vocabulary."""
        await self._compute(slot, pack([0]), self._timeouts.action_s, cache_prompt=False)

    async def _compute(
        self,
        slot: int,
        tokens: Tokens,
        timeout_s: float,
        seen: Callable[[bytes], None] | None = None,
        **more: Any,
    ) -> bytes:
        """Compute `tokens` in a slot and generate nothing, unless `more` fields say otherwise."""
        body = {"prompt": unpack(tokens), "id_slot": slot, "n_predict": 0, "cache_prompt": True}
        raw = orjson.dumps(body | {"n_cache_reuse": 0} | more)
        return await self._call("POST", "/completion", raw, timeout_s, seen=seen)

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

        `n_predict: 0` samples one token that the slot does not keep (llama-server.md section 2.3).
        Streamed with progress events, so that the server notices a cancelled call after the next
        batch (5.6). Not `exact`: the server may shift KV, if it is configured to. `cache`: reuse
        what the slot holds; None takes the server's default, as for a field that is not there
        (`field::eval`, server-schema.cpp). `told` gets the progress as it comes.
        """
        more = {"stream": True, "return_progress": True, "cache_prompt": cache}
        more |= {} if exact else {"n_cache_reuse": None}
        seen = None if told is None else reply.progress_reader(told)
        timeout_s = self._timeouts.first_byte_s
        self.relaying += told is not None
        try:
            payload = await self._compute(slot, tokens, timeout_s, seen, **more)
        finally:
            if told is not None:
                self.relayed()
        return reply.read_reply(Shape.COMPLETION, True, payload)

    async def trial(self, path: str, body: bytes) -> int | None:
        """Send a request until its first progress event; return the tokens that were cached.

        None: the answer has no such event. Raises BackendRefusedError if the server refuses it.
        """
        found: list[PrefillProgress] = []
        seen = reply.progress_reader(found.append)
        async with self.relay("POST", path, [_JSON], body, yields=True) as answer:
            refuse(answer.status, await answer.read() if answer.status >= 400 else b"")
            async for chunk in answer:
                seen(chunk)
                if found:
                    return found[0].n_cached
        return None

    async def fingerprint(self, slot: int, prompt: Tokens | Shown) -> list[tuple[int, float]]:
        """Return the likeliest tokens after `prompt` and their log probabilities, best first.

        If the next token is a part of a character, those of the first one that is none.
        """
        more: dict[str, Any] = {"n_probs": 5, "temperature": 0.0}
        tokens, timeout_s = EMPTY, self._timeouts.first_byte_s  # an encoder may take a minute
        if isinstance(prompt, Shown):
            more["prompt"] = {"prompt_string": prompt.text, "multimodal_data": prompt.media}
        else:
            tokens, timeout_s = prompt, self._timeouts.action_s
        for n_predict in (1, _WITHIN_A_CHARACTER):
            payload = await self._compute(slot, tokens, timeout_s, n_predict=n_predict, **more)
            if found := reply.top_logprobs_from(payload):
                return found
        return []

    async def placed(self, tokens: Tokens) -> int:
        """Compute `tokens` in a slot of the server's choice; return its index."""
        told = await self._compute(-1, tokens, self._timeouts.action_s)
        return reply.field_from(told, "POST /completion", "id_slot", int)

    async def infill(self, slot: int, parts: InfillPrompt) -> reply.InfillAnswer:
        """Compute an infill prompt in a slot. Raises BackendRefusedError if the model has none."""
        extra = [{"filename": name, "text": text} for name, text in parts.extra]
        body = {"input_prefix": parts.prefix, "input_suffix": parts.suffix, "prompt": parts.prompt}
        more = {"input_extra": extra, "id_slot": slot, "n_predict": 0, "n_cache_reuse": 0}
        payload = orjson.dumps(body | more)
        return reply.infill_from(
            await self._call("POST", "/infill", payload, self._timeouts.action_s)
        )
