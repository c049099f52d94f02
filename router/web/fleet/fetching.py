"""Fetch from another host what a prompt begins with, instead of computing it.

What came is a snapshot like any other, so the planner decides what becomes of it. Whatever goes
wrong, the prompt is computed.
"""

import asyncio
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from msgspec import Struct

from router.base.errors import BackendError, BackendRefusedError, KvError
from router.base.prefix_hash import STEP
from router.base.tasks import spawn
from router.base.tokens import common_prefix, count
from router.base.types import BackendInfo, KvDir, Namespace, Request, Snapshot, Tenant
from router.core.model import events as ev
from router.core.model.memory_kinds import reusable_tokens
from router.core.model.plan import Offered, Quote
from router.core.model.tenancy import model_of, namespace_of, tenant_of
from router.engine.engine import Engine
from router.engine.held_prefixes import HeldPrefixes
from router.hosts.messages import ExportAsk, TakeAsk
from router.hosts.parts import PeerParts
from router.hosts.peer import Peer
from router.hosts.peers import Peers
from router.llama.attach.namespace import is_same
from router.store.blobs import manifests
from router.store.blobs.manifests import Manifest
from router.store.store import KvStore
from router.telemetry.fetch_metrics import FetchMetrics

log = structlog.get_logger(__name__)

_MOST_MORE = 1.5  # times the size that was told


class _OtherError(KvError):
    """A host hands out something else than it offered."""


class Way(Struct, frozen=True):
    """A state to fetch: the host that has it, what it is, and the quote with the state fetched."""

    holder: str
    offered: Offered
    quote: Quote


@dataclass(slots=True)
class _UnderWay:
    """One fetch, and how many requests wait for it."""

    task: asyncio.Task[None] | None = None
    n_waiting: int = 0
    snapshot: Snapshot | None = None


