"""Measure the links to other hosts, so that a fetch is priced by what the network carries."""

import asyncio
import random
import ssl
from collections.abc import Callable
from typing import Protocol

import structlog

from router.base.errors import KvError
from router.hosts.messages import MEASURED
from router.hosts.parts import measure
from router.hosts.peer import Peer

log = structlog.get_logger(__name__)


class WatchedPeers(Protocol):
    """The other hosts, each checked now and then."""

    def all(self) -> list[Peer]:
        """Return all that are known."""

    async def until_checked(self) -> None:
        """Wait until a round of checks is over."""


class Measuring:
    """Measures for this host, one link after the other, in any order.

    `tls`: of the connections to peers; `may_fetch`: whether this host could use a state of a peer.
    """

    def __init__(
        self, peers: WatchedPeers, tls: ssl.SSLContext | None, may_fetch: Callable[[Peer], bool]
    ) -> None:
        self._peers = peers
        self._tls = tls
        self._may_fetch = may_fetch
        self._chance = random.SystemRandom()

    async def run(self) -> None:
        """Measure links that nothing is known of, for ever."""
        while True:
            due = [peer for peer in self._peers.all() if self._is_due(peer)]
            # A host that was restarted is found by all at once, and lets one measure at a time.
            for peer in self._chance.sample(due, len(due)):
                await self.measure(peer)
            await self._peers.until_checked()

    def _is_due(self, peer: Peer) -> bool:
        return peer.hands_out and peer.link.is_to_be_measured() and self._may_fetch(peer)

    async def measure(self, peer: Peer) -> None:
        """Measure the link to one peer; if it does not answer as it should, nothing changes."""
        link = peer.link
        try:
            seconds = await asyncio.to_thread(measure, peer.url, self._tls)
        except (OSError, KvError) as error:
            link.not_measured()
            log.debug("link_not_measured", peer=peer.name, reason=str(error))
            return
        link.measured(MEASURED, seconds)
        log.info("link_measured", peer=peer.name, bytes_per_s=round(MEASURED / seconds))
