"""Joins this host to its fleet, with peers and directory, and to the cold tier."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import NamedTuple

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from router import __version__
from router.assembly.backends import StartError, read, timeouts_of
from router.base.clock import MonotonicClock, wall_now
from router.base.errors import KvError
from router.base.tasks import Tasks
from router.base.types import TENANT_SALT, Snapshot, Tenant
from router.base.urls import authority
from router.config.cold import ColdConfig, can_be_read_on_the_way
from router.config.schema import Config
from router.core.model.slots import Phase
from router.core.model.tenancy import facts_of, model_of, tenant_of
from router.engine.engine import Engine
from router.engine.held_prefixes import HeldPrefixes
from router.hosts.credentials import Credentials, CredentialsError, load_credentials
from router.hosts.messages import Hello, Served
from router.hosts.peers import KnownHosts, Peers
from router.llama.attach.namespace import is_same
from router.llama.server_client import Connections
from router.store.cold.names import Names
from router.store.cold.tier import ColdSettings, ColdTier, Owned
from router.store.places.bucket import Bucket
from router.store.places.directory import Directory
from router.store.places.place import Place
from router.store.places.seals import Sealed
from router.store.store import KvStore
from router.telemetry.collected import Collected
from router.telemetry.hosts_metrics import HostsMetrics, peer_metrics
from router.web.admin.hosts import HostsView
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys
from router.web.fleet.purging import Purging

log = structlog.get_logger(__name__)

# What is held is hashed in the background, for the first quote after a start; a quote takes in the
# rest by itself.
_REFRESH_S = 1.0


_NO_KEY = b"kvferry cold tier"  # of names where nothing is encrypted
_LEAST_KEY_BYTES, _MOST_KEY_BYTES = 32, 1024


@dataclass(slots=True)
class OwnAddress:
    """The URL of this host's address for peers, as far as it is known."""

    configured: str | None
    scheme: str
    host: str = ""
    port: int = 0
    outside: str = ""  # this machine's address, as the directory sees it

    def listens(self, host: str, port: int) -> None:
        """Note the address that was opened."""
        self.host, self.port = host, port

    def seen(self, outside: str) -> None:
        """Note the address of this machine from which the directory is reached."""
        if not self.port:  # not open yet: it is told again
            return
        if outside != self.outside and self._is_everywhere and ip_address(outside).is_loopback:
            log.warning(
                "peers_get_a_loopback_address",
                address=outside,
                do="set fleet.url, or give Redis by an address that other machines can reach",
            )
        self.outside = outside

    @property
    def _is_everywhere(self) -> bool:
        return self.configured is None and self.host in ("0.0.0.0", "::")  # noqa: S104 - not bound

    @property
    def url(self) -> str:
        """Return the URL; empty while it is not known."""
        if self.configured is not None or not self.port:
            return self.configured or ""
        host = self.outside if self._is_everywhere else self.host
        return f"{self.scheme}://{authority(host, self.port)}" if host else ""


@dataclass(slots=True)
class Hosts:
    """This host and the others. `address` is known once the peers' address is open."""

    name: str
    credentials: Credentials
    peers: Peers
    directory: KnownHosts | None
    held: HeldPrefixes
    metrics: HostsMetrics
    hello: Callable[[], Hello]
    address: OwnAddress

    @property
    def view(self) -> HostsView:
        """Return the fleet as operators see it."""
        return HostsView(self.name, self.peers, self.directory)


@asynccontextmanager
async def hosts_of(
    config: Config,
    engine: Engine,
    selection: BackendSelection,
    keys: Keys,
    registry: CollectorRegistry,
    clock: MonotonicClock,
    purges: Callable[[], str],
) -> AsyncIterator[Hosts | None]:
    """Yield the connection to the fleet; None without one. Raises StartError."""
    fleet = config.fleet
    if not fleet.is_used:
        yield None
        return
    try:
        credentials = await read(partial(load_credentials, fleet.credentials), "fleet.credentials")
    except CredentialsError as error:
        raise StartError(f"fleet.credentials (--fleet-credentials): {error}") from error
    name, incarnation = fleet.name or _own_name(), secrets.token_hex(8)
    address = OwnAddress(fleet.url, "http" if credentials.server is None else "https")
    held = HeldPrefixes(engine.state.inventory, credentials.secret, facts_of, is_same)
    told = count(1)

    def hello() -> Hello:
        state = engine.state
        slots = [slot for slot in state.inventory.slots if slot.phase is not Phase.LOST]
        return Hello(
            name=name,
            incarnation=incarnation,
            version=__version__,
            proof=credentials.proof,
            url=address.url,
            models=_served(engine),
            slots=len(slots),
            busy=sum(slot.phase is not Phase.IDLE for slot in slots),
            waiting=len(state.queue) + selection.waiting,
            stopping=state.stopping,
            keeps_apart=keys.known.keeps_apart,
            snapshots=len(state.inventory.catalog),
            told=next(told),
            purges=purges(),
        )

    directory = None
    if fleet.redis is not None:
        try:
            from router.hosts.directory import HostDirectory  # 60 ms, for those that have one
        except ModuleNotFoundError as error:
            raise StartError(
                "fleet.redis (--redis) needs `pip install 'kvferry[fleet]'`"
            ) from error
        directory = HostDirectory(fleet.redis, incarnation, hello, credentials.secret, address.seen)
    tasks = Tasks()
    async with Connections(credentials.client, keeps_streams=True) as connections:
        peers = Peers(
            fleet.peers,
            connections,
            timeouts_of(config),
            incarnation=incarnation,
            proof=credentials.proof,
            clock=clock,
            directory=directory,
            own_url=lambda: address.url,
            scheme=address.scheme,
            purges=purges,
            keeps_apart=lambda: keys.known.keeps_apart,
        )

        def gauges() -> Iterable[Metric]:
            found = ((p.name, p.is_usable, p.busy, p.trust.late_s) for p in peers.all())
            return peer_metrics(found, None if directory is None else not directory.problem)

        registry.register(Collected(gauges))
        tasks.supervise(peers.run, name="peers")
        tasks.supervise(partial(_refresh, held), name="held prefixes")
        if directory is not None:
            tasks.supervise(directory.run, name="directory")
        try:
            yield Hosts(
                name, credentials, peers, directory, held, HostsMetrics(registry), hello, address
            )
        finally:
            await tasks.aclose()
            if directory is not None:
                await directory.aclose()