class Fetching:
    """Fetches for this host. `tls`: of the connections to peers."""

    def __init__(
        self,
        peers: Peers,
        engine: Engine,
        store: KvStore,
        held: HeldPrefixes,
        tls: ssl.SSLContext | None,
        metrics: FetchMetrics,
        now: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._engine = engine
        self._store = store
        self._held = held
        self._tls = tls
        self._metrics = metrics
        self._now = now
        self._under_way: dict[tuple[str, str, str, bytes], _UnderWay] = {}

    def is_of_use(self, request: Request, namespace: Namespace, offered: Offered) -> bool:
        """Return whether a prompt begins with what is offered, as far as its tokens are known."""
        if request.prompt.unknown:
            return True
        tokens = request.prompt.tokens
        return self._held.is_of_use(offered, namespace, request.tenant, tokens)

    def way(
        self, request: Request, own: Quote | None, holder: str, offered: Offered | None
    ) -> Way | None:
        """Return the way to fetch `offered`, if that pays against the `own` quote."""
        peer = self._peers.by_key(holder) if own is not None and offered is not None else None
        if own is None or offered is None or peer is None or not peer.hands_out:
            return None
        link = peer.link
        quote = self._engine.view.once_fetched(request, own, offered, link.seconds)
        return None if quote is None else Way(holder, offered, quote)

    async def fetch(self, request: Request, hashes: Sequence[bytes], way: Way) -> bool:
        """Fetch a state, together with others that want it; return whether it is here now.

        Cancelled, the fetch ends with the last request that waits for it.
        """
        peer, info = self._peers.by_key(way.holder), self._reader(request)
        if peer is None or info is None:
            return False
        last = hashes[min(max(way.offered.reused // STEP, 1), len(hashes)) - 1]
        key = way.holder, info.namespace, request.tenant, last
        fetch = self._under_way.get(key)
        if fetch is None:
            fetch = self._under_way[key] = _UnderWay()

            async def work() -> None:
                try:
                    fetch.snapshot = await self._fetched(peer, request, hashes, info, way)
                finally:
                    del self._under_way[key]

            fetch.task = spawn(work(), name=f"fetch from {peer.name}")
        assert fetch.task is not None
        fetch.n_waiting += 1
        try:
            await asyncio.wait([fetch.task])
        finally:
            fetch.n_waiting -= 1
            if not fetch.n_waiting:
                fetch.task.cancel()
        return fetch.snapshot is not None

    def _reader(self, request: Request) -> BackendInfo | None:
        """Return a backend that could read the state."""
        return next(
            (
                info
                for info in self._engine.infos.values()
                if info.kv_dir is not None and self._engine.view.serves(info.id, request)
            ),
            None,
        )

    async def take(self, ask: TakeAsk) -> bool:
        """Fetch a snapshot of a host that leaves; return whether it is here now."""
        peer, tenant = self._peers.by_key(ask.holder), Tenant(ask.tenant)
        info = next(
            (
                info
                for info in self._engine.view.up()
                if info.kv_dir is not None and is_same(info.namespace, Namespace(ask.namespace))
            ),
            None,
        )
        offered = Offered(ask.n_tokens, ask.n_tokens, ask.size_bytes)
        if peer is None or info is None or not offered.is_sound or ask.n_tokens > info.n_ctx:
            return False
        if not self._engine.view.has_room(ask.n_tokens, ask.size_bytes):
            return False
        wanted = ExportAsk(ask.namespace, ask.tenant, ask.n_tokens, b"", b"", ask.snapshot)
        return await self._received(peer, info, tenant, wanted, offered) is not None

    async def _fetched(
        self,
        peer: Peer,
        request: Request,
        hashes: Sequence[bytes],
        info: BackendInfo,
        way: Way,
    ) -> Snapshot | None:
        prompt = request.prompt.tokens
        offered = way.offered
        ask = ExportAsk(
            info.namespace, request.tenant, count(prompt), b"".join(hashes), offered.digest
        )

        def check(snapshot: Snapshot) -> None:
            """Check what is handed out, before any of it is read."""
            reused = reusable_tokens(
                info.memory_kind,
                count(prompt),
                common_prefix(snapshot.tokens, prompt),
                len(snapshot),
                checkpoints=snapshot.shape.checkpoints,
                extendable=snapshot.shape.extendable,
            )
            if (
                reused < offered.reused - STEP
                or snapshot.size_bytes > _MOST_MORE * offered.size_bytes
            ):
                raise _OtherError(f"{reused} of {offered.reused} tokens are of use")

        return await self._received(peer, info, request.tenant, ask, offered, check)

    async def _received(
        self,
        peer: Peer,
        info: BackendInfo,
        tenant: Tenant,
        ask: ExportAsk,
        offered: Offered,
        check: Callable[[Snapshot], None] = lambda _: None,
    ) -> Snapshot | None:
        """Return the snapshot made of what a peer hands out. None: it did not come.

        `check` raises KvError for another state than what was offered.
        """
        begun, link = self._now(), peer.link
        expected_s = offered.ready_s + link.seconds(offered.size_bytes) * (1 + offered.sharers)
        limit_s = link.limit_s(expected_s)
        parts: PeerParts | None = None
        snapshot, problem = None, ""
        try:
            async with asyncio.timeout(limit_s):
                raw = await peer.export(ask, limit_s)
                manifest, told = await asyncio.to_thread(_read, raw)
                check(told)
                is_ours = is_same(model_of(told.namespace), info.namespace)
                if not is_ours or tenant_of(told.namespace) != tenant:
                    raise _OtherError("it is of another model or tenant")
                namespace = namespace_of(info, tenant)
                parts = PeerParts(peer.url, manifest.id, self._tls, begun + limit_s, self._now)
                snapshot = await self._store.exchange.receive(
                    manifest,
                    namespace,
                    info.memory_kind,
                    self._engine.view.alike(namespace, told.tokens),
                    parts,
                )
                reading_s = parts.reading_s
                else_s = self._now() - begun - offered.ready_s - reading_s
                link.fetched(parts.read_bytes, reading_s, else_s)
        except (_OtherError, BackendRefusedError) as error:  # no fault of the link
            log.info("fetch_not_of_use", peer=peer.name, reason=str(error))
            self._metrics.fetched(peer.name, 0, "failed")
            return None
        except TimeoutError:
            problem = f"not within {limit_s:.1f} s"
        except (BackendError, KvError) as error:
            problem = str(error)
        except asyncio.CancelledError:
            self._metrics.fetched(peer.name, 0 if parts is None else parts.read_bytes, "cancelled")
            raise
        finally:
            if parts is not None:
                parts.close()
        took_s, n_bytes = self._now() - begun, 0 if parts is None else parts.read_bytes
        if snapshot is None:
            link.gave_up(n_bytes, 0.0 if parts is None else parts.reading_s, took_s)
            log.warning("fetch_failed", peer=peer.name, reason=problem, read_bytes=n_bytes)
            self._metrics.fetched(peer.name, n_bytes, "failed")
            return None
        self._metrics.fetched(peer.name, n_bytes, "ok", took_s)
        log.info(
            "fetched",
            peer=peer.name,
            tokens=len(snapshot),
            size_bytes=snapshot.size_bytes,
            read_bytes=n_bytes,
            seconds=round(took_s, 3),
            expected_s=round(expected_s, 3),
        )
        self._engine.tell(ev.SnapshotsFound((snapshot,), info.memory_kind, made=True))
        return snapshot


def _read(raw: bytes) -> tuple[Manifest, Snapshot]:
    """Return a manifest, and the snapshot that it is of on its host. Raises KvError."""
    manifest = manifests.decode(raw, "the manifest")
    return manifest, manifest.snapshot(KvDir(""))
