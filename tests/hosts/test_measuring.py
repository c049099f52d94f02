"""The links to other hosts are measured, one after the other."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from router.base.errors import KvError
from router.base.tasks import spawn
from router.hosts import parts
from router.hosts.breaker import Breaker
from router.hosts.link import Link
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
        task = spawn(Measuring(peers, None, lambda _: may_fetch[0]).run(), name="links")
        await peers.checked.get()
        assert there.link.is_to_be_measured(), "it could not use a state"
        may_fetch[0] = True
        peers.go_on.set()
        await peers.checked.get()
        assert not there.link.is_to_be_measured()
        assert there.link.seconds(1_000_000_000) == pytest.approx(1.0, abs=0.02)
        task.cancel()


async def test_a_slow_link_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came tells what all would take; the host sends no more than that."""
    monkeypatch.setattr(parts, "_MEASURING_S", 0.1)
    over = asyncio.Event()

    async def first(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = MEASURED
        await response.prepare(request)
        await response.write(bytes(MIB))
        await over.wait()
        return response

    async with served(first) as url:
        monkeypatch.setattr(parts, "perf_counter", iter([10.0, 10.5]).__next__)
        took_s = await asyncio.to_thread(parts.measure, url, None)
        over.set()
    assert took_s >= 0.5 * MEASURED / parts._PIECE


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


async def busy(_: web.Request) -> web.StreamResponse:
    raise web.HTTPServiceUnavailable


@pytest.mark.parametrize("answer", [gone, busy, short, less])
async def test_what_answers_otherwise_leaves_the_guess(answer: Answer) -> None:
    async with served(answer) as url, peer(url) as there:
        before = there.link.seconds(100 * MIB)
        with pytest.raises((KvError, OSError)):
            await asyncio.to_thread(parts.measure, url, None)
        await Measuring(Peers(there), None, lambda _: True).measure(there)
        assert there.link.seconds(100 * MIB) == before
        assert not there.link.is_to_be_measured(), "not at once again"


async def test_hosts_measure_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But no front: it has nothing, and could use nothing."""
    measured = list[str]()
    real = Measuring.measure

    async def measure(self: Measuring, there: Peer) -> None:
        await real(self, there)
        if not there.link.is_to_be_measured() and there.link.seconds(MIB) != guess_s:
            measured.append(there.name)

    guess_s = Link(Breaker(1.0, lambda: 0.0), lambda: 0.0).seconds(MIB)
    monkeypatch.setattr(Measuring, "measure", measure)
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two], []) as (first, *_),
    ):
        while len(measured) < 2:
            await _peers(first).until_checked()
        await _peers(first).until_checked()
        assert sorted(measured) == ["h0", "h1"]


async def is_busy(url: str) -> bool:
    """Return whether a host lets nobody measure now."""
    try:
        await asyncio.to_thread(parts.measure, url, None)
    except KvError as error:
        return "busy" in str(error)
    else:
        return False


async def test_one_host_measures_at_a_time(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], []) as (_, front):
        there = _peer(front, "h0")
        raw = urlsplit(there.url)
        _, writer = await asyncio.open_connection(raw.hostname, raw.port)
        writer.write(f"GET {MEASURE} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        while not await is_busy(there.url):  # until the host has begun; nothing is read of it
            pass
        writer.transport.abort()
        while await is_busy(there.url):  # until it has noticed
            pass


def _peers(kvferry: RunningRouter) -> KnownPeers:
    assert kvferry.router.hosts is not None
    return kvferry.router.hosts.peers


def _peer(kvferry: RunningRouter, name: str) -> Peer:
    return next(peer for peer in _peers(kvferry).all() if peer.name == name)
