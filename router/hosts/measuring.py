"""Measure the links to other hosts, so that a fetch is priced by what the network carries."""

import asyncio
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
    """Measures for this host, one link after the other.

    `tls`: of the connections to peers; `may_fetch`: whether this host could use a state.
    """

    def __init__(
        self, peers: WatchedPeers, tls: ssl.SSLContext | None, may_fetch: Callable[[], bool]
    ) -> None:
        self._peers = peers
        self._tls = tls
        self._may_fetch = may_fetch

    async def run(self) -> None:
        """Measure links that nothing is known of, for ever."""
        while True:
            for peer in tuple(self._peers.all()):
                if self._may_fetch() and peer.hands_out and peer.link.is_to_be_measured():
                    await self.measure(peer)
            await self._peers.until_checked()

    async def measure(self, peer: Peer) -> None:
        """Measure the link to one peer; if it does not answer as it should, nothing changes."""
        link = peer.link
        link.measuring()
        try:
            seconds = await asyncio.to_thread(measure, peer.url, self._tls)
        except (OSError, KvError) as error:
            log.info("link_not_measured", peer=peer.name, reason=str(error))
            return
        link.measured(MEASURED, seconds)
        log.info("link_measured", peer=peer.name, bytes_per_s=round(MEASURED / seconds))
