"""Peers: found by names, without itself and without doubles; used only where that is right."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

from router.base.clock import MonotonicClock
from router.base.errors import BackendError
from router.base.tasks import Tasks
from router.core.model.plan import Quote
from router.hosts.messages import HELLO, PROTOCOL, Hello, QuoteAsk, QuoteReply, Served
from router.hosts.peer import Peer
from router.hosts.peers import KnownHosts, Peers
from router.llama.server_client import Connections, Timeouts
from router.servers.program import free_port

OWN, PROOF = "own", "proof"
MODEL = Served(("m",), "facts:")


@pytest.fixture(autouse=True)
def _quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check peers each tenth of a second: no test waits for what takes two seconds."""
    monkeypatch.setattr("router.hosts.peers.INTERVAL_S", 0.1)
    monkeypatch.setattr("router.hosts.peers._SILENT_S", 0.15)


def hello(name: str, **more: Any) -> Hello:
    given = {"models": (MODEL,)} | more
    return Hello(name, f"{name}-1", "1.0", PROOF, **given)


@dataclass
class Host:
    """What answers `GET /peer/hello` at one port."""

    says: Hello
    port: int = field(default_factory=free_port)
    asked: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def listening(host: Host) -> AsyncIterator[Host]:
    async def answer(_: web.Request) -> web.Response:
        host.asked += 1
        return web.Response(body=msgspec.json.encode(host.says))

    app = web.Application()
    app.router.add_get(HELLO, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", host.port).start()
    try:
        yield host
    finally:
        await runner.cleanup()


@asynccontextmanager
async def watching(*urls: str, directory: KnownHosts | None = None) -> AsyncIterator[Peers]:
    tasks = Tasks()
    async with Connections(keeps_streams=True) as connections:
        peers = Peers(
            urls,
            connections,
            Timeouts(health_s=1.0, connect_s=1.0),
            incarnation=OWN,
            proof=PROOF,
            clock=MonotonicClock(),
            directory=directory,
        )
        tasks.spawn(peers.run(), name="peers")
        try:
            await until(lambda: bool(peers.all()) or not urls)
            await until(lambda: all(peer.problem != "not contacted yet" for peer in peers.all()))
            yield peers
        finally:
            await tasks.aclose()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            await asyncio.sleep(0.01)
            if is_so():
                return


async def test_a_host_under_two_addresses_is_one_peer() -> None:
    one, other = Host(hello("a")), Host(hello("a"))
    async with listening(one), listening(other), watching(one.url, other.url) as peers:
        await until(lambda: one.asked > 0 and other.asked > 0)
        await peers.until_checked()

        assert len(peers.all()) == 1


async def test_a_name_with_several_addresses_is_several_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening(Host(hello("a"))) as host:
        loop = asyncio.get_running_loop()

        async def resolve(name: str, port: int, **_: object) -> list[object]:
            assert name == "hosts"
            family = socket.AF_INET, socket.SOCK_STREAM, 6, ""
            return [(*family, ("127.0.0.1", port)), (*family, ("127.0.0.2", port))]

        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        tasks = Tasks()
        async with Connections() as connections:
            peers = Peers(
                [f"http://hosts:{host.port}"],
                connections,
                Timeouts(health_s=1.0, connect_s=1.0),
                incarnation=OWN,
                proof=PROOF,
                clock=MonotonicClock(),
            )
            monkeypatch.setattr(Peer, "ask_hello", _no_answer)
            tasks.spawn(peers.run(), name="peers")
            await peers.until_checked()
            urls = {peer.url for peer in peers.all()}
            await tasks.aclose()

        assert urls == {f"http://127.0.0.1:{host.port}", f"http://127.0.0.2:{host.port}"}


async def _no_answer(_: Peer) -> Hello:
    raise BackendError("not now")


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ({"protocol": PROTOCOL + 1}, "protocol"),
        ({"proof": "another"}, "another fleet secret"),
        ({"stopping": True}, ""),
        ({"keeps_apart": True}, "tenants"),
    ],
    ids=["protocol", "secret", "stopping", "tenants"],
)
async def test_another_protocol_is_not_used(says: dict[str, Any], told: str) -> None:
    host = Host(replace(hello("a"), **says))
    async with listening(host), watching(host.url) as peers:
        (peer,) = peers.all()

        assert not peers.usable("m")
        assert told in peer.problem
        host.says = hello("a")
        await until(lambda: bool(peers.usable("m")))


async def test_states_come_only_from_hosts_that_know_the_same_purges() -> None:
    """One that was down may still have states of a purged tenant."""
    async with Connections() as connections:
        peer = Peer("http://127.0.0.1:1", connections, Timeouts(), lambda: 0.0, purges=lambda: "d")
        peer.heard(hello("a"), PROOF)
        assert not peer.hands_out
        peer.heard(hello("a", purges="d"), PROOF)
        assert peer.hands_out


async def test_failures_in_a_row_leave_a_peer_alone_for_a_while() -> None:
    now = [0.0]
    async with Connections() as connections:
        peer = Peer("http://127.0.0.1:1", connections, Timeouts(), lambda: now[0])
        peer.heard(hello("a"), PROOF)
        usable = []
        for seconds in (0.0, 0.0, 0.0, 1.1):
            now[0] += seconds
            usable.append(peer.is_usable)
            peer.failure()
        now[0] += 1.1

        assert usable == [True, True, True, True]
        assert not peer.is_usable  # the second break is twice as long


