"""The links to other hosts are measured, one after the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.base.errors import KvError
from router.base.tasks import spawn
from router.hosts import parts
from router.hosts.measuring import Measuring
from router.hosts.messages import MEASURE, MEASURED, PROTOCOL, Hello
from router.hosts.peer import Peer
from router.hosts.peers import Peers as KnownPeers
from router.llama.server_client import Connections, Timeouts
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import hosts
from tests.support.servers.running_router import RunningRouter

MIB = 1 << 20
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(answer: Answer) -> AsyncIterator[str]:
    """Serve `MEASURE` at the yielded URL."""
    app = web.Application()
    app.router.add_get(MEASURE, answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


class Peers:
    """Peers, and the rounds in which they were checked."""

    def __init__(self, *peers: Peer) -> None:
        self.peers = list(peers)
        self.checked = asyncio.Queue[None]()
        self.go_on = asyncio.Event()

    def all(self) -> list[Peer]:
        return self.peers

    async def until_checked(self) -> None:
        self.checked.put_nowait(None)
        await self.go_on.wait()
        self.go_on.clear()


@asynccontextmanager
async def peer(url: str) -> AsyncIterator[Peer]:
    async with Connections() as connections:
        made = Peer(url, connections, Timeouts(), lambda: 1000.0)
        made.heard(Hello("b", "b-1", "1.0", "proof", protocol=PROTOCOL), "proof")
        yield made


async def all_of_it(_: web.Request) -> web.StreamResponse:
    return web.Response(body=bytes(MEASURED))


async def test_a_link_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(all_of_it) as url, peer(url) as there:
        rate = MEASURED / await asyncio.to_thread(parts.measure, url, None)
        assert rate > 50 * MIB
        monkeypatch.setattr("router.hosts.measuring.measure", lambda *_: MEASURED / 1e9)
        peers, may_fetch = Peers(there), [False]
        task = spawn(Measuring(peers, None, lambda: may_fetch[0]).run(), name="links")
        await peers.checked.get()
        assert there.link.is_to_be_measured(), "it could not use a state"
        may_fetch[0] = True
        peers.go_on.set()
        await peers.checked.get()
        assert not there.link.is_to_be_measured()
        assert there.link.seconds(1_000_000_000) == pytest.approx(1.0, abs=0.02)
        task.cancel()


async def test_a_slow_link_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MEASURING_S", 0.0)
    async with served(all_of_it) as url:
        took_s = await asyncio.to_thread(parts.measure, url, None)
        assert 0 < took_s < 60


async def gone(_: web.Request) -> web.StreamResponse:
    raise web.HTTPNotFound


async def short(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.content_length = MEASURED
    await response.prepare(request)
    await response.write(bytes(MIB))
    assert request.transport is not None
    request.transport.abort()
    return response


async def less(_: web.Request) -> web.StreamResponse:
    return web.Response(body=b"kvferry")


@pytest.mark.parametrize("answer", [gone, short, less])
async def test_what_answers_otherwise_leaves_the_guess(answer: Answer) -> None:
    async with served(answer) as url, peer(url) as there:
        before = there.link.seconds(100 * MIB)
        with pytest.raises((KvError, OSError)):
            await asyncio.to_thread(parts.measure, url, None)
        await Measuring(Peers(there), None, lambda: True).measure(there)
        assert there.link.seconds(100 * MIB) == before
        assert not there.link.is_to_be_measured(), "not at once again"


async def test_hosts_measure_each_other(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two], []) as (first, second, front),
    ):
        found = [_peer(first, "h1"), _peer(second, "h0")]
        while any(peer.link.is_to_be_measured() for peer in found):
            await _peers(first).until_checked()
        assert _peer(front, "h0").link.is_to_be_measured(), "a front fetches nothing"


def _peers(kvferry: RunningRouter) -> KnownPeers:
    assert kvferry.router.hosts is not None
    return kvferry.router.hosts.peers


def _peer(kvferry: RunningRouter, name: str) -> Peer:
    return next(peer for peer in _peers(kvferry).all() if peer.name == name)
