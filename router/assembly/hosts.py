"""Joins this host to its fleet: peers, directory, what is held, and the routes for other hosts."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b

import structlog
from prometheus_client import CollectorRegistry

from router import __version__
from router.assembly.backends import StartError, timeouts_of
from router.base.clock import MonotonicClock
from router.base.errors import BackendError
from router.base.tasks import Tasks
from router.base.types import BackendId
from router.base.urls import authority
from router.config.schema import Config
from router.core.model.slots import Phase
from router.engine.engine import Engine
from router.engine.held_prefixes import HeldPrefixes
from router.hosts.credentials import Credentials, CredentialsError, load_credentials
from router.hosts.messages import Hello, Served
from router.hosts.peer import Peer
from router.hosts.peers import KnownHosts, Peers
from router.llama.attach.namespace import facts_of
from router.llama.replies import Process
from router.llama.server_client import Connections
from router.telemetry.hosts_metrics import DirectoryStats, HostsCollector, HostsMetrics, PeerStats
from router.web.admin.hosts import HostsView
from router.web.api.backend_selection import BackendSelection
from router.web.api.client_keys import Keys

log = structlog.get_logger(__name__)

_REFRESH_S = 0.1
_EQUAL_AGES_S = 0.3  # ages are known to a tenth of a second


class Twins:
    """The llama-servers of this host, and which of them another host drives as well.

    Two hosts on one server would write to each other's slots. The host that took the server later
    gives it up, by a claim in the name of the other in `processes`, where monitors look.
    """

    def __init__(self, processes: dict[Process, BackendId], clock: MonotonicClock) -> None:
        self._processes = processes
        self._clock = clock
        self._since: dict[Process, float] = {}
        self._foreign: dict[Process, BackendId] = {}

    def held_s(self) -> Mapping[str, float]:
        """Return the seconds since this host took each of its servers, by a digest of its names."""
        now = self._clock.now()
        ours = [p for p in self._processes if p not in self._foreign]
        for process in ours:
            self._since.setdefault(process, now)
        self._since = {p: at for p, at in self._since.items() if p in self._processes}
        return {_named(process): now - self._since[process] for process in ours}

    async def compare(self, incarnation: str, peers: list[Peer]) -> None:
        """Give up servers that a peer took earlier; take back those that no peer has any more.

        `incarnation`: this host's own. A peer that has one of these servers is asked again: only
        fresh ages can be compared. Of equal ages the lower incarnation decides, on both hosts.
        """
        theirs: dict[str, tuple[float, Peer]] = {}
        mine = {_named(process) for process in self._processes}
        for peer in peers:
            if peer.hello is None or peer.problem or not mine & set(peer.hello.processes):
                continue
            with suppress(BackendError):
                hello = await peer.ask_hello()
                for name, held_s in hello.processes.items():
                    if name not in theirs or theirs[name][0] < held_s:
                        theirs[name] = held_s, peer
        for process in list(self._foreign):
            if _named(process) not in theirs:
                del self._foreign[process]
                self._processes.pop(process, None)
        ours = self.held_s()
        for process in list(self._processes):
            found = theirs.get(_named(process))
            if process in self._foreign or found is None:
                continue
            earlier_s = found[0] - ours.get(_named(process), 0.0)
            if earlier_s > _EQUAL_AGES_S or (
                earlier_s > -_EQUAL_AGES_S and found[1].key < incarnation
            ):
                self._foreign[process] = BackendId(f"one that the host {found[1].name} drives")
                self._processes[process] = self._foreign[process]


def _named(process: Process) -> str:
    """Return what names a server process to other hosts."""
    return blake2b(repr(process).encode(), digest_size=8).hexdigest()


@dataclass(slots=True)
class OwnAddress:
    """The URL of this host's address for peers, as far as it is known."""

    url: str | None  # as configured
    scheme: str
    host: str = ""
    port: int = 0

    def listens(self, host: str, port: int) -> None:
        """Note the address that was opened."""
        self.host, self.port = host, port

    def as_seen(self, from_outside: str = "") -> str:
        """Return the URL; empty while it is not known. `from_outside`: this machine's address."""
        if self.url is not None or not self.port:
            return self.url or ""
        everywhere = self.host in ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
        host = from_outside if everywhere else self.host
        if not host:
            return ""
        return f"{self.scheme}://{authority(host, self.port)}"


