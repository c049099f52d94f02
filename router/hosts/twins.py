"""Twins: a llama-server that two hosts have as a backend, and which of them gives it up."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from router.base.errors import BackendError
from router.base.types import BackendId
from router.hosts.peer import Peer
from router.llama.attach.claims import Claims
from router.llama.replies import Process

# A hello is this old at most when its ages are compared; see `must_leave`.
_EQUAL_AGES_S = 0.3


def processes_of(claims: Claims) -> dict[str, float]:
    """Return the seconds since this host took each of its servers, by names for other hosts."""
    return {_named(process): held_s for process, held_s in claims.held_s().items()}


async def compare(claims: Claims, incarnation: str, peers: Sequence[Peer]) -> None:
    """Leave servers that a peer took earlier; take back those that no peer has any more.

    `incarnation`: this host's own. A peer that has one of these servers is asked again: only fresh
    ages can be compared.
    """
    known = {_named(process) for process in [*claims.held_s(), *claims.elsewhere]}
    theirs: dict[str, tuple[float, Peer]] = {}
    silent: set[str] = set()  # servers of peers that do not answer, and are not given up yet
    for peer in peers:
        if peer.hello is None or peer.problem or known.isdisjoint(peer.hello.processes):
            continue
        try:
            fresh = await peer.ask_hello()
        except BackendError:
            silent |= peer.hello.processes.keys()
            continue
        for name, held_s in fresh.processes.items():
            if name not in theirs or theirs[name][0] < held_s:
                theirs[name] = held_s, peer
    for process in claims.elsewhere:
        if _named(process) not in theirs and _named(process) not in silent:
            claims.take_back(process)
    _leave(claims, incarnation, theirs)


def _leave(claims: Claims, incarnation: str, theirs: Mapping[str, tuple[float, Peer]]) -> None:
    for process, held_s in claims.held_s().items():
        if (found := theirs.get(_named(process))) is None:
            continue
        their_s, peer = found
        if must_leave(held_s, incarnation, their_s, peer.key):
            claims.leave(process, BackendId(f"one that the host {peer.name} drives"))


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
