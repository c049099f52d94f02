"""Delete all that hosts and the cold tier keep of one tenant, and say who could not be reached.

Who could not is told when it is back: each host tells the purges that it knows.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from secrets import token_hex

import structlog
from msgspec import Struct

from router.base.errors import BackendError, KvError
from router.base.tasks import spawn
from router.base.types import Snapshot, Tenant
from router.engine.engine import Engine
from router.hosts.peers import Peers
from router.store.cold.tier import ColdTier
from router.store.purges import HERE
from router.store.store import KvStore
from router.web.fleet.cold import NAME

log = structlog.get_logger(__name__)

_LIMIT_S = 60.0  # for one host
_LOOKS_S, _AGAIN_S = 1.0, 30.0  # between two looks for purges that peers know; after a failure
_START_S = 3.0  # that a start waits for peers that may be down
_NOTE, _TENANT = re.compile("[0-9a-f]{32}"), re.compile("[A-Za-z0-9._-]{1,64}")


class Reached(Struct, frozen=True):
    """One holder that was told: how much it deletes, or the problem. Objects in the cold tier."""

    holder: str
    count: int = 0
    problem: str | None = None


@dataclass(slots=True)
class Purging:
    """Purges of this host, which all others hear of.

    `memories`: what forgets a tenant, besides core and store.
    """

    engine: Engine
    store: KvStore
    memories: Sequence[Callable[[str], None]]
    cold: ColdTier | None = None
    peers: Peers | None = None
    _heard: asyncio.Event = field(default_factory=asyncio.Event)  # all peers, since the start

    @property
    def notes(self) -> dict[str, str]:
        """Return the purges that other hosts are told: tenants by id."""
        return self.store.purges.by_name

    async def here(self, tenant: Tenant, note: str) -> Reached:
        """Delete the snapshots of a tenant on this host, and what is known of its prompts.

        Those in use are deleted after their last use. What idle slots have of it is neither saved
        nor reused. `note`: the id of the purge, from `new_note`.
        """
        self._forget(tenant)  # a fetch of its states ends
        count = await self.engine.purge_tenant(tenant)
        problems = await self.store.purge(tenant, note)
        self._forget(tenant)
        told = "; ".join(f"{kv_dir}: {why}" for kv_dir, why in problems.items())
        return Reached("this host", count, told or None)

    def _forget(self, tenant: Tenant) -> None:
        for forget in self.memories:
            forget(tenant)

    async def until_heard(self) -> None:
        """Wait until the purges of the time when this host was down are obeyed, or for a moment.

        Before, nothing may be served: a request could get a state that was purged.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._heard.wait(), _START_S)

    async def hear(self) -> None:
        """Obey the purges that peers know and this host does not, for ever."""
        heard: dict[str, str] = {}  # the digest of each peer whose notes are known
        if self.peers is not None:
            await self.peers.until_checked()
        while self.peers is not None:
            for peer in self.peers.all():
                told = "" if peer.hello is None or peer.problem else peer.hello.purges
                if told in ("", self.store.purges.digest, heard.get(peer.key)):
                    continue
                try:
                    notes = await peer.purges(_LIMIT_S)
                except BackendError:
                    await asyncio.sleep(_AGAIN_S)
                    continue
                heard[peer.key] = told
                for note in notes.keys() - self.notes.keys():
                    if is_note(note) and is_tenant(notes[note]):
                        log.info("purged_by_another_host", tenant=notes[note])
                        await self.here(Tenant(notes[note]), note)
            self._heard.set()
            await asyncio.sleep(_LOOKS_S)

    async def elsewhere(self, tenant: Tenant, note: str) -> list[Reached]:
        """Delete what the other hosts and the cold tier have of a tenant.

        It goes on to its end if the operator does not wait.
        """
        reached: list[Reached] = []

        async def work() -> None:
            peers = [] if self.peers is None else await self.peers.introduced()
            told = [_reached(peer.name, peer.purge(tenant, note, _LIMIT_S)) for peer in peers]
            if self.cold is not None:
                told.append(_reached(NAME, self.cold.purge(tenant, note)))
            reached.extend(await asyncio.gather(*told))

        await asyncio.wait([spawn(work(), name="purge a tenant")])
        return reached

    async def in_cold(self, snapshots: Iterable[Snapshot]) -> list[Reached]:
        """Delete the copies of snapshots from the cold tier, if there is one."""
        if self.cold is None:
            return []
        return [await _reached(NAME, self.cold.forget(snapshots))]


def new_note(*, everywhere: bool = True) -> str:
    """Return the id of a new purge, of this host alone or not."""
    return token_hex(16) if everywhere else f"{HERE}{token_hex(16)}"


def is_note(told: str) -> bool:
    """Return whether another host's word is the id of a purge."""
    return _NOTE.fullmatch(told) is not None


def is_tenant(told: str) -> bool:
    """Return whether another host's word is the name of a tenant, without a salt."""
    return _TENANT.fullmatch(told) is not None


async def _reached(holder: str, count: Awaitable[int]) -> Reached:
    """Return the outcome of a purge at a holder."""
    try:
        return Reached(holder, await count)
    except (BackendError, KvError) as error:
        return Reached(holder, problem=str(error))
