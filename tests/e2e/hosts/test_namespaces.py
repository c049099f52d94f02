"""Hosts as network namespaces, with mutual TLS and links of 1 Gbit/s (`make test-hosts`)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest

from tests.support.conversations.prompts import ids
from tests.support.files.small_blobs import PROGRAM
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.hosts import HOST, until_peers
from tests.support.servers.namespaces import NetHost, net_hosts
from tests.support.servers.router_process import Elsewhere
from tests.support.servers.running_router import RunningRouter

pytestmark = [pytest.mark.slow, pytest.mark.hosts]

LONG = ids(1, 1500)
BYTES_PER_TOKEN = 1040  # of a state of the tiny llama
REST = 60_000  # bytes: the cells of all tokens, the manifest, TLS, the question, the answer


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True)
    ) as made:
        yield made


def clients(hosts: Sequence[NetHost], session: aiohttp.ClientSession) -> list[RunningRouter]:
    return [Elsewhere(host.url, None, session) for host in hosts]  # type: ignore[arg-type]


async def until_ready(routers: Sequence[RunningRouter], *names: str) -> None:
    """Wait until every host serves and knows all others."""
    for kvferry in routers:
        await kvferry.until_up()
    for kvferry in routers:
        await until_peers(kvferry, *names)


@pytest.mark.parametrize("with_redis", [False, True], ids=["peers", "redis"])
async def test_requests_go_where_their_tokens_are(
    server_argv: list[str], session: aiohttp.ClientSession, tmp_path: Path, with_redis: bool
) -> None:
    model = tiny_model("llama").path
    async with net_hosts(tmp_path, server_argv, model, 2, fronts=1, with_redis=with_redis) as hosts:
        routers = clients(hosts[:3], session)
        await until_ready(routers, "n0", "n1", "n2")
        first = await routers[0].complete(LONG)
        answers = [await kvferry.complete([*LONG, *ids(9, 20)]) for kvferry in routers]

        assert [answer.status for answer in answers] == [200] * 3
        assert {answer.headers[HOST] for answer in answers} == {first.headers[HOST]}
        assert all(answer.cached >= len(LONG) - 1 for answer in answers)


async def test_a_cut_network_is_two_fleets(
    server_argv: list[str], session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Each side serves with what it has; after the cut is healed nothing has to be merged."""
    model = tiny_model("llama").path
    async with net_hosts(tmp_path, server_argv, model, 3, with_redis=False) as hosts:
        routers = clients(hosts, session)
        await until_ready(routers, "n0", "n1", "n2")
        held = await routers[2].complete(LONG)
        assert held.status == 200
        hosts[2].cut()
        async with asyncio.timeout(60):
            answers = await asyncio.gather(
                *(kvferry.complete([*LONG, *ids(9, 20)]) for kvferry in routers[:2])
            )
        assert [answer.status for answer in answers] == [200, 200]
        assert {answer.headers[HOST] for answer in answers} <= {"n0", "n1"}
        for kvferry in routers[:2]:
            await until_peers(kvferry, "n0", "n1")
        hosts[2].heal()
        await until_ready(routers, "n0", "n1", "n2")
        again = await routers[2].complete([*LONG, *ids(9, 20)])

        assert again.status == 200
        assert again.cached >= len(LONG) - 1


async def test_a_host_that_loses_power_costs_no_request(
    server_argv: list[str], session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    model = tiny_model("llama").path
    async with net_hosts(tmp_path, server_argv, model, 2, fronts=1) as hosts:
        routers = clients(hosts[:3], session)
        await until_ready(routers, "n0", "n1", "n2")
        for prompt in (LONG, ids(2, 1500)):
            await routers[0].complete(prompt)
        await hosts[0].kill_all()
        prompts: list[list[int]] = [[*LONG, n] for n in range(4)]
        answers = await asyncio.gather(*(routers[2].complete(prompt) for prompt in prompts))

        assert [answer.status for answer in answers] == [200] * 4
        assert {answer.headers[HOST] for answer in answers} == {"n1"}


async def test_only_what_is_missing_travels(
    server_argv: list[str], session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """A conversation moves to the next host with each turn, over links of 1 Gbit/s with TLS."""
    model = tiny_model("llama").path
    made = net_hosts(tmp_path, server_argv, model, 2, with_redis=False, program=PROGRAM)
    async with made as hosts:
        routers = clients(hosts, session)
        await until_ready(routers, "n0", "n1")
        prompt = ids(4, 1500)
        answer = await routers[0].complete(prompt)
        at = int(answer.headers[HOST][1])
        for turn in range(2):
            await routers[at].until_quiet()
            await hosts[at].operate("fleet", "drain")
            await routers[at].until_is(f"n{at}-0", "drained", "gone")
            await routers[1 - at].until(lambda state: not state["hosts"]["peers"][0]["models"])
            held = len(prompt)
            before = hosts[1 - at].received_bytes
            answer = await routers[1 - at].complete([*prompt, *ids(10 + turn, 20)])
            travelled = hosts[1 - at].received_bytes - before

            assert answer.status == 200
            assert answer.headers["x-kvferry-fetched-from"] == f"n{at}"
            assert answer.cached >= 0.99 * held
            new = held if turn == 0 else 1200 + 16  # and the rows that were in no blob there
            assert travelled <= 1.02 * new * BYTES_PER_TOKEN + REST
            prompt += ids(20 + turn, 1200)  # computed where it is now
            answer = await routers[1 - at].complete(prompt)
            assert answer.headers[HOST] == f"n{1 - at}"
            await hosts[at].operate("fleet", "undrain")
            await until_ready(routers, "n0", "n1")
            at = 1 - at
