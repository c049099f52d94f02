"""Two hosts with one llama-server: exactly one of them gives it up."""

import itertools
from dataclasses import dataclass, field

import pytest

from router.base.errors import BackendError
from router.base.types import BackendId
from router.hosts.messages import Hello
from router.hosts.peer import Peer
from router.hosts.twins import compare, must_leave, processes_of
from router.llama.attach.drivers import Drivers

A = BackendId("a")
PROCESS = ("marker", "model.gguf", "b1")


@pytest.mark.parametrize(
    ("mine_s", "theirs_s"), [*itertools.product([0.0, 0.2, 0.5, 10.0], [0.0, 0.29, 0.31, 10.2])]
)
@pytest.mark.parametrize(("mine", "theirs"), [("aa", "bb"), ("bb", "aa")])
def test_exactly_one_of_two_leaves(mine_s: float, theirs_s: float, mine: str, theirs: str) -> None:
    here = must_leave(theirs_s - mine_s, mine, theirs)
    there = must_leave(mine_s - theirs_s, theirs, mine)
    assert here != there


def test_the_later_host_leaves_and_equal_ages_go_by_incarnation() -> None:
    assert must_leave(1.0, "aa", "bb")
    assert not must_leave(-1.0, "bb", "aa")
    assert must_leave(0.1, "bb", "aa")
    assert must_leave(-0.1, "bb", "aa")


@dataclass
class _Peer:
    """A peer that says of itself what the test sets; `fresh` None: it does not answer."""

    hello: Hello
    fresh: Hello | None
    problem: str = ""
    name: str = "other"
    key: str = "other"
    asked: int = field(default=0)

    async def ask_hello(self) -> Hello:
        self.asked += 1
        if self.fresh is None:
            raise BackendError("gone")
        return self.fresh


def _hello(drivers: Drivers | None, held_s: float = 0.0) -> Hello:
    processes = {} if drivers is None else dict.fromkeys(processes_of(drivers), held_s)
    return Hello("other", "other", "1", "", processes=processes)


async def _compared(drivers: Drivers, peer: _Peer) -> None:
    peers: list[Peer] = [peer]  # type: ignore[list-item]
    await compare(drivers, "own", peers)


async def test_server_of_a_peer_is_taken_back_when_left() -> None:
    now = 100.0
    drivers = Drivers(lambda: now)
    drivers.take(PROCESS, A)
    theirs = _hello(drivers, 50.0)
    await _compared(drivers, _Peer(theirs, theirs))
    assert drivers.take(PROCESS, A) == "one that the host other drives"

    now += 29.0
    await _compared(drivers, _Peer(theirs, theirs))  # it is heard again: 30 s begin anew
    now += 29.0
    await _compared(drivers, _Peer(theirs, None))  # it may still drive the server
    assert list(drivers.left_s()) == [PROCESS]

    now += 1.0
    await _compared(drivers, _Peer(theirs, None))
    assert drivers.take(PROCESS, A) == A


async def test_a_peer_to_which_nothing_is_forwarded_may_drive_a_server() -> None:
    drivers = Drivers(lambda: 100.0)
    drivers.take(PROCESS, A)
    theirs = _hello(drivers, 50.0)
    await _compared(drivers, _Peer(theirs, theirs, problem="it has another fleet secret"))
    assert list(drivers.left_s()) == [PROCESS]


async def test_only_fresh_ages_count() -> None:
    """The known hello is old: the peer took the server after this host, as it says when asked."""
    drivers = Drivers(lambda: 0.0)
    drivers.take(PROCESS, A)
    old, fresh = _hello(drivers, 50.0), _hello(drivers, -50.0)
    await _compared(drivers, _Peer(old, fresh))
    assert drivers.left_s() == {}


async def test_a_peer_without_a_common_server_is_not_asked() -> None:
    drivers = Drivers(lambda: 0.0)
    drivers.take(PROCESS, A)
    peer = _Peer(_hello(None), None)
    await _compared(drivers, peer)
    assert peer.asked == 0