async def test_peer_that_quotes_and_breaks_forwards_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answers(*_: object) -> bytes:
        return msgspec.msgpack.encode(QuoteReply(Quote(1.0)))

    monkeypatch.setattr(Peer, "_post", answers)
    async with Connections() as connections:
        peer = Peer("http://127.0.0.1:1", connections, Timeouts(), lambda: 0.0)
        peer.heard(hello("a"), PROOF)
        for _ in range(3):
            assert peer.is_usable
            assert await peer.quote(QuoteAsk(None, "", "", 0, b""), 1.0) is not None
            peer.forwarded(ok=False)

        assert not peer.is_usable
        assert peer.failed == 3


async def test_peer_that_started_again_is_not_blamed_for_before() -> None:
    async with Connections() as connections:
        peer = Peer("http://127.0.0.1:1", connections, Timeouts(), lambda: 0.0)
        peer.heard(hello("a"), PROOF)
        for _ in range(3):
            peer.forwarded(ok=False)
        assert not peer.is_usable
        peer.heard(msgspec.structs.replace(hello("a"), incarnation="another"), PROOF)

        assert peer.is_usable


async def test_peer_that_serves_some_forwards_is_kept() -> None:
    async with Connections() as connections:
        peer = Peer("http://127.0.0.1:1", connections, Timeouts(), lambda: 0.0)
        peer.heard(hello("a"), PROOF)
        for ok in (False, False, True, False, False):
            peer.forwarded(ok=ok)

        assert peer.is_usable


async def test_a_break_ends_by_itself_and_a_list_does_not_outlive_it() -> None:
    """The list of usable peers is kept: a break has to change it at its begin and at its end."""
    now = 10.0
    clock = MonotonicClock()
    clock.now = lambda: now
    async with Connections() as connections, listening(Host(hello("a"))) as host:
        peers = Peers(
            [],
            connections,
            Timeouts(health_s=1.0),
            incarnation=OWN,
            proof=PROOF,
            clock=clock,
            directory=Told([msgspec.structs.replace(host.says, url=host.url)]),
        )
        tasks = Tasks()
        tasks.spawn(peers.run(), name="peers")
        await peers.until_checked()
        (peer,) = peers.usable("m").peers.values()
        for _ in range(3):
            assert peers.usable("m")
            peer.failure()
        assert not peers.usable("m")
        now += 1.0
        assert peers.usable("m")
        await tasks.aclose()


async def test_the_lists_of_peers_follow_while_other_code_reads_them() -> None:
    """The state page reads all peers, and requests ask for the usable ones."""
    host = Host(hello("a"))
    async with watching(host.url) as peers:
        looked = []

        def seen(names: list[str]) -> bool:
            looked.append(peers.all())  # as the state page does, after each change
            return sorted(peers.usable("m").peers) == names

        assert seen([])
        async with listening(host):
            await until(lambda: seen(["a-1"]))
            host.says = replace(hello("a"), incarnation="a-2")
            await until(lambda: seen(["a-2"]))
        await until(lambda: seen([]))
        assert looked


@dataclass
class Told:
    """A directory that says what a test says."""

    hosts: list[Hello]
    problem: str = ""

    async def members(self) -> list[Hello]:
        return self.hosts


async def test_directory_is_not_believed_without_the_host() -> None:
    """A writer of Redis can copy a proof, but has no certificate and no address of a host."""
    true = Host(hello("a"))
    gone = free_port()
    directory = Told(
        [
            hello("a", url=true.url),
            hello("liar", url=f"http://127.0.0.1:{gone}"),
            hello("other", url=true.url.replace("http:", "https:")),
            hello("odd", url="http://h:x"),
            hello("path", url=f"{true.url}/path"),
            hello("no name", url="http://a..b:80"),
        ]
    )
    async with listening(true), watching(directory=directory) as peers:
        await peers.until_checked()
        await peers.until_checked()
        usable = [peer.name for peer in peers.usable("m").peers.values()]

    assert usable == ["a"]


@pytest.mark.parametrize("replayed", [1, 2])
async def test_what_a_host_said_before_is_not_heard_again(
    monkeypatch: pytest.MonkeyPatch, replayed: int
) -> None:
    """A writer of Redis puts back its signed word of when it was drained, as long as it likes."""
    monkeypatch.setattr("router.hosts.peers.INTERVAL_S", 0.01)
    monkeypatch.setattr("router.hosts.peers._SILENT_S", 0.05)
    true = Host(hello("a", told=2))
    drained = hello("a", url=true.url, models=(), stopping=True, told=replayed)
    async with listening(true), watching(directory=Told([drained])) as peers:
        await until(lambda: bool(peers.usable("m")))
        asked = true.asked
        true.says = hello("a", told=3)
        await until(lambda: true.asked > asked + 2)
        assert bool(peers.usable("m"))


async def test_a_newer_word_in_the_directory_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.hosts.peers.INTERVAL_S", 0.01)
    true, directory = Host(hello("a", told=2)), Told([])
    directory.hosts.append(hello("a", url=true.url, told=1))
    async with listening(true), watching(directory=directory) as peers:
        await until(lambda: bool(peers.usable("m")))
        directory.hosts[0] = hello("a", url=true.url, models=(), told=3)
        await until(lambda: not peers.usable("m"))
