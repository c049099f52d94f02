"""Hand out states to other hosts: their manifests, and their parts.

A slot is saved first, and a prefix is cut out of a longer state, so that no host gets more than it
can use.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import structlog
from aiohttp import web
from msgspec.structs import replace

from router.base.errors import KvError, NotFoundError
from router.base.prefix_hash import split
from router.base.tokens import Tokens, head
from router.base.types import Namespace, SlotId, SnapshotId, Tenant
from router.core.model.plan import Handout, Offered
from router.engine.engine import Engine
from router.engine.held_prefixes import HeldPrefixes
from router.hosts.messages import ExportAsk
from router.store import manifests
from router.store.store import KvStore
from router.telemetry.hosts_metrics import FetchMetrics
from router.web.server.error_responses import OWN_HEADERS

log = structlog.get_logger(__name__)

_LATE, _LEAST_S = 3.0, 2.0  # a save may take so many times what it was to take, and so long
_SILENT_S = 10.0  # a host that reads nothing for so long is gone
_PARTS_AT_ONCE = 4  # in memory
_WRITTEN_AT_ONCE = 256 * 1024  # bytes: with TLS the event loop encrypts them, in 0.3 ms


@dataclass(slots=True, eq=False)
class HandingOut:
    """What other hosts get of this one."""

    _engine: Engine
    _store: KvStore
    _held: HeldPrefixes
    _metrics: FetchMetrics
    _now: Callable[[], float]
    _room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PARTS_AT_ONCE))
    _cutting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _n_asked: int = 0
    _n_parts: int = 0

    def beginning(self, hashes: bytes) -> Tokens:
        """Return the longest tokens here that a prompt with these prefix hashes begins with."""
        self._held.refresh()
        return self._held.longest(split(hashes))

    def offers(
        self, tokens: Tokens, namespace: Namespace, tenant: Tenant, n_prompt: int
    ) -> list[Offered]:
        """Return this host's offers for a prompt that begins with `tokens`.

        The best comes first.
        """
        found = self._held.handouts(tokens, namespace, tenant, n_prompt, self._now())
        # Other hosts that wait for a state, or read one in two threads.
        sharers = self._n_asked + (self._n_parts + 1) // 2
        return [replace(one.offered, sharers=sharers) for one in found]

    async def manifest(self, ask: ExportAsk) -> bytes:
        """Return the manifest of what another host asks for. Raises NotFoundError."""
        self._n_asked += 1
        try:
            return await self._manifest(ask)
        finally:
            self._n_asked -= 1

    async def _manifest(self, ask: ExportAsk) -> bytes:
        """Return the manifest of what was offered with the digest of `ask`."""
        namespace, tenant = Namespace(ask.namespace), Tenant(ask.tenant)

        def look(*, saved: bool = False) -> Handout | None:
            tokens, now = self.beginning(ask.hashes), self._now()
            found = self._held.handouts(tokens, namespace, tenant, ask.n_tokens, now, saved=saved)
            return next((one for one in found if one.offered.digest == ask.digest), None)

        found = look()
        if found is not None and isinstance(found.content, SlotId):
            slot, enough = found.content, found.offered.reused
            with suppress(TimeoutError):  # what it computes was broken off
                async with asyncio.timeout(_LATE * found.offered.ready_s + _LEAST_S):
                    while True:  # a prefill may be saved at boundaries before its end
                        await self._engine.host_saves.save(slot)
                        found = look(saved=True)
                        is_there = found is not None and found.offered.reused >= enough
                        if is_there or not self._engine.host_saves.is_under_way(slot):
                            break
        if found is None or isinstance(found.content, SlotId):
            raise NotFoundError("nothing here is of use for this prompt any more")
        name = found.content
        try:
            if found.cut is not None:
                name = await self._cut(name, found.cut)
            self._engine.handed_out(found.content)
            manifest = await self._store.exchange.manifest(name)
            return await asyncio.to_thread(manifests.encode, manifest)
        except KvError as error:
            raise NotFoundError("the state cannot be read") from error

    async def _cut(self, name: SnapshotId, n_tokens: int) -> SnapshotId:
        """Return a snapshot of the first tokens of another one, or that one if it must be."""
        async with self._cutting:  # two hosts ask for the same prefix: the second finds it
            catalog = self._engine.state.inventory.catalog
            longer = catalog.get(name)
            if longer is None:
                raise KvError("the snapshot is gone")
            known = catalog.equal(longer.namespace, head(longer.tokens, n_tokens))
            if known is not None:
                return known
            try:
                kind = catalog.kind_of(name)
                return (await self._engine.cut(longer, n_tokens, kind)).id
            except KvError as error:
                log.warning("cut_failed", snapshot=name, reason=str(error))
                return name

    async def part(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the bytes of one part. Raises NotFoundError."""
        name, index = request.query.get("snapshot", ""), request.query.get("index", "")
        if not (index.isascii() and index.isdecimal() and len(index) < 10):
            raise NotFoundError("parts are numbered from 0")
        self._n_parts += 1
        try:
            return await self._part(request, name, int(index))
        finally:
            self._n_parts -= 1

    async def _part(self, request: web.BaseRequest, name: str, index: int) -> web.StreamResponse:
        async with self._room:
            try:
                raw = await self._store.exchange.part(SnapshotId(name), index)
            except KvError as error:
                raise NotFoundError("the part cannot be read") from error
            response = await _begun(request, len(raw))
            for at in range(0, len(raw), _WRITTEN_AT_ONCE):
                await self._write(request, response, bytes(raw[at : at + _WRITTEN_AT_ONCE]))
            await response.write_eof()
        self._metrics.handed_out(len(raw))
        return response

    async def _write(
        self, request: web.BaseRequest, response: web.StreamResponse, chunk: bytes
    ) -> None:
        """Write some bytes. Raises ConnectionError if the other host does not read."""
        try:
            async with asyncio.timeout(_SILENT_S):
                await response.write(chunk)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionError("the other host does not read") from None


async def _begun(request: web.BaseRequest, size_bytes: int) -> web.StreamResponse:
    """Return an answer of so many bytes, with its head sent."""
    response = web.StreamResponse(headers=OWN_HEADERS)
    response.content_type = "application/octet-stream"
    response.content_length = size_bytes
    await response.prepare(request)
    return response
