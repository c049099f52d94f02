"""KV computed for one tenant is computed again for another, by the servers' counters."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.base.api_keys import hash_text
from router.base.errors import BackendRefusedError
from router.llama.client import LlamaClient
from tests.conftest import StartServer
from tests.support.conversations.conversing import all_but_one, saved
from tests.support.conversations.prompts import chat, ids
from tests.support.servers.llama_server import LlamaServer
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

pytestmark = pytest.mark.thorough

LONG = 600
SLOW = pytest.mark.slow
ALICE, BOB = "alice", "bob"
KEYS = f"""
    - {{name: one, tenant: alice, hash: '{hash_text("kvf_alice")}'}}
    - {{name: two, tenant: bob, hash: '{hash_text("kvf_bob")}'}}
"""
# A prompt of 1 ms or more is prefilled first, and shared with all requests that wait for it.
APART = f"auth:\n  keys:{KEYS}\npolicy: {{coalesce_above: 1ms}}"
TOGETHER = f"auth:\n  share_cache: all\n  keys:{KEYS}"


class Tenants:
    """Requests of tenants, and the tokens that all servers together computed for them."""

    def __init__(self, kvferry: RunningRouter, servers: Sequence[LlamaServer]) -> None:
        self.kvferry, self._servers = kvferry, servers

    async def complete(self, who: str, prompt: list[int], **more: object) -> Answer:
        body = {"prompt": prompt, "n_predict": 4, "temperature": 0} | more
        return await self.ask(who, "/completion", body)

    async def message(self, who: str, messages: list[Json]) -> Answer:
        system, rest = messages[0]["content"], messages[1:]
        body = {"model": "x", "max_tokens": 4, "system": system, "messages": rest}
        return await self.ask(who, "/v1/messages", body)

    async def ask(self, who: str, path: str, body: Json) -> Answer:
        """Send a request with the key as OpenAI's or Anthropic's clients send it."""
        given = {"x-api-key": f"kvf_{who}"}
        if path != "/v1/messages":
            given = {"authorization": f"Bearer kvf_{who}"}
        answer = await self.kvferry.post(path, body, headers=given)
        assert answer.status == 200, answer.body
        return answer

    async def cost(self, *asked: Awaitable[Answer]) -> int:
        """Return the prompt tokens computed for requests, by the servers' counters."""
        await self.kvferry.until_quiet()
        before = await self._computed()
        await asyncio.gather(*asked)
        await self.kvferry.until_quiet()
        return await self._computed() - before

    async def _computed(self) -> int:
        total = 0
        for server in self._servers:
            async with self.kvferry.session.get(f"{server.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            (line,) = [x for x in lines if x.startswith("llamacpp:prompt_tokens_total ")]
            total += round(float(line.split()[1]))
        return total


@asynccontextmanager
async def tenants(
    servers: Sequence[LlamaServer], *, yaml: str = APART, kv_dir: Path | None = None
) -> AsyncIterator[Tenants]:
    backends = [(f"s{at}", server.url) for at, server in enumerate(servers)]
    async with running(backends, kv_dir or servers[0].kv_dir, yaml=yaml) as kvferry:
        yield Tenants(kvferry, servers)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=SLOW), "lfm2"])
async def test_the_same_slot(llama_server: StartServer, kind: str) -> None:
    server = await llama_server(kind, slots=1)
    prompt = ids(1, LONG)
    async with tenants([server]) as two:
        first = await two.complete(ALICE, prompt)
        assert await two.cost(two.complete(BOB, prompt)) == LONG
        # A tenant's own KV is still reused, from a snapshot: the slot went to the other tenant.
        again = await two.complete(ALICE, [*prompt, 300])
        assert again.cached >= LONG - 1
        assert again.source == "snapshot"
        assert (await two.complete(BOB, prompt)).text == first.text


async def test_another_slot(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=2)
    prompt = ids(1, LONG)
    async with tenants([server]) as two:
        await two.complete(ALICE, prompt, id_slot=0)
        await two.kvferry.until(saved(LONG))
        assert await two.cost(two.complete(BOB, prompt, id_slot=1)) == LONG
        await two.kvferry.until(saved(LONG, count=2))
        assert await two.cost(two.complete(BOB, prompt, id_slot=0)) < LONG  # bob's own


async def test_another_server_and_another_router(llama_server: StartServer) -> None:
    """The record of a snapshot names its tenant."""
    servers = [await llama_server("llama", slots=1) for _ in range(2)]
    prompt = ids(1, LONG)
    async with tenants(servers) as two:
        where = (await two.complete(ALICE, prompt)).slot[0]
        await two.kvferry.until(saved(LONG))
        await two.kvferry.operate(where, "drain")
        await two.kvferry.until_is(where, "drained")
        assert await two.cost(two.complete(BOB, prompt)) == LONG
        await two.kvferry.until(saved(LONG, count=2))
    async with tenants(servers) as two:
        state = await two.kvferry.state()
        assert {item["tenant"] for item in state["snapshots"]["items"]} == {ALICE, BOB}
        assert all_but_one(await two.complete(ALICE, prompt))
        assert all_but_one(await two.complete(BOB, prompt))


