"""Fetch from another host, or the cold tier, what a prompt begins with, instead of computing it.

What came is a snapshot like any other, so the planner decides what becomes of it. Whatever goes
wrong, the prompt is computed.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import structlog
from msgspec import Struct

from router.base.errors import BackendError, BackendRefusedError, KvError, KvFileError
from router.base.prefix_hash import STEP
from router.base.tasks import spawn
from router.base.tokens import common_prefix, count
from router.base.types import BackendInfo, KvDir, Request, Snapshot, Tenant
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Offered, Quote
from router.core.model.tenancy import is_of, model_of, namespace_of, tenant_of
from router.engine.engine import Engine
from router.hosts.link import Link
from router.hosts.messages import PART, ExportAsk
from router.hosts.peer import Peer
from router.llama.attach.namespace import is_same
from router.store import manifests
from router.store.blobs.blobs import BlobError, BlobReader
from router.store.manifests import Manifest
from router.store.places.peer import PeerPlace
from router.store.store import KvStore
from router.telemetry.hosts_metrics import FetchMetrics

log = structlog.get_logger(__name__)

COLD = "cold"  # the key of the cold tier, among those of hosts: random digits or URLs
_MOST_MORE = 1.5  # times the size that was told


class _OtherError(KvError):
    """A host hands out something else than it offered."""


@dataclass(frozen=True, slots=True)
class Held:
    """A state that somebody hands out. `name`: of who does, for people; `key`: one for one fetch.

    `link` learns from the fetch. `manifest` returns the manifest within so many seconds, and raises
    BackendError or KvError; `reading` returns the reader of its blobs until then, in clock seconds.
    `give_up`: told what is wrong with a state that is offered no more; None: the link is to blame.
    """

    name: str
    key: bytes
    link: Link
    manifest: Callable[[float], Awaitable[bytes]]
    reading: Callable[[Manifest, float], BlobReader]
    give_up: Callable[[KvFileError], object] | None = None


class Way(Struct, frozen=True):
    """A state to fetch: who has it, what it is, and the quote with the state fetched."""

    holder: Peer | Held
    offered: Offered
    quote: Quote


@dataclass(slots=True)
class _UnderWay:
    """One fetch, and how many requests wait for it."""

    task: asyncio.Task[None] | None = None
    n_waiting: int = 0
    snapshot: Snapshot | None = None


@dataclass(slots=True, eq=False)
class Fetching:
    """Fetches for this host. `tls`: of the connections to peers.

    `peers` returns a host by its incarnation or URL; None: it is not known. `in_cold` returns the
    state of the cold tier that spares most of a request, and its offer; None: there is no tier.
    """

    _peers: Callable[[str], Peer | None]
    _in_cold: Callable[[Request, BackendInfo], tuple[Held, Offered] | None] | None
    _engine: Engine
    _store: KvStore
    _tls: ssl.SSLContext | None
    _metrics: FetchMetrics
    _now: Callable[[], float]
    _under_way: dict[tuple[str, str, str, bytes], _UnderWay] = field(default_factory=dict)

    def way(
        self, request: Request, own: Quote | None, holder: str, offered: Offered | None = None
    ) -> Way | None:
        """Return the way to fetch `offered`, if that pays against the `own` quote.

        Of the cold tier, which is the same for all hosts, this host finds the state itself.
        """
        if own is None:
            return None
        source: Peer | Held | None = None
        if holder == COLD:
            source, offered = self.cold_offer(request) or (None, None)
        elif (peer := self._peers(holder)) is not None and peer.hands_out:
            source = peer
        if source is None or offered is None:
            return None
        quote = self._engine.once_fetched(request, own, offered, source.link.seconds)
        return None if quote is None else Way(source, offered, quote)

    @property
    def has_cold(self) -> bool:
        """Return whether there is a cold tier."""
        return self._in_cold is not None

    def cold_offer(self, request: Request) -> tuple[Held, Offered] | None:
        """Return what the cold tier has for a request, and its offer."""
        if self._in_cold is None or (info := self._reader(request)) is None:
            return None
        found = self._in_cold(request, info)
        return found if found is not None and found[1].is_sound else None

    async def fetch(self, request: Request, hashes: Sequence[bytes], way: Way) -> bool:
        """Fetch a state, together with others that want it; return whether it is here now.

        Cancelled, the fetch ends with the last request that waits for it.
        """
        info = self._reader(request)
        if info is None:
            return False
        holder = way.holder
        if isinstance(holder, Peer):
            holder = self._held_by(holder, request, hashes, info, way.offered)
        key = holder.name, info.namespace, request.tenant, holder.key
        fetch = self._under_way.get(key)
        if fetch is None:
            fetch = self._under_way[key] = _UnderWay()

            async def work() -> None:
                fetch.snapshot = await self._fetched(holder, request, info, way.offered)

            fetch.task = spawn(work(), name=f"fetch from {holder.name}")
            # Not within the task: one that is cancelled before its first step does not run.
            fetch.task.add_done_callback(lambda _: self._under_way.pop(key))
        assert fetch.task is not None
        fetch.n_waiting += 1
        try:
            await asyncio.wait([fetch.task])
        finally:
            fetch.n_waiting -= 1
            if not fetch.n_waiting:
                fetch.task.cancel()
        return fetch.snapshot is not None

    def _held_by(
        self,
        peer: Peer,
        request: Request,
        hashes: Sequence[bytes],
        info: BackendInfo,
        offered: Offered,
    ) -> Held:
        """Return what a peer hands out for a request."""
        n_tokens, digest = count(request.prompt.tokens), offered.digest
        ask = ExportAsk(info.namespace, request.tenant, n_tokens, b"".join(hashes), digest)
        last = hashes[min(max(offered.reused // STEP, 1), len(hashes)) - 1]
        tls, now = self._tls, self._now

        def reading(manifest: Manifest, ends_at: float) -> BlobReader:
            place, named = PeerPlace(peer.url, tls), f"{PART}?snapshot={manifest.id}&index="
            names = {blob: f"{named}{number}" for number, blob in enumerate(manifest.sized)}
            return BlobReader(place, names.__getitem__, ends_at=ends_at, now=now, close=place.close)

        return Held(peer.name, last, peer.link, lambda limit_s: peer.export(ask, limit_s), reading)

    def _reader(self, request: Request) -> BackendInfo | None:
        """Return a backend that could read the state."""
        able = (backend.info for backend in self._engine.state.inventory.serving(request))
        return next((info for info in able if info.kv_dir is not None), None)

    def stop(self, tenant: Tenant) -> None:
        """End the fetches of a tenant, with any salt: it is being purged."""
        for (_, _, owner, _), fetch in tuple(self._under_way.items()):
            if is_of(owner, tenant) and fetch.task is not None:
                fetch.task.cancel()

    async def _fetched(
        self, holder: Held, request: Request, info: BackendInfo, offered: Offered
    ) -> Snapshot | None:
        """Return the snapshot made of what a holder hands out. None: it did not come."""
        begun, link = self._now(), holder.link
        expected_s = offered.ready_s + link.seconds(offered.size_bytes) * (1 + offered.sharers)
        limit_s = link.limit_s(expected_s)
        reading: BlobReader | None = None
        snapshot, problem = None, ""
        try:
            async with asyncio.timeout(limit_s):
                raw = await holder.manifest(limit_s)
                manifest, told = await asyncio.to_thread(_read, raw)
                _check(told, request, info, offered)
                namespace = namespace_of(info, request.tenant)
                catalog = self._engine.state.inventory.catalog
                reading = holder.reading(manifest, begun + limit_s)
                snapshot = await self._store.exchange.receive(
                    manifest,
                    namespace,
                    info.memory_kind,
                    [one.item for one in catalog.alike(namespace, told.tokens)],
                    reading,
                )
                else_s = self._now() - begun - offered.ready_s - reading.reading_s
                link.fetched(reading.done_bytes, reading.reading_s, else_s)
        except (_OtherError, BackendRefusedError) as error:  # no fault of the link
            log.info("fetch_not_of_use", peer=holder.name, reason=str(error))
            self._metrics.fetched(holder.name, 0, "failed")
            return None
        except TimeoutError:
            problem = f"not within {limit_s:.1f} s"
        except KvFileError as error:
            if holder.give_up is not None:
                if isinstance(error, BlobError):
                    holder.give_up(error)
                self._metrics.fetched(holder.name, 0, "failed")
                return None
            problem = str(error)
        except (BackendError, KvError) as error:
            problem = str(error)
        except asyncio.CancelledError:
            n_bytes = 0 if reading is None else reading.done_bytes
            self._metrics.fetched(holder.name, n_bytes, "cancelled")
            raise
        finally:
            if reading is not None:
                reading.stop()
        took_s, n_bytes = self._now() - begun, 0 if reading is None else reading.done_bytes
        if snapshot is None:
            link.gave_up(n_bytes, 0.0 if reading is None else reading.reading_s, took_s)
            log.warning("fetch_failed", peer=holder.name, reason=problem, read_bytes=n_bytes)
            self._metrics.fetched(holder.name, n_bytes, "failed")
            return None
        self._metrics.fetched(holder.name, n_bytes, "ok", took_s)
        log.info(
            "fetched",
            peer=holder.name,
            tokens=len(snapshot),
            size_bytes=snapshot.size_bytes,
            read_bytes=n_bytes,
            seconds=round(took_s, 3),
            expected_s=round(expected_s, 3),
        )
        self._engine.snapshot_made(snapshot, info.memory_kind)
        return snapshot


def _check(told: Snapshot, request: Request, info: BackendInfo, offered: Offered) -> None:
    """Check what is handed out, before any of it is read. Raises KvError."""
    prompt = request.prompt.tokens
    reused = reusable_tokens(
        info.memory_kind,
        count(prompt),
        common_prefix(told.tokens, prompt),
        len(told),
        checkpoints=told.shape.checkpoints,
        extendable=told.shape.extendable,
    )
    if reused < offered.reused - STEP or told.size_bytes > _MOST_MORE * offered.size_bytes:
        raise _OtherError(f"{reused} of {offered.reused} tokens are of use")
    is_ours = is_same(model_of(told.namespace), info.namespace)
    if not is_ours or tenant_of(told.namespace) != request.tenant:
        raise _OtherError("it is of another model or tenant")


def _read(raw: bytes) -> tuple[Manifest, Snapshot]:
    """Return a manifest, and the snapshot that it is of on its host. Raises KvError."""
    manifest = manifests.decode(raw, "the manifest")
    return manifest, manifest.snapshot(KvDir(""))