@dataclass(frozen=True, slots=True)
class _Kept:
    """The snapshots of this host. Implements `cold.tier.KeptSnapshots`."""

    engine: Engine
    store: KvStore
    memories: Sequence[Callable[[str], None]]  # what else of a tenant is kept in memory

    def snapshots(self) -> Iterator[Snapshot]:
        """Yield all that are whole and in use, the most valuable first."""
        catalog = self.engine.state.inventory.catalog
        for name in catalog.most_valuable():
            if (snapshot := catalog.get(name)) is not None:
                yield snapshot

    def owned(self, snapshot: Snapshot) -> Owned:
        """Return whose a snapshot is."""
        namespace = snapshot.namespace
        return Owned(facts_of(model_of(namespace)), tenant_of(namespace))

    def tenants(self) -> set[Tenant]:
        """Return the tenants of snapshots and slots."""
        known = self.engine.state.inventory
        found = {tenant_of(one.namespace) for one, _, _ in known.catalog.snapshots()}
        return found | {slot.content.tenant for slot in known.slots}

    async def purge(self, tenant: Tenant, note: str) -> None:
        """Delete all that is here of a tenant, and note that the purge was obeyed."""
        here = Purging(self.engine, self.store, self.memories)
        await here.here(Tenant(tenant.partition(TENANT_SALT)[0]), note)


class ColdStore(NamedTuple):
    """Where the cold tier is, and how its objects are named and sealed; None: they are not."""

    place: Place
    names: Names
    seal: Sealed | None


async def cold_parts(config: ColdConfig) -> ColdStore:
    """Return the parts of the cold tier at `config.url`. Raises StartError."""
    assert config.url is not None
    url = config.url
    try:
        key_file = config.key_file
        secret = None if key_file is None else await read(partial(_key, key_file), "cold.key_file")
        place: Directory | Bucket
        if url.startswith("/"):
            place = Directory(Path(url), is_shared=True, is_encrypted=secret is not None)
        else:
            place = await asyncio.to_thread(Bucket, url, config.endpoint, config.region)
            if (at := place.endpoint) and secret is None and can_be_read_on_the_way(at):
                raise KvError(f"{at} can be read on the way: use https, or a cold.key_file")
        seal = None if secret is None else Sealed(secret)
    except ModuleNotFoundError as error:
        raise StartError("cold.url needs `pip install 'kvferry[cold]'`") from error
    except KvError as error:
        raise StartError(f"cold.url: {error}") from error
    names = Names(_NO_KEY if secret is None else blake2b(secret, digest_size=32).digest())
    return ColdStore(place, names, seal)


async def cold_of(
    config: ColdConfig, engine: Engine, store: KvStore, memories: Sequence[Callable[[str], None]]
) -> ColdTier | None:
    """Return the cold tier; None: there is none. Raises StartError."""
    if config.url is None:
        return None
    settings = ColdSettings(config.after_s, config.keep_s)
    parts = await cold_parts(config)
    store.purges.folder_of = parts.names.tenant
    kept = _Kept(engine, store, memories)
    return ColdTier(*parts, store, kept, settings, wall_now)


def _key(path: Path) -> bytes:
    """Return the key in a file. Blocks. Raises StartError."""
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise StartError(f"cold.key_file: {path}: {error.strerror}") from error
    if not _LEAST_KEY_BYTES <= len(key) <= _MOST_KEY_BYTES:
        raise StartError(
            f"cold.key_file: {path}: must have 32 to 1024 bytes, not {len(key)}:"
            " `openssl rand -base64 48` makes some"
        )
    return key


async def _refresh(held: HeldPrefixes) -> None:
    """Follow what this host holds, a little at a time."""
    while True:
        more = held.refresh()
        await asyncio.sleep(0 if more else _REFRESH_S)


def _served(engine: Engine) -> tuple[Served, ...]:
    """Return the models that this host takes requests for."""
    found = {
        (tuple(sorted(info.models)), info.namespace): info.generates
        for info in engine.state.inventory.taking()
    }
    served = [
        Served(names, namespace, generates) for (names, namespace), generates in found.items()
    ]
    known = [set(names) for names, _ in found]
    served += [
        Served(tuple(sorted(names)))
        for names in engine.state.inventory.servers.models()
        if not any(names & those for those in known)
    ]
    return tuple(served)


def _own_name() -> str:
    """Return the machine's name, as a name for labels and headers."""
    name = socket.gethostname().partition(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:64]
