"""Hand over the snapshots of a host that leaves, the most valuable first.

A drained host hands out what others ask for, as long as it runs. Before it ends for good, the
others take what they have room for.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from router.base.errors import BackendError
from router.base.types import Namespace, Snapshot, SnapshotId
from router.core.model.tenancy import model_of, tenant_of
from router.engine.engine import Engine
from router.hosts.messages import TakeAsk
from router.hosts.peer import Peer
from router.hosts.peers import Peers
from router.llama.attach.namespace import is_same

_AT_ONCE = 4  # snapshots in one call: its caller sees how it goes on
_SLOWEST_PER_S = 1e6  # bytes; slower than this is given up
_LEAST_S = 10.0


class HandedOver(Struct, frozen=True):
    """What one call has done. `left`: snapshots that were not offered yet."""

    taken: int
    refused: int
    size_bytes: int
    left: int


@dataclass(slots=True)
class Leaving:
    """The hand-over of this host; it goes on where the last call ended."""

    engine: Engine
    peers: Peers
    _offered: set[SnapshotId] = field(default_factory=set)

    async def go_on(self) -> HandedOver:
        """Let other hosts take the next few snapshots."""
        due = [one for one in self.engine.view.most_valuable() if one not in self._offered]
        taken = refused = size_bytes = 0
        for name in due[:_AT_ONCE]:
            self._offered.add(name)
            snapshot = self.engine.view.snapshot(name)
            if snapshot is None:
                continue
            if await self._is_taken(snapshot):
                taken += 1
                size_bytes += snapshot.size_bytes
            else:
                refused += 1
        return HandedOver(taken, refused, size_bytes, max(len(due) - _AT_ONCE, 0))

    async def _is_taken(self, snapshot: Snapshot) -> bool:
        """Return whether another host has taken it: the least busy one that can."""
        model = model_of(snapshot.namespace)
        ask = TakeAsk(
            holder=self.peers.incarnation,
            snapshot=snapshot.id,
            namespace=model,
            tenant=tenant_of(snapshot.namespace),
            n_tokens=len(snapshot),
            size_bytes=snapshot.size_bytes,
        )
        limit_s = max(snapshot.size_bytes / _SLOWEST_PER_S, _LEAST_S)
        able = [peer for peer in self.peers.all() if peer.is_usable and _has(peer, model)]
        for peer in sorted(able, key=lambda peer: peer.busy):
            try:
                if await peer.take(ask, limit_s):
                    return True
            except BackendError:
                peer.failure()
        return False


def _has(peer: Peer, model: str) -> bool:
    return any(
        served.namespace and is_same(Namespace(served.namespace), Namespace(model))
        for served in peer.models
    )
