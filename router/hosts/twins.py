"""Twins: a llama-server that two hosts have as a backend, and which of them gives it up."""

from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

from router.base.errors import BackendError
from router.base.types import BackendId
from router.hosts.peer import Peer
from router.llama.attach.claims import Claims
from router.llama.replies import Process

# A hello is this old at most when its ages are compared; see `must_leave`.
_EQUAL_AGES_S = 0.3
# A host that was not heard to drive a server for so long does not. Chosen: longer than a restart.
_GONE_AFTER_S = 30.0


def processes_of(claims: Claims) -> dict[str, float]:
    """Return the seconds since this host took each of its servers, by names for other hosts."""
    return {_named(process): held_s for process, held_s in claims.held_s().items()}


async def compare(claims: Claims, incarnation: str, peers: Sequence[Peer]) -> None:
    """Leave servers that a peer took earlier; take back those that no peer has had for 30 s.

    `incarnation`: this host's own. A peer that has one of these servers is asked again: only fresh
    ages can be compared. It may drive a server although nothing can be forwarded to it, because of
    another secret or another protocol, say.
    """
    known = {_named(process) for process in [*claims.held_s(), *claims.left_s()]}
    theirs: dict[str, tuple[float, Peer]] = {}
    for peer in peers:
        if peer.hello is None or known.isdisjoint(peer.hello.processes):
            continue
        with suppress(BackendError):
            for name, held_s in (await peer.ask_hello()).processes.items():
                if name not in theirs or theirs[name][0] < held_s:
                    theirs[name] = held_s, peer
    for process, left_s in claims.left_s().items():
        if found := theirs.get(_named(process)):
            claims.leave(process, _driver(found[1]))
        elif left_s >= _GONE_AFTER_S:
            claims.take_back(process)
    for process, held_s in claims.held_s().items():
        if found := theirs.get(_named(process)):
            their_s, peer = found
            if must_leave(held_s, incarnation, their_s, peer.key):
                claims.leave(process, _driver(peer))


def _driver(peer: Peer) -> BackendId:
    return BackendId(f"one that the host {peer.name} drives")


def must_leave(held_s: float, incarnation: str, their_s: float, theirs: str) -> bool:
    """Return whether this host gives up a server that another host has as well.

    `held_s`, `their_s`: seconds since each host took it. Of ages that differ by less than 0.3 s the
    lower incarnation decides: both hosts then come to the same end.
    """
    earlier_s = their_s - held_s
    if abs(earlier_s) <= _EQUAL_AGES_S:
        return theirs < incarnation
    return earlier_s > 0


def _named(process: Process) -> str:
    return blake2b(repr(process).encode(), digest_size=8).hexdigest()
