"""Twins: a llama-server that two hosts have as a backend, and which of them gives it up."""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

from router.base.errors import BackendError
from router.base.types import BackendId
from router.hosts.peer import Peer
from router.llama.attach.drivers import Drivers
from router.llama.replies import Process

# What the way of a hello may take, and more; see `must_leave`.
_EQUAL_AGES_S = 0.3
# A host that was not heard to drive a server for so long does not. Chosen: longer than a restart.
_GONE_AFTER_S = 30.0


def processes_of(drivers: Drivers) -> dict[str, float]:
    """Return the seconds since this host took each of its servers, by names for other hosts."""
    return {_named(process): held_s for process, held_s in drivers.held_s().items()}


async def compare(drivers: Drivers, incarnation: str, peers: Sequence[Peer]) -> None:
    """Leave servers that a peer took earlier; take back those that no peer has had for 30 s.

    `incarnation`: this host's own. A peer that has one of these servers is asked again: only fresh
    ages can be compared. It may drive a server although nothing can be forwarded to it, because of
    another secret or another protocol, say.
    """
    known = {_named(process) for process in [*drivers.held_s(), *drivers.left_s()]}
    theirs: dict[str, tuple[float, Peer]] = {}  # by how much they took a server earlier
    for peer in peers:
        if peer.hello is None or known.isdisjoint(peer.hello.processes):
            continue
        with suppress(BackendError):
            fresh = await peer.ask_hello()
            own = processes_of(drivers)  # at the time of the answer
            for name, held_s in fresh.processes.items():
                earlier_s = held_s - own.get(name, 0.0)
                if name not in theirs or theirs[name][0] < earlier_s:
                    theirs[name] = earlier_s, peer
    for process, left_s in drivers.left_s().items():
        if found := theirs.get(_named(process)):
            drivers.leave(process, _driver(found[1]))
        elif left_s >= _GONE_AFTER_S:
            drivers.take_back(process)
    for process in drivers.held_s():
        if found := theirs.get(_named(process)):
            earlier_s, peer = found
            if must_leave(earlier_s, incarnation, peer.key):
                drivers.leave(process, _driver(peer))


def _driver(peer: Peer) -> BackendId:
    return BackendId(f"one that the host {peer.name} drives")


def must_leave(earlier_s: float, incarnation: str, theirs: str) -> bool:
    """Return whether this host gives up a server that another host has as well.

    `earlier_s`: by how much the other host took it earlier. Below 0.3 s the lower incarnation
    decides: both hosts then come to the same end.
    """
    if abs(earlier_s) <= _EQUAL_AGES_S:
        return theirs < incarnation
    return earlier_s > 0


def _named(process: Process) -> str:
    return blake2b(repr(process).encode(), digest_size=8).hexdigest()
