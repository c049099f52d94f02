"""All peers: found by configured names and in the directory, and watched.

Every address of a configured name is a peer. A host finds itself and leaves itself out; a host that
is found under several addresses counts once.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol
from urllib.parse import urlsplit

import structlog

from router.base.clock import MonotonicClock
from router.base.errors import BackendError
from router.base.urls import authority
from router.hosts.messages import Hello
from router.hosts.peer import Peer
from router.llama.server_client import Connections, Timeouts

log = structlog.get_logger(__name__)

INTERVAL_S = 2.0
# A peer that neither answered nor was in the directory for so long is asked directly.
_SILENT_S = 1.5 * INTERVAL_S
# Checks in a row without an answer until a peer is given up.
_FAILURES = 2
_MODELS = 1000  # clients choose the names


class KnownHosts(Protocol):
    """The directory, as far as hosts need it. It is never sure, and no call raises."""

    problem: str  # why it does not answer; empty if it does

    async def members(self) -> Sequence[Hello] | None:
        """Return all hosts that registered; None while the directory does not answer."""


@dataclass(frozen=True, slots=True)
class Usable:
    """The peers that a request may go to, by `Peer.key`; good `until` then."""

    peers: Mapping[str, Peer]
    until: float

    def __bool__(self) -> bool:
        return bool(self.peers)

    def only(self, keys: Collection[str]) -> "Usable":
        """Return those of the peers with these keys."""
        return Usable({key: peer for key, peer in self.peers.items() if key in keys}, self.until)


class Peers:
    """The peers of this host. Call `run`, until cancelled."""

    def __init__(
        self,
        urls: Sequence[str],
        connections: Connections,
        timeouts: Timeouts,
        *,
        incarnation: str,
        proof: str,
        clock: MonotonicClock,
        directory: KnownHosts | None = None,
        own_url: Callable[[], str] = lambda: "",
        scheme: str = "http",
        keeps_apart: Callable[[], bool] = lambda: False,
        purges: Callable[[], str] = lambda: "",
    ) -> None:
        """Set up without peers. `incarnation`, `proof` and `own_url` are this host's own.

        `scheme`: of all hosts. `keeps_apart`: whether this host keeps tenants apart. `purges`: a
        digest of the purges that it knows.
        """
        self._purges = purges
        self._own_url = own_url
        self._scheme = scheme
        self._keeps_apart = keeps_apart
        self._urls = urls
        self._connections, self._timeouts = connections, timeouts
        self.incarnation, self._proof = incarnation, proof
        self._clock = clock
        self._directory = directory
        self._peers: dict[str, Peer] = {}  # by URL
        self._misses: dict[str, int] = {}  # checks in a row without an answer, by URL
        self._own_urls: set[str] = set()
        self._resolved: dict[str, list[str]] = {}
        self._rounds = 0
        self._all: list[Peer] | None = None  # None: to be made anew
        self._names: set[str] | None = None  # of all models; None: to be made anew
        self._usable: dict[str | None, Usable] = {}  # by model
        self._news = asyncio.Event()
        self._closed = False

    def all(self) -> list[Peer]:
        """Return all peers that are known, one for each host, by name. Do not modify it."""
        if self._all is None:
            self._all = self._sorted()
        return self._all

    def _changed(self) -> None:
        """Make the lists of peers anew when they are asked for next."""
        self._all = self._names = None
        self._usable.clear()

    def _sorted(self) -> list[Peer]:
        found: dict[str, Peer] = {}
        for peer in self._peers.values():
            known = found.get(peer.key)
            if known is None or (known.problem and not peer.problem):
                found[peer.key] = peer
        return sorted(found.values(), key=lambda peer: peer.name)

    def usable(self, model: str | None) -> Usable:
        """Return the peers that a request for a model may go to.

        Gathered anew when something was heard, or a break begins or ends: it takes 0.1 ms for a
        hundred peers.
        """
        now = self._clock.now()
        known = self._usable.get(model)
        if known is None or known.until <= now:
            if len(self._usable) > _MODELS:
                self._usable.clear()
            found = [peer for peer in self.all() if peer.is_usable and peer.has(model)]
            if self._closed:
                found = []
            known = self._usable[model] = Usable(
                {peer.key: peer for peer in found},
                min((end for peer in self.all() if (end := peer.broken_until) > now), default=inf),
            )
        return known

    def drained(self) -> list[Peer]:
        """Return the peers that serve nothing, but could hand out snapshots: drained hosts."""
        return [
            peer
            for peer in self.all()
            if peer.hands_out and not peer.models and peer.hello and peer.hello.snapshots
        ]

    def by_key(self, key: str) -> Peer | None:
        """Return the peer with this `Peer.key`; None: there is none."""
        return next((peer for peer in self.all() if peer.key == key), None)

    def knows(self, model: str) -> bool:
        """Return whether a peer has a model, also one that cannot be used now."""
        if self._names is None:
            hellos = [peer.hello for peer in self.all() if peer.hello is not None]
            self._names = {name for h in hellos for served in h.models for name in served.names}
        return model in self._names

    def models(self) -> list[frozenset[str]]:
        """Return the names of each model that a usable peer serves."""
        found = {
            frozenset(served.names): None
            for peer in self.all()
            if peer.is_usable
            for served in peer.models
        }
        return list(found)

    async def run(self) -> None:
        """Look for peers and check them, for ever."""
        while True:
            await self._round()
            self._rounds += 1
            self._news.set()
            self._news = asyncio.Event()
            await asyncio.sleep(INTERVAL_S)

    def close(self) -> None:
        """Offer no peer for further requests."""
        self._closed = True
        self._changed()

    async def until_quiet(self) -> None:
        """Wait until no forwarded request is under way."""
        for peer in tuple(self._peers.values()):
            await peer.until_quiet()

    async def introduced(self) -> list[Peer]:
        """Return all peers; who never answered is asked again: it may be this host itself."""
        if self._rounds == 0:
            await self.until_checked()
        await asyncio.gather(*(self._check(peer) for peer in self.all() if peer.hello is None))
        return self.all()

    async def until_checked(self) -> None:
        """Wait until a round of checks is over."""
        wanted = self._rounds + 1
        while self._rounds < wanted:
            await self._news.wait()

    async def _round(self) -> None:
        members = None if self._directory is None else await self._directory.members()
        # Another incarnation at this host's own address is its last run, which is over.
        own = {self._own_url(), *self._own_urls, ""}
        unproved: list[str] = []
        for hello in members or ():
            if hello.incarnation == self.incarnation or hello.url in own:
                continue
            if not self._is_url(hello.url):
                continue
            peer = self._peer(hello.url)
            # Only the host itself, by its certificate, can say that it is one of the fleet. What it
            # said before, a writer of the directory can put back: that is not heard.
            if peer.hello is not None and peer.hello.incarnation == hello.incarnation:
                if hello.told > peer.hello.told:
                    self._heard(peer, hello)
            else:
                unproved.append(hello.url)
        found = [
            url for urls in await asyncio.gather(*map(self._resolve, self._urls)) for url in urls
        ]
        for url in found:
            if url not in self._own_urls:
                self._peer(url)
        now = self._clock.now()
        silent = [
            peer
            for peer in self._peers.values()
            if peer.hello is None
            or peer.problem
            or now - peer.heard_at >= _SILENT_S
            or peer.url in found
            or peer.url in unproved
        ]
        await asyncio.gather(*map(self._check, silent))
        await self._drop_lost(found)

    def _is_url(self, url: str) -> bool:
        """Return whether the directory may send requests there: as this host would be reached."""
        try:
            parts = urlsplit(url)
            usable = parts.scheme == self._scheme and bool(parts.hostname) and bool(parts.port)
        except ValueError:
            return False
        return usable and url.startswith(f"{parts.scheme}://") and parts.path == ""

    def _peer(self, url: str) -> Peer:
        if url not in self._peers:
            self._changed()
            self._peers[url] = Peer(
                url, self._connections, self._timeouts, self._clock.now, self._changed, self._purges
            )
        return self._peers[url]

    async def _check(self, peer: Peer) -> None:
        try:
            hello = await peer.ask_hello()
        except BackendError as error:
            misses = self._misses[peer.url] = self._misses.get(peer.url, 0) + 1
            if misses >= _FAILURES or peer.hello is None:
                if not peer.problem:
                    log.warning("peer_down", peer=peer.name, url=peer.url, reason=str(error))
                peer.lost(f"it does not answer: {error}")
                self._changed()
            return
        if hello.incarnation == self.incarnation:
            self._own_urls.add(peer.url)
            self._peers.pop(peer.url, None)
            self._changed()
            return
        self._heard(peer, hello)

    def _heard(self, peer: Peer, hello: Hello) -> None:
        before = peer.problem
        self._misses.pop(peer.url, None)
        peer.heard(hello, self._proof, keeps_apart=self._keeps_apart())
        self._changed()
        if peer.problem and peer.problem != before:
            log.warning("peer_unusable", peer=peer.name, url=peer.url, reason=peer.problem)
        elif before and not peer.problem:
            log.info("peer_up", peer=peer.name, url=peer.url, version=hello.version)

    async def _drop_lost(self, configured: Collection[str]) -> None:
        """Forget peers that are down, and neither configured nor in the directory any more."""
        for url, peer in list(self._peers.items()):
            gone = self._misses.get(url, 0) >= _FAILURES and url not in configured
            gone = gone and not peer.relaying  # `until_quiet` still waits for its answers
            if gone:
                self._changed()
                del self._peers[url], self._misses[url]
                log.info("peer_gone", peer=peer.name, url=url)
                await self._connections.drop(url)

    async def _resolve(self, url: str) -> Iterable[str]:
        """Return the URL of each address of a configured one; the last known if that fails."""
        try:
            self._resolved[url] = await addresses_of(url)
        except OSError as error:
            if url not in self._resolved:
                log.warning("peer_name_unknown", url=url, reason=error.strerror)
                self._resolved[url] = []
        return self._resolved[url]


async def addresses_of(url: str) -> list[str]:
    """Return the URL of each address that the name in a URL has. Raises OSError."""
    parts = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_STREAM
        )
    except UnicodeError as error:  # of IDNA
        raise OSError(errno.EINVAL, f"{parts.hostname!r} is not a host name") from error
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"{parts.scheme}://{authority(host, parts.port)}" for host in hosts]