async def test_after_a_restart_another_gets_nothing(llama_server: StartServer) -> None:
    servers = [await llama_server("llama", slots=1)]
    prompt = ids(1, LONG)
    async with tenants(servers) as two:
        await two.complete(ALICE, prompt)
        await two.kvferry.until(saved(LONG))
    async with tenants(servers) as two:
        assert await two.cost(two.complete(BOB, prompt)) == LONG


async def test_at_the_same_moment(llama_server: StartServer) -> None:
    """For each tenant, one request computes the prompt for all requests of the tenant."""
    servers = [await llama_server("llama", slots=2) for _ in range(2)]
    prompt = ids(1, 4 * LONG)
    async with tenants(servers) as two:
        asked = [two.complete(who, prompt) for who in (ALICE, BOB, ALICE, BOB)]
        cost = await two.cost(*asked)
        assert 2 * len(prompt) <= cost <= 2 * len(prompt) + 8


@pytest.mark.parametrize("slots", [pytest.param(1, marks=SLOW), 2, pytest.param(3, marks=SLOW)])
async def test_where_the_server_picks_the_slot(llama_server: StartServer, slots: int) -> None:
    server = await llama_server("llama", slots=slots, ctx=4096 * slots)
    talk = chat(1, "Where does the ferry go?", length=30)
    async with tenants([server]) as two:
        cold = await two.cost(two.message(ALICE, talk))
        assert cold > LONG
        assert await two.cost(two.message(BOB, talk)) == cold
        assert await two.cost(two.message(ALICE, talk)) < cold  # alice's own
        other = chat(2, "Where does the ferry go?", length=30)
        alone = await two.cost(two.message(ALICE, other))
        purged = await two.kvferry.post("/kvferry/snapshots/purge", {"all": True})
        assert purged.status == 200, purged.body
        third = chat(3, "Where does the ferry go?", length=30)
        both = await two.cost(*(two.message(who, third) for who in (ALICE, BOB, BOB)))
        assert abs(both - 2 * alone) < 100, "three at once, two tenants"


async def test_what_slots_held_before_the_router_came(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=2)
    prompt = ids(1, LONG)
    backends = [("s0", server.url)]
    async with running(backends, None) as kvferry:  # a router without keys
        await kvferry.complete(prompt)
        await kvferry.complete(prompt, id_slot=1)
    async with tenants([server]) as two:
        for at in range(2):
            one = ids(1, LONG - at)  # not as long as the prompt before
            assert await two.cost(two.complete((ALICE, BOB)[at], one, id_slot=at)) == LONG - at


async def test_a_server_that_erases_nothing(
    llama_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that cannot be erased is filled with something else.

    Without --slot-save-path llama-server answers 501, but not the wheel's build: the test stops the
    call on its way.
    """
    call = LlamaClient._call

    async def refuses(
        self: LlamaClient, method: str, path: str, *more: Any, **options: Any
    ) -> bytes:
        if path.endswith("action=erase"):
            raise BackendRefusedError("no slot actions", backend_status=501)
        return await call(self, method, path, *more, **options)

    monkeypatch.setattr(LlamaClient, "_call", refuses)
    server, prompt = await llama_server("llama", slots=1), ids(1, LONG)
    async with running([("s0", server.url)], None, yaml=APART) as kvferry:
        two = Tenants(kvferry, [server])
        await two.complete(ALICE, prompt)
        assert (await two.complete(BOB, prompt)).cached == 0
        assert all_but_one(await two.complete(BOB, prompt))


async def test_where_sharing_is_allowed(llama_server: StartServer) -> None:
    server = await llama_server("llama", slots=2)
    prompt, talk = ids(1, LONG), chat(1, "Where does the ferry go?", length=30)
    async with tenants([server], yaml=TOGETHER) as two:
        await two.complete(ALICE, prompt)
        assert all_but_one(await two.complete(BOB, prompt))
        cold = await two.cost(two.message(ALICE, talk))
        assert await two.cost(two.message(BOB, talk)) < cold


@pytest.mark.parametrize("ram", ["0", "100"])
async def test_a_server_that_mixes_tenants_is_told_of(
    llama_server: StartServer, ram: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = await llama_server("llama", slots=1, extra_args=("--cache-ram", ram))
    async with tenants([server]) as two:
        (backend,) = (await two.kvferry.state())["backends"]
        assert backend["ram_cache"] == (ram != "0")
    assert ("backend_mixes_tenants" in capsys.readouterr().out) == (ram != "0")


async def test_salts_of_one_tenant_share_nothing(llama_server: StartServer) -> None:
    """Each `cache_salt` is a tenant of its own; a purge of the tenant reaches them all."""
    server = await llama_server("llama", slots=2)
    prompt = ids(1, LONG)
    async with tenants([server]) as two:
        for told in ({"cache_salt": "one"}, {"cache_salt": "two"}, {}):
            assert await two.cost(two.complete(ALICE, prompt, **told)) == LONG
        assert await two.cost(two.complete(BOB, prompt, cache_salt="one")) == LONG
        again = await two.complete(ALICE, [*prompt, 300], cache_salt="one")
        assert again.cached >= LONG - 1
        await two.kvferry.until(lambda state: state["snapshots"]["count"] >= 3)
        done = await two.kvferry.post("/kvferry/snapshots/purge", {"tenant": ALICE})
        assert done.status == 200, done.body
        left = (await two.kvferry.state())["snapshots"]["items"]
        assert {item["tenant"].split("~")[0] for item in left} <= {BOB}
