"""The cold tier behind real servers: what a lost host had computed is not computed again."""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router.base.api_keys import hash_text
from router.base.types import Tenant
from router.servers.program import free_port
from router.store.cold.names import Names
from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, ids
from tests.support.models.tiny_models import KINDS
from tests.support.servers.hosts import HOST, fleet_yaml, host, hosts
from tests.support.servers.running_router import Answer, RunningRouter, running
from tests.support.servers.s3_server import S3_KEYS, S3Server

pytestmark = pytest.mark.thorough

LONG = ids(1, 2500)
FROM = "x-kvferry-fetched-from"
KEYS = f"""
    - {{name: one, tenant: alice, hash: '{hash_text("kvf_alice")}'}}
    - {{name: two, tenant: bob, hash: '{hash_text("kvf_bob")}'}}
"""
PARTS = "store: {min_tokens: 64}\npolicy: {reuse_probability: 1.0}\n"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path) -> None:
    (tmp_path / "cold").mkdir(mode=0o700)


@pytest.fixture
async def s3(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3Server]:
    for name, value in S3_KEYS.items():
        monkeypatch.setenv(name, value)
    async with S3Server.started() as server:
        yield server


def ids_of(answer: Answer) -> list[int]:
    return [int(token) for token in answer.json["tokens"]]


async def until_copied(kvferry: RunningRouter, at_least: int = 1) -> Json:
    """Wait until all snapshots have been copied."""
    await kvferry.until_quiet()

    def copied(state: Json) -> bool:
        cold = state["snapshots"]["cold"]
        return cold["copied"] >= at_least and not cold["waiting"]

    return await kvferry.until(copied)


async def until_known(kvferry: RunningRouter) -> None:
    """Wait until a router knows of the states in the tier."""
    await kvferry.until(lambda state: state["snapshots"]["cold"]["states"] > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["directory", "s3"])
