"""This host and its peers as rows of JSON, for `/kvferry/state` and the live page."""

from dataclasses import dataclass

from router.hosts.peer import Peer
from router.hosts.peers import KnownHosts, Peers

Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class HostsView:
    """The fleet as one host sees it. `directory` None: there is none."""

    name: str
    peers: Peers
    directory: KnownHosts | None


def hosts_row(view: HostsView) -> Row:
    """Return the name of this host, its peers and the directory."""
    directory = view.directory
    return {
        "name": view.name,
        "peers": [peer_row(peer) for peer in view.peers.all()],
        "directory": None
        if directory is None
        else {"up": not directory.problem, "problem": directory.problem or None},
    }


def hosts_brief(view: HostsView) -> list[Row]:
    """Return this host and its peers, as little as the live page shows."""
    own: Row = {"name": view.name, "up": True, "here": True, "load": None}
    return [own] + [
        {"name": peer.name, "up": peer.is_usable, "here": False, "load": round(peer.busy, 1)}
        for peer in view.peers.all()
    ]


def peer_row(peer: Peer) -> Row:
    """Return the row of a peer; with its problem if requests do not go there."""
    hello = peer.hello
    stopping = hello is not None and hello.stopping and not peer.problem
    return {
        "name": peer.name,
        "url": peer.url,
        "up": peer.is_usable,
        "problem": peer.problem or ("it is stopping" if stopping else None),
        "version": hello.version if hello else None,
        "models": sorted({served.names[0] for served in peer.models if served.names}),
        "slots": hello.slots if hello else 0,
        "busy": hello.busy if hello else 0,
        "waiting": hello.waiting if hello else 0,
        "quotes": peer.asked,
        "failed": peer.failed,
        "quote_ms": round(peer.quote_s * 1000, 2),
        "late_s": round(peer.trust.late_s, 3),
    }
