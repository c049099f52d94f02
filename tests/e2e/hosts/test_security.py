"""What another host may, and what only looks like another host may not (SECURITY.md)."""

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from router.base.api_keys import hash_text
from router.core.model.plan import Quote
from router.hosts.messages import HELLO, HOP, QUOTE, QuoteReply
from router.hosts.peer import Peer
from router.servers.program import free_port
from router.tools.fleet.certificate import make_certificate
from router.web.api import completions
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import HOST, fleet_yaml, host, hosts
from tests.support.servers.running_router import RunningRouter

pytestmark = pytest.mark.thorough

LONG = "a long prompt of one tenant. " * 100
KEYS = f"""
auth:
  keys:
    - {{name: alice, hash: '{hash_text("alices-key-0123456789")}'}}
    - {{name: bob, hash: '{hash_text("bobs-key-0123456789")}'}}
"""
ALICE = {"Authorization": "Bearer alices-key-0123456789"}
BOB = {"Authorization": "Bearer bobs-key-0123456789"}


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    for name in ("h0", "h1", "h2"):
        make_certificate(tmp_path / "fleet", name)
    return tmp_path / "fleet"


def context_of(credentials: Path, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(credentials / name / "authority.pem")
    context.load_cert_chain(credentials / name / "host.pem", credentials / name / "host.key")
    return context


def peers_url(kvferry: RunningRouter) -> str:
    hosts = kvferry.router.hosts
    assert hosts is not None
    return hosts.address.url


async def test_a_front_remembers_what_a_peer_refuses(tmp_path: Path) -> None:
    """A request that has ended two servers of one host is sent to no other."""
    async with (
        FakeLlama(kv_dir=tmp_path) as a,
        FakeLlama(kv_dir=tmp_path) as b,
        hosts([a, b], []) as (there, front),
    ):
        a.faults.die_at_once = b.faults.die_at_once = True
        statuses = [(await front.complete(LONG)).status for _ in range(3)]
        a.faults.die_at_once = b.faults.die_at_once = False
        await there.until_up()
        sent = len(a.bodies) + len(b.bodies)
        answer = await front.complete(LONG)
        assert (answer.status, len(a.bodies) + len(b.bodies)) == (503, sent), statuses
        log = (await there.get("/kvferry/requests")).json["requests"]
        assert (await front.complete(LONG)).status == 503
        assert (await there.get("/kvferry/requests")).json["requests"] == log, "it was not asked"
        assert (await front.complete("another")).status == 200


async def test_hosts_of_one_authority_serve_each_others_requests(
    credentials: Path, tmp_path: Path
) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        hosts([fake], [], credentials=credentials) as (_, front),
    ):
        answer = await front.chat([{"role": "user", "content": "hi"}])

        assert answer.status == 200
        assert answer.headers[HOST] == "h0"


async def test_without_a_certificate_of_the_fleet_nobody_is_answered(
    credentials: Path, tmp_path: Path
) -> None:
    strangers = tmp_path / "strangers"
    make_certificate(strangers, "h9")
    stranger = context_of(strangers, "h9")
    stranger.load_verify_locations(credentials / "h0" / "authority.pem")
    none = ssl.create_default_context(cafile=str(credentials / "h0" / "authority.pem"))
    none.check_hostname = False
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        hosts([fake], credentials=credentials) as (a,),
        aiohttp.ClientSession() as session,
    ):
        for context in (stranger, none):
            with pytest.raises((aiohttp.ClientError, ConnectionError, ssl.SSLError)):
                async with session.get(peers_url(a) + HELLO, ssl=context) as response:
                    await response.read()
        async with session.get(peers_url(a) + HELLO, ssl=context_of(credentials, "h1")) as response:
            assert (await response.json(content_type=None))["name"] == "h0"
        plain = peers_url(a).replace("https:", "http:")
        with pytest.raises(aiohttp.ClientError):
            await session.get(plain + HELLO)


async def test_a_host_with_another_secret_is_not_used(credentials: Path, tmp_path: Path) -> None:
    (credentials / "h1" / "secret").write_text("x" * 32)
    async with FakeLlama(kv_dir=tmp_path) as fake:
        ports = [free_port(), free_port()]
        sections = [fleet_yaml(at, ports, credentials=credentials) for at in (0, 1)]
        async with host(0, [fake], sections[0]) as a, host(1, [], sections[1]):
            state = await a.until(lambda now: bool(now["hosts"]["peers"][0]["version"]))
            (peer,) = state["hosts"]["peers"]

            assert not peer["up"]
            assert "another fleet secret" in peer["problem"]