async def test_a_conversation_outlives_its_host(
    llama_server: StartServer, tmp_path: Path, s3: S3Server, kind: str, place: str
) -> None:
    """Token for token, for each kind of memory, on a server with another number of slots."""
    key = tmp_path / "key"
    key.write_bytes(os.urandom(48))
    where = f"url: '{tmp_path}/cold'" if place == "directory" else f"{s3.yaml}, key_file: '{key}'"
    yaml = f"{PARTS}cold: {{{where}, after: 0}}"
    options: Json = {"n_predict": 16, "return_tokens": True, "ignore_eos": True}
    one = await llama_server(kind, slots=2, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(kind, slots=1, kv_dir=tmp_path / "b", ctx=8192)
    async with running([("a", one.url)], one.kv_dir, yaml=yaml) as kvferry:
        first = await kvferry.complete(LONG, **options)
        await until_copied(kvferry)
        turn = [*LONG, *ids_of(first), *ids(3, 40)]
        stayed = await kvferry.complete(turn, **options)
    async with running([("b", other.url)], other.kv_dir, yaml=yaml) as kvferry:
        await until_known(kvferry)
        moved = await kvferry.complete(turn, **options)

        assert moved.headers[FROM] == "cold tier"
        assert ids_of(moved) == ids_of(stayed)
        assert moved.cached >= 0.95 * len(LONG)


async def test_a_store_that_hangs_costs_one_request_a_deadline(
    llama_server: StartServer, tmp_path: Path, s3: S3Server
) -> None:
    """It is asked for nothing more until it answers again; all requests are served."""
    yaml = f"{PARTS}cold: {{{s3.yaml}, after: 0}}"
    one = await llama_server(slots=2, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(slots=2, kv_dir=tmp_path / "b", ctx=16384)
    prompts = [ids(seed, 2500) for seed in range(3)]
    async with running([("a", one.url)], one.kv_dir, yaml=yaml) as kvferry:
        for prompt in prompts:
            await kvferry.complete(prompt)
        await until_copied(kvferry, 3)
    async with running([("b", other.url)], other.kv_dir, yaml=yaml) as kvferry:
        await until_known(kvferry)
        s3.pause()
        for prompt in prompts:
            answer = await kvferry.complete([*prompt, *ids(9, 20)])
            assert answer.status == 200
            assert FROM not in answer.headers
        failed = 'kvferry_fetches_total{peer="cold tier",result="failed"}'
        assert (await kvferry.metrics())[failed] == 1
        assert (await kvferry.state())["snapshots"]["cold"]["problem"] != ""
        s3.go_on()


async def test_a_store_that_lost_all_is_filled_again(
    llama_server: StartServer, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.store.cold.tier._LISTED_S", 0.2)
    monkeypatch.setattr("router.store.cold.tier._AGAIN_S", 0.2)
    yaml = f"{PARTS}cold: {{{s3.yaml}, after: 0}}"
    one = await llama_server(slots=1, kv_dir=tmp_path / "a", ctx=16384)
    async with running([("a", one.url)], one.kv_dir, yaml=yaml) as kvferry:
        await kvferry.complete(LONG)
        await until_copied(kvferry)
        await s3.kill()
        await kvferry.until(lambda state: bool(state["snapshots"]["cold"]["problem"]))
        assert (await kvferry.complete(ids(2, 500))).status == 200
        await s3.start()
        await until_copied(kvferry, 2)
        state = await kvferry.state()
        assert state["snapshots"]["cold"]["problem"] == ""


async def test_a_front_without_servers_has_its_host_fetch(
    llama_server: StartServer, tmp_path: Path
) -> None:
    """The front cannot read the prompt, and knows nothing of the tier's states."""
    yaml = f"{PARTS}cold: {{url: '{tmp_path}/cold', after: 0}}"
    one = await llama_server(slots=1, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(slots=1, kv_dir=tmp_path / "b", ctx=16384)
    async with running([("a", one.url)], one.kv_dir, yaml=yaml) as kvferry:
        await kvferry.complete(LONG)
        await until_copied(kvferry)
    async with hosts([other], [], yaml=yaml) as (host, front):
        await until_known(host)
        moved = await front.complete([*LONG, *ids(3, 40)])

        assert moved.headers[HOST] == "h0"
        assert moved.headers[FROM] == "cold tier"
        assert moved.cached >= 0.99 * len(LONG)


async def test_a_host_that_has_the_beginning_fetches_the_rest(
    llama_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host of the fleet has more than its own snapshots, and the tier has most."""
    # After one request the tiny model is known to compute the prompt nearly as soon.
    monkeypatch.setattr("router.web.fleet.cold._ASKING_S", 0.001)
    yaml = f"{PARTS}cold: {{url: '{tmp_path}/cold', after: 0}}"
    one = await llama_server(slots=1, kv_dir=tmp_path / "a", ctx=16384)
    other = await llama_server(slots=1, kv_dir=tmp_path / "b", ctx=16384)
    async with running([("a", one.url)], one.kv_dir, yaml=yaml) as kvferry:
        await kvferry.complete(LONG)
        await until_copied(kvferry)
    async with hosts([other], [], yaml=yaml) as (host, _):
        await until_known(host)
        await host.complete([*LONG[:200], *ids(8, 20)])
        await host.until_quiet()
        moved = await host.complete([*LONG, *ids(3, 40)])

        assert moved.headers[FROM] == "cold tier"
        assert moved.cached >= 0.99 * len(LONG)


async def test_hosts_of_a_fleet_share_what_a_lost_one_had(
    llama_server: StartServer, tmp_path: Path
) -> None:
    yaml = f"{PARTS}cold: {{url: '{tmp_path}/cold', after: 0}}"
    servers = [
        await llama_server(slots=1, kv_dir=tmp_path / name, ctx=16384) for name in ("a", "b", "c")
    ]
    async with running([("a", servers[0].url)], servers[0].kv_dir, yaml=yaml) as kvferry:
        await kvferry.complete(LONG)
        await until_copied(kvferry)
    async with hosts([servers[1]], [servers[2]], yaml=yaml) as both:
        for host in both:
            await until_known(host)
        first = await both[0].complete([*LONG, *ids(3, 40)])
        explained = await both[0].get(f"/kvferry/requests/{first.headers['x-kvferry-request-id']}")
        holder = both[int(first.headers[HOST][1])]
        await holder.until_quiet()
        second = await both[1].complete([*LONG, *ids(4, 40)])

        assert first.headers[FROM] == "cold tier"
        assert first.cached >= 0.99 * len(LONG)
        assert second.cached >= 0.99 * len(LONG)
        assert explained.status == 200


async def test_a_tenant_is_purged_everywhere_and_who_is_down_is_named(
    llama_server: StartServer, tmp_path: Path
) -> None:
    yaml = f"{PARTS}cold: {{url: '{tmp_path}/cold', after: 0}}\nauth:\n  keys:{KEYS}"
    servers = [await llama_server(slots=2, kv_dir=tmp_path / name, ctx=16384) for name in "ab"]
    ports = [free_port() for _ in range(3)]

    def as_(who: str) -> Json:
        return {"headers": {"authorization": f"Bearer kvf_{who}"}}

    async with AsyncExitStack() as stack:
        both = [
            await stack.enter_async_context(
                host(at, [server], fleet_yaml(at, ports, None, None), yaml)
            )
            for at, server in enumerate(servers)
        ]
        for kvferry in both:
            for who in ("alice", "bob"):
                body = {"prompt": LONG, "n_predict": 4}
                assert (await kvferry.post("/completion", body, **as_(who))).status == 200
        await both[0].until(
            lambda state: any(peer["name"] == "h1" for peer in state["hosts"]["peers"])
        )
        await both[0].until(lambda _: len(states(tmp_path)) == 2)  # one of each tenant
        wanted = {"tenant": "alice", "everywhere": True}
        told = (await both[0].post("/kvferry/snapshots/purge", wanted)).json
        reached = {one["holder"]: one for one in told["elsewhere"]}
        rows = [(await kvferry.get("/kvferry/snapshots")).json["snapshots"] for kvferry in both]

        assert reached["h1"]["problem"] is None
        assert reached["cold tier"]["problem"] is None
        assert reached["cold tier"]["count"] > 0
        (down,) = (one for name, one in reached.items() if name not in ("h1", "cold tier"))
        assert down["problem"] is not None
        assert {row["tenant"] for row in [*rows[0], *rows[1]]} == {"bob"}
        assert {path.parent.parent.name for path in states(tmp_path)} == {
            Names(b"kvferry cold tier").tenant(Tenant("bob"))
        }


def states(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cold" / "states").rglob("*") if path.is_file()]
