"""The calls of other hosts: what this host is, what a request would take, what a prompt is.

Found on the peers' address only, where a certificate of the fleet has admitted the caller.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import structlog
from aiohttp import web

from router.base.decoding import UndecodableError, msgpack_decoder
from router.base.errors import BadRequestError, MethodError, ModelNotFoundError, NotFoundError
from router.base.prefix_hash import SIZE
from router.base.tokens import EMPTY, WIDTH, Tokens, count
from router.base.types import BackendId, Namespace, Prompt, Request, RequestId, Tenant
from router.core.model.plan import Quote
from router.engine.engine import Engine
from router.hosts import messages
from router.hosts.messages import ExportAsk, Hello, PurgeAsk, PurgeReply, QuoteAsk, QuoteReply
from router.llama.attach.namespace import is_same
from router.web.api.backend_selection import BackendSelection
from router.web.fleet.fetching import Fetching
from router.web.fleet.handing_out import HandingOut
from router.web.fleet.purging import Purging, is_note, is_tenant
from router.web.server.call import Call
from router.web.server.error_responses import OWN_HEADERS

log = structlog.get_logger(__name__)

_ask_of = msgpack_decoder(QuoteAsk)
_export_of = msgpack_decoder(ExportAsk)
_purge_of = msgpack_decoder(PurgeAsk)
# A token that is in no prompt: what follows the known beginning of a quoted one.
_OTHER = b"\0\0\0\x80"
_POST = (messages.QUOTE, messages.EXPORT, messages.PURGE)
_METHODS = {messages.HELLO: "GET", messages.PURGED: "GET", messages.PART: "GET"}
_METHODS |= dict.fromkeys(_POST, "POST")
_Ask = TypeVar("_Ask")
_MAX_TOKENS = 16 * 1024 * 1024


@dataclass(slots=True, eq=False)
class PeerRoutes:
    """The handlers. `hello` describes this host."""

    _hello: Callable[[], Hello]
    _engine: Engine
    _selection: BackendSelection
    _fetching: Fetching
    _handing_out: HandingOut
    _purging: Purging

    async def answer(self, call: Call) -> web.StreamResponse:
        """Answer a call of a peer. Raises RouterError."""
        path, raw = call.http.path, call.raw
        if path not in _METHODS:
            raise NotFoundError("there is nothing at this path")
        if call.http.method != _METHODS[path]:
            raise MethodError(f"this path is for {_METHODS[path]}", [_METHODS[path]])
        match path:
            case messages.HELLO:
                return _packed(msgspec.json.encode(self._hello()))
            case messages.QUOTE:
                return _packed(msgspec.msgpack.encode(self.quote(raw, call.id)))
            case messages.EXPORT:
                return _packed(await self._export(raw))
            case messages.PURGE:
                return _packed(await self._purge(raw))
            case messages.PURGED:
                return _packed(msgspec.json.encode(self._purging.notes))
            case _:
                return await self._handing_out.part(call.http)

    async def _export(self, raw: bytes) -> bytes:
        """Return the manifest of what spares most of a prompt."""
        ask = _read(_export_of, raw, "a question for a state")
        if not 0 < ask.n_tokens <= _MAX_TOKENS or len(ask.hashes) % SIZE:
            raise BadRequestError("not a question for a state: impossible lengths")
        return await self._handing_out.manifest(ask)

    async def _purge(self, raw: bytes) -> bytes:
        """Delete what this host has of a tenant."""
        ask = _read(_purge_of, raw, "a tenant to purge")
        if not (is_tenant(ask.tenant) and is_note(ask.note)):
            raise BadRequestError("not a tenant to purge: it has no name, or the purge has no id")
        here = await self._purging.here(Tenant(ask.tenant), ask.note)
        log.info("purged_for_another_host", snapshots=here.count)
        return msgspec.msgpack.encode(PurgeReply(here.count, here.problem))

    def quote(self, raw: bytes, name: RequestId) -> QuoteReply:
        """Return the offer for a request of which only hashes are known. Reserves nothing."""
        ask = _read(_ask_of, raw, "a question for a quote")
        if not 0 <= ask.n_tokens <= _MAX_TOKENS or len(ask.hashes) % SIZE:
            raise BadRequestError("not a question for a quote: impossible lengths")
        try:
            model = self._selection.resolve(ask.model)
        except ModelNotFoundError:
            return QuoteReply()
        held = self._handing_out.beginning(ask.hashes) if ask.n_tokens else EMPTY
        quote = self._price(ask, model, name, held)
        namespace, tenant = Namespace(ask.namespace), Tenant(ask.tenant)
        offers = self._handing_out.offers(held, namespace, tenant, ask.n_tokens)
        return QuoteReply(quote, tuple(offers))

    def _price(
        self, ask: QuoteAsk, model: str | None, name: RequestId, held: Tokens
    ) -> Quote | None:
        request = Request(
            id=name,
            prompt=Prompt(unknown="its host has not read it"),
            model=model,
            max_new_tokens=ask.max_new_tokens,
            pinnable=ask.pinnable,
            reuse=ask.reuse,
            tasks=ask.tasks,
            answers=ask.answers,
            whole_backend=ask.whole_backend,
            tenant=Tenant(ask.tenant),
        )
        if ask.n_tokens:
            others = self._of_another_model(ask, model)
            rest = _OTHER * max(ask.n_tokens - count(held), 0)
            tokens = Tokens(held[: ask.n_tokens * WIDTH] + rest)
            request = msgspec.structs.replace(request, prompt=Prompt(tokens=tokens), avoid=others)
            known = self._engine.state.inventory
            if not any(known.can_serve(one, request) for one in known.up):
                request = msgspec.structs.replace(
                    request, prompt=Prompt(tokens=Tokens(_OTHER * ask.n_tokens)), avoid=frozenset()
                )
        own = self._engine.quote(request)
        if ask.offered is None or not ask.offered.is_sound:
            return own
        way = self._fetching.way(request, own, ask.holder, ask.offered)
        return own if way is None else way.quote

    def _of_another_model(self, ask: QuoteAsk, model: str | None) -> frozenset[BackendId]:
        """Return the backends with KV that cannot be of the asking host's model."""
        return frozenset(
            info.id
            for info in self._engine.state.inventory.answering(model)
            if ask.namespace and not is_same(Namespace(ask.namespace), info.namespace)
        )


def _read(decode: Callable[[bytes], _Ask], raw: bytes, what: str) -> _Ask:
    try:
        return decode(raw)
    except UndecodableError as error:
        raise BadRequestError(f"not {what}: {error}") from error


def _packed(body: bytes) -> web.Response:
    return web.Response(body=body, headers=OWN_HEADERS)