async def test_a_forged_hop_header_means_nothing(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], [], yaml=KEYS) as (a, front):
        forged = {HOP: '{"host":"h1","request":"x","tenant":"alice"}'}
        for kvferry in (a, front):
            body = {"messages": [{"role": "user", "content": "hi"}]}
            refused = await kvferry.post("/v1/chat/completions", body, headers=forged)
            served = await kvferry.post("/v1/chat/completions", body, headers=forged | BOB)

            assert refused.status == 401
            assert served.status == 200
        assert not any(
            name.lower().startswith("x-kvferry-hop")
            for headers in fake.headers.values()
            for name in headers
        )
        state = await a.state()
        assert {slot["tenant"] for slot in state["slots"]} <= {"bob", "", None}


@pytest.mark.parametrize("path", [HELLO, QUOTE, "//peer/hello", "/x/../peer/quote", "/peer"])
async def test_clients_do_not_reach_what_is_for_peers(path: str, tmp_path: Path) -> None:
    """Neither on a host nor through one: a front forwards all that it cannot serve."""
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], []) as (a, front):
        before = len(fake.seen)
        for kvferry in (a, front):
            url = URL(kvferry.url + path, encoded=True)
            for method in ("GET", "POST"):
                async with kvferry.session.request(method, url, json={"model": "fake"}) as response:
                    assert response.status == 404
                    assert "nothing at this path" in await response.text()
        assert not [path for _, path in fake.seen[before:] if "peer" in path]


async def test_a_forwarded_request_is_no_call_of_a_peer(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake]) as (a,):
        hop = {HOP: '{"host":"h1","request":"x"}'}
        async with a.session.get(peers_url(a) + HELLO, headers=hop) as response:
            assert response.status == 404


@pytest.mark.parametrize("path", ["/kvferry/state", "/metrics", "/kvferry/backends/h0-0/drain"])
async def test_operators_routes_are_not_on_the_peers_address(path: str, tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        hosts([fake]) as (a,),
        a.session.get(peers_url(a) + path) as response,
    ):
        assert response.status == 404


async def test_a_client_on_the_peers_address_is_refused(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake]) as (a,):
        before = dict(fake.counts)  # of the probe
        async with a.session.post(peers_url(a) + "/completion", json={"prompt": "x"}) as response:
            assert response.status == 400
            assert "other hosts" in (await response.json())["error"]["message"]
        assert dict(fake.counts) == before


async def test_tenants_are_apart_on_all_hosts(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], [], yaml=KEYS) as (a, front):
        body = {"prompt": LONG, "n_predict": 4}
        await a.post("/completion", body, headers=ALICE)
        hers = await front.post("/completion", body, headers=ALICE)
        his = await front.post("/completion", body, headers=BOB)

        assert hers.headers[HOST] == his.headers[HOST] == "h0"
        assert hers.cached >= len(LONG) - 1
        assert his.cached == 0


async def test_a_peer_that_quotes_lies_loses_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`h1` says that it needs no time at all, and is slower than the others."""
    asked = Peer.quote

    async def lying(peer: Peer, *args: object) -> QuoteReply:
        told = await asked(peer, *args)  # type: ignore[arg-type]
        return QuoteReply(Quote(0.0)) if peer.name == "h1" else told

    monkeypatch.setattr(Peer, "quote", lying)
    monkeypatch.setattr(completions, "is_stale", lambda *_: False)  # it takes what it lied for
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as honest,
        FakeLlama(kv_dir=tmp_path / "b") as liar,
        hosts([honest], [liar]) as (door, _),
    ):
        went = []
        for seed in range(8):
            liar.prefill_gate.clear()  # it computes for at least this long
            asyncio.get_running_loop().call_later(0.3, liar.prefill_gate.set)
            answer = await door.complete(str(seed) * 500, n_predict=2, stream=True)
            went.append(answer.headers[HOST])

        assert went[0] == "h1"
        assert went[-1] == "h0"
