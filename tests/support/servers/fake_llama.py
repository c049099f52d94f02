"""An in-process llama-server: the HTTP surface and the state files, no model, any fault on demand.

Tokens are bytes. A restored state file is checked cell by cell, so a wrong cut is refused. Nothing
sleeps: slow operations wait for an event of the test. test_contract.py compares the answers with a
real server's. Section numbers are those of llama-server.md.
"""

import asyncio
import gzip
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.servers.fake_wire import (
    N_VOCAB,
    Answer,
    Faults,
    common,
    context_error_json,
    decode_state,
    encode_state,
    error_json,
    generate,
    models_json,
    props_json,
    render_chat,
)

Json = dict[str, Any]


@dataclass
class FakeSlot:
    """The state of one slot."""

    index: int
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    last_used: int = -1
    id_task: int | None = None


@dataclass
class FakeLlama:
    """One fake server. `async with FakeLlama(kv_dir=...) as fake`, then `fake.url`."""

    kv_dir: Path | None = None
    n_slots: int = 2
    n_ctx: int = 4096  # tokens of one slot
    unified: bool = False
    model: str = "fake"
    port: int = 0  # 0: a free one, kept by come_up()
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.slots = [FakeSlot(i) for i in range(self.n_slots)]
        self.prefill_gate = asyncio.Event()  # cleared: prompts are stuck in prefill
        self.decode_gate = asyncio.Event()  # cleared: streams are stuck before the next token
        self.action_gate = asyncio.Event()  # cleared: slot actions are stuck before they begin
        self.actions_waiting = 0
        self.prefill_gate.set()
        self.decode_gate.set()
        self.action_gate.set()
        self.counts: Counter[tuple[str, int]] = Counter()  # (completion|save|restore|erase, slot)
        self.violations: list[str] = []  # uses that would have harmed a real server
        self.bodies: list[tuple[str, Json]] = []  # (path, body) of every POST, in order
        self.headers: dict[str, Mapping[str, str]] = {}  # of the last request to a path
        self.seen: list[tuple[str, str]] = []  # (method, raw path) of every request, in order
        self.computed_tokens = 0  # prompt tokens that were not in the slot
        self.stuck = False  # a client does not read fast enough
        self.chunks_sent = 0  # tokens of streams that went out, or into a buffer
        self.marker = ""  # `media_marker`: another one after each start (section 5.2)
        self._changed = asyncio.Condition()
        self._tasks = 0
        self._runner: web.AppRunner | None = None
        self._transports: set[asyncio.Transport] = set()

    # --- start and stop ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Return the base URL without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def n_stream(self) -> int:
        """Return the number of KV streams in the server's state files (section 1.4)."""
        return 1 if self.unified else self.n_slots

    async def __aenter__(self) -> "FakeLlama":
        await self.come_up()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.go_down()

    async def come_up(self) -> None:
        """Listen, after a crash on the same port; all slots are empty."""
        self.slots = [FakeSlot(i) for i in range(self.n_slots)]
        self.marker = f"<__media_{secrets.token_hex(8)}__>"
        app = web.Application(client_max_size=2**26, middlewares=[self._front])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/props", self._props),
                web.get("/v1/models", self._models),
                web.get("/slots", self._get_slots),
                web.get("/metrics", self._metrics),
                web.post("/slots/{slot}", self._action),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.post("/apply-template", self._apply_template),
                web.post("/completion", self._completion),
                web.post("/v1/completions", self._completion),
                web.post("/v1/chat/completions", self._completion),
                web.post("/v1/chat/completions/control", self._control),
                web.post("/v1/messages", self._completion),
                web.post("/v1/embeddings", self._embeddings),
            ]
        )
        # Without handler_cancellation an abandoned request would keep its slot.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def go_down(self) -> None:
        """Crash: break open connections and refuse new ones."""
        for transport in list(self._transports):
            transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def hang_up(self) -> None:
        """Close every connection, and go on serving."""
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            connection.force_close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; check it again whenever a slot or a count changes."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # --- immediate answers ------------------------------------------------------------------------

    @web.middleware
    async def _front(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.seen.append((request.method, request.raw_path))
        self.headers[request.path] = request.headers
        if self.faults.loading:
            return _error(503, "Loading model", "unavailable_error")
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _props(self, _: web.Request) -> web.Response:
        return web.json_response(props_json(self.model, self.n_slots, self.n_ctx, self.marker))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(models_json(self.model, self.n_ctx))

    async def _get_slots(self, _: web.Request) -> web.Response:
        return web.json_response([self._slot_json(slot) for slot in self.slots])

    def _slot_json(self, slot: FakeSlot) -> Json:
        shown: Json = {"id": slot.index, "n_ctx": self.n_ctx, "is_processing": slot.busy}
        if slot.id_task is not None:  # a slot that never ran shows no count (section 5.1)
            shown |= {"id_task": slot.id_task, "n_prompt_tokens": len(slot.tokens)}
        return shown

    async def _metrics(self, _: web.Request) -> web.Response:
        busy = sum(slot.busy for slot in self.slots)
        return web.Response(text=f"llamacpp:requests_processing {busy}\n")

    async def _control(self, _: web.Request) -> web.Response:
        told = "no active completion for this id"
        return web.json_response({"success": False, "message": told})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return web.json_response({"tokens": list(str(body["content"]).encode())})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return web.json_response({"content": bytes(body["tokens"]).decode(errors="replace")})

    async def _apply_template(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        return web.json_response({"prompt": render_chat(body["messages"])})

    async def _body(self, request: web.Request) -> Json:
        try:
            body: Json = json.loads(await request.read() or b"{}")
        except ValueError:
            message = "[json.exception.parse_error.101] parse error at line 1"
            raise web.HTTPBadRequest(body=_error(400, message).body) from None
        self.bodies.append((request.path_qs, body))
        return body

    # --- slot actions -----------------------------------------------------------------------------

    async def _action(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if not re.match(r"\s*[-+]?\d", request.match_info["slot"]):
            return _error(400, "Invalid slot ID")
        given = int(request.match_info["slot"])
        slot = self.slots[given % self.n_slots]  # out of range wraps (section 1.1)
        action = request.query.get("action", "")
        if self.kv_dir is None:
            return _error(501, "This server does not support slots action.", "not_supported_error")
        if action not in ("save", "restore", "erase"):
            return _error(400, "Invalid action")
        name = body.get("filename")
        if action != "erase" and not isinstance(name, str):
            return _error(400, "[json.exception.out_of_range.403] key 'filename' not found")
        if action != "erase" and (not name or "/" in str(name) or ".." in str(name)):
            return _error(400, "Invalid filename")
        if slot.busy:
            self.violations.append(f"{action} of busy slot {slot.index}: may hang (section 0.2)")
        if self.faults.hang_actions:
            await asyncio.Event().wait()
        self.actions_waiting += 1
        await self._note()
        await self.action_gate.wait()
        self.actions_waiting -= 1
        self.counts[action, slot.index] += 1
        if action == "erase":
            answer = web.json_response({"id_slot": given, "n_erased": len(slot.tokens)})
            slot.tokens = []
        elif action == "save":
            answer = await self._save(slot, given, self.kv_dir / str(name))
        else:
            answer = await self._restore(slot, given, self.kv_dir / str(name))
        await self._note()
        return answer

    async def _save(self, slot: FakeSlot, given: int, path: Path) -> web.Response:
        if self.faults.save_fails:
            return _error(500, "Unable to save slot", "server_error")
        data = encode_state(slot.tokens, slot.index, self.n_stream)
        await asyncio.to_thread(path.write_bytes, data[:-1] if self.faults.save_lies else data)
        answer = {"id_slot": given, "filename": path.name, "n_saved": len(slot.tokens)}
        return web.json_response(answer | {"n_written": len(data), "timings": {"save_ms": 0.5}})

    async def _restore(self, slot: FakeSlot, given: int, path: Path) -> web.Response:
        slot.tokens = []  # a failed restore leaves the slot empty (section 0.5)
        try:
            data = await asyncio.to_thread(path.read_bytes)
            tokens = decode_state(data, self.n_stream)
        except FileNotFoundError:
            data, tokens = b"", None
        except ValueError as error:
            if "truncated" in str(error):
                self.violations.append(
                    f"restore of a truncated file aborts it (section 0.3): {error}"
                )
            data, tokens = b"", None
        if tokens is None or len(tokens) > self.n_ctx or self.faults.restore_fails:
            reason = "No available space in KV cache or invalid slot save file"
            return _error(400, f"Unable to restore slot: {reason}")
        slot.tokens = tokens
        answer = {"id_slot": given, "filename": path.name, "n_restored": len(tokens)}
        return web.json_response(answer | {"n_read": len(data), "timings": {"restore_ms": 0.5}})

    # --- completions ------------------------------------------------------------------------------

    @asynccontextmanager
    async def _leased(self, pinned: int, prompt: list[int]) -> AsyncIterator[FakeSlot]:
        if pinned >= 0 and self.slots[pinned % self.n_slots].busy:
            self.violations.append(f"request pinned to busy slot {pinned} (section 0.1)")
            await self._note()
        async with self._changed:
            await self._changed.wait_for(lambda: self._pick(pinned, prompt) is not None)
            slot = self._pick(pinned, prompt)
            if slot is None:
                raise RuntimeError("unreachable: the condition still holds the lock")
            slot.busy = True
            self._tasks += 1
            slot.id_task = slot.last_used = self._tasks
            self.counts["completion", slot.index] += 1
            self._changed.notify_all()
        try:
            yield slot
        except asyncio.CancelledError:
            if self.faults.ignores_leaving:
                await self.decode_gate.wait()
            raise
        finally:
            slot.busy = False
            await self._note()

    async def _embeddings(self, _: web.Request) -> web.Response:
        """Embed in a slot of the server's choice, and leave it empty (section 2.1)."""
        async with self._leased(-1, []) as slot:
            slot.tokens = []
            await self.decode_gate.wait()
        return web.json_response({"object": "list", "data": [{"embedding": [0.0]}]})

    def _pick(self, pinned: int, prompt: list[int]) -> FakeSlot | None:
        """Return the pinned slot, else the most similar, else the least recently used (section
        2.2)."""
        if pinned >= 0:
            slot = self.slots[pinned % self.n_slots]
            return None if slot.busy else slot
        idle = [slot for slot in self.slots if not slot.busy]
        if not idle:
            return None
        best = max(idle, key=lambda slot: common(slot.tokens, prompt))
        if common(best.tokens, prompt) > 0.1 * len(prompt):
            return best
        return min(idle, key=lambda slot: (slot.last_used, -slot.index))

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is not None:
            self._transports.add(transport)
        try:
            return await self._complete(request)
        finally:
            if transport is not None:
                self._transports.discard(transport)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        if self.faults.refuses:
            return _error(500, self.faults.refuses, "server_error")
        answer = Answer(request.path, body, self.model)
        if answer.prompt is None:
            return _error(400, "[json.exception.out_of_range.403] key 'prompt' not found")
        if not all(0 <= token < N_VOCAB for token in answer.prompt):
            return _error(400, "Prompt contains invalid tokens")
        if len(answer.prompt) >= self.n_ctx:
            refused = context_error_json(len(answer.prompt), self.n_ctx)
            return web.json_response(refused, status=400)
        response: web.StreamResponse | None = None
        async with self._leased(answer.pinned, answer.prompt) as slot:
            if self.faults.hang:
                await asyncio.Event().wait()
            if self.faults.says is not None:
                assert request.transport is not None
                request.transport.write(self.faults.says)
                request.transport.close()  # what was written goes out first
                await asyncio.Event().wait()
            if self.faults.die_at_once:
                await _break(request)
            if answer.stream:  # headers come before the prefill, as from a real server
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
            await self._run(answer, slot, request, response)
        # The slot is free before the last byte is out (section 1.2).
        if response is None:
            if self.faults.encodes:
                packed = gzip.compress(json.dumps(answer.whole()).encode(), compresslevel=0)
                headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
                return web.Response(body=packed, headers=headers)
            return web.json_response(answer.whole())
        await response.write(answer.last_chunks())
        await response.write_eof()
        request.protocol.force_close()  # after a stream, without announcing it ("Connections")
        return response

    async def _run(
        self,
        answer: Answer,
        slot: FakeSlot,
        request: web.Request,
        response: web.StreamResponse | None,
    ) -> None:
        prompt = answer.prompt or []
        reused = common(slot.tokens, prompt) if answer.body.get("cache_prompt") is not False else 0
        answer.cache_n = min(reused, len(prompt) - 1)  # one token is always evaluated
        answer.id_slot = slot.index
        slot.tokens = prompt[: answer.cache_n]
        self.computed_tokens += len(prompt) - answer.cache_n
        if response is not None and answer.body.get("return_progress"):
            await response.write(answer.progress(answer.cache_n))
        await self.prefill_gate.wait()
        slot.tokens = list(prompt)
        await self._note()
        for token in generate(prompt, answer.n_predict):
            await self.decode_gate.wait()
            if answer.tokens:  # the last sampled token is not in the KV (section 1.3)
                slot.tokens.append(answer.tokens[-1])
            answer.tokens.append(token)
            if response is None:
                continue
            limit = self.faults.die_after_chunks
            if limit is not None and len(answer.tokens) > limit:
                await _break(request)
            limit = self.faults.hang_after_chunks
            if limit is not None and len(answer.tokens) > limit:
                await asyncio.Event().wait()
            padding = b":" * self.faults.padding_bytes + b"\n\n"
            self.stuck = True
            await response.write(padding * bool(self.faults.padding_bytes) + answer.chunk(token))
            self.stuck = False
            self.chunks_sent += 1


async def _break(request: web.Request) -> None:
    """Reset the connection, and wait to be cancelled."""
    if request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()


def _error(status: int, message: str, kind: str = "invalid_request_error") -> web.Response:
    return web.json_response(error_json(status, message, kind), status=status)
