"""Hand out states to other hosts: their manifests, and their parts.

A slot is saved first, and a prefix is cut out of a longer state, so that no host gets more than it
can use.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog
from aiohttp import web

from router.base.errors import KvError, NotFoundError
from router.base.types import Namespace, SlotId, Snapshot, SnapshotId, Tenant
from router.core.model.plan import Handout
from router.engine.engine import Engine
from router.engine.held_prefixes import HeldPrefixes
from router.store.blobs import manifests
from router.store.store import KvStore
from router.telemetry.fetch_metrics import FetchMetrics
from router.web.server.error_responses import OWN_HEADERS

log = structlog.get_logger(__name__)

_LATE, _LEAST_S = 3.0, 2.0  # a save may take so many times what it was to take, and so long
_PARTS_AT_ONCE = 4  # in memory
_WRITTEN_AT_ONCE = 256 * 1024  # bytes: with TLS the event loop encrypts them, in 0.3 ms


class HandingOut:
    """What other hosts get of this one."""

    def __init__(
        self,
        engine: Engine,
        store: KvStore,
        held: HeldPrefixes,
        metrics: FetchMetrics,
        now: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._store = store
        self._held = held
        self._metrics = metrics
        self._now = now
        self._room = asyncio.Semaphore(_PARTS_AT_ONCE)
        self._cutting = asyncio.Lock()

    async def manifest_of(self, snapshot: str) -> bytes:
        """Return the manifest of one snapshot. Raises NotFoundError."""
        try:
            manifest = await self._store.exchange.manifest(SnapshotId(snapshot))
            return await asyncio.to_thread(manifests.encode, manifest)
        except KvError as error:
            raise NotFoundError("the state cannot be read") from error

    async def manifest(
        self, hashes: Sequence[bytes], namespace: Namespace, tenant: Tenant, n_prompt: int
    ) -> bytes:
        """Return the manifest of what spares most of a prompt. Raises NotFoundError."""

        def look(*, saved: bool = False) -> Handout | None:
            self._held.refresh()
            now = self._now()
            return self._held.handout(hashes, namespace, tenant, n_prompt, now, saved=saved)

        found = look()
        if found is not None and isinstance(found.content, SlotId):
            with suppress(TimeoutError):  # what it computes was broken off
                async with asyncio.timeout(_LATE * found.offered.ready_s + _LEAST_S):
                    await self._engine.save(found.content)
            found = look(saved=True)
        if found is None or isinstance(found.content, SlotId):
            raise NotFoundError("nothing here is of use for this prompt any more")
        name = found.content
        try:
            if found.cut is not None:
                name = await self._cut(name, found.cut)
        except KvError as error:
            raise NotFoundError("the state cannot be read") from error
        return await self.manifest_of(name)

    async def _cut(self, name: SnapshotId, n_tokens: int) -> SnapshotId:
        """Return a snapshot of the first tokens of another one, or that one if it must be."""
        async with self._cutting:  # two hosts ask for the same prefix: the second finds it
            longer = self._engine.view.snapshot(name)
            if longer is None:
                raise KvError("the snapshot is gone")
            known = self._engine.view.equal(longer, n_tokens)
            if known is not None:
                return known
            try:
                staged = await self._store.cut(longer, n_tokens)
                made: Snapshot = await self._store.commit(staged, longer.namespace)
            except KvError as error:
                log.warning("cut_failed", snapshot=name, reason=str(error))
                return name
            await self._engine.snapshots_found([made], self._engine.view.kind_of(name))
            return made.id

    async def part(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer with the bytes of one part. Raises NotFoundError."""
        name, index = request.query.get("snapshot", ""), request.query.get("index", "")
        if not (index.isascii() and index.isdecimal() and len(index) < 10):
            raise NotFoundError("parts are numbered from 0")
        async with self._room:
            try:
                raw = await self._store.exchange.part(SnapshotId(name), int(index))
            except KvError as error:
                raise NotFoundError("the part cannot be read") from error
            response = web.StreamResponse(headers=OWN_HEADERS)
            response.content_type = "application/octet-stream"
            response.content_length = len(raw)
            await response.prepare(request)
            for at in range(0, len(raw), _WRITTEN_AT_ONCE):
                await response.write(bytes(raw[at : at + _WRITTEN_AT_ONCE]))
            await response.write_eof()
        self._metrics.handed_out(len(raw))
        return response