@dataclass(slots=True)
class Hosts:
    """This host and the others. `url` is set once the peers' address is open."""

    name: str
    incarnation: str
    credentials: Credentials
    peers: Peers
    directory: KnownHosts | None
    held: HeldPrefixes
    metrics: HostsMetrics
    hello: Callable[[], Hello]
    address: OwnAddress

    @property
    def view(self) -> HostsView:
        """Return what operators see of the fleet."""
        return HostsView(self.name, self.peers, self.directory)


@asynccontextmanager
async def hosts_of(
    config: Config,
    engine: Engine,
    selection: BackendSelection,
    keys: Keys,
    registry: CollectorRegistry,
    clock: MonotonicClock,
    processes: dict[Process, BackendId],
) -> AsyncIterator[Hosts | None]:
    """Yield the connection to the fleet; None without one. Raises StartError."""
    fleet = config.fleet
    if not fleet.is_used:
        yield None
        return
    try:
        credentials = await asyncio.to_thread(load_credentials, fleet.credentials)
    except CredentialsError as error:
        raise StartError(f"fleet.credentials (--fleet-credentials): {error}") from error
    name, incarnation = fleet.name or _own_name(), secrets.token_hex(8)
    address = OwnAddress(fleet.url, "http" if credentials.server is None else "https")
    held = engine.held_prefixes(credentials.secret, facts_of)
    twins = Twins(processes, clock)

    seen_from_outside = ""

    def hello(from_outside: str = "") -> Hello:
        nonlocal seen_from_outside
        seen_from_outside = from_outside or seen_from_outside
        view = engine.view
        slots = view.slots()
        return Hello(
            name=name,
            incarnation=incarnation,
            version=__version__,
            secret=credentials.proof,
            url=address.as_seen(from_outside),
            models=_served(engine),
            slots=len(slots),
            busy=sum(slot.phase is not Phase.IDLE for slot in slots),
            waiting=len(view.queue()) + selection.waiting,
            stopping=view.is_stopping,
            keeps_apart=keys.known.keeps_apart,
            processes=dict(twins.held_s()),
        )

    directory = None
    if fleet.redis is not None:
        from router.hosts.directory import Directory  # 60 ms, for those that have one

        directory = Directory(fleet.redis, incarnation, hello, held, clock)
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
            own_url=lambda: address.as_seen(seen_from_outside),
            on_news=lambda: twins.compare(incarnation, peers.all()),
            scheme=address.scheme,
            keeps_apart=lambda: keys.known.keeps_apart,
        )
        registry.register(
            HostsCollector(
                lambda: [
                    PeerStats(peer.name, peer.is_usable, peer.busy, peer.trust.late_s)
                    for peer in peers.all()
                ],
                lambda: None if directory is None else _directory_stats(directory),
            )
        )
        tasks.spawn(peers.run(), name="peers")
        tasks.spawn(_refresh(held, twins), name="held prefixes")
        if directory is not None:
            tasks.spawn(directory.run(), name="directory")
        try:
            yield Hosts(
                name,
                incarnation,
                credentials,
                peers,
                directory,
                held,
                HostsMetrics(registry),
                hello,
                address,
            )
        finally:
            await tasks.aclose()
            if directory is not None:
                await directory.aclose()


async def _refresh(held: HeldPrefixes, twins: Twins) -> None:
    """Follow what this host holds, a little at a time, and since when it has its servers."""
    while True:
        twins.held_s()
        more = held.refresh()
        await asyncio.sleep(0 if more else _REFRESH_S)


def _served(engine: Engine) -> tuple[Served, ...]:
    """Return the models that this host takes requests for."""
    found = {
        (tuple(sorted(info.models)), info.namespace): info.generates for info in engine.view.up()
    }
    served = [
        Served(names, namespace, generates) for (names, namespace), generates in found.items()
    ]
    known = [set(names) for names, _ in found]
    served += [
        Served(tuple(sorted(names)))
        for names in engine.view.server_models
        if not any(names & those for those in known)
    ]
    return tuple(served)


def _directory_stats(directory: KnownHosts) -> DirectoryStats:
    return DirectoryStats(
        not directory.problem, directory.answered, directory.late, directory.behind
    )


def _own_name() -> str:
    """Return the machine's name, as a name for labels and headers."""
    name = socket.gethostname().partition(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:64]
