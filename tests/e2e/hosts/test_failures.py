"""What happens when a part of the fleet fails: the table of docs/hosts.md, a test for each row."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from router.servers.program import free_port
from router.web.api import completions
from router.web.fleet.forwarding import Forwarding
from tests.conftest import StartServer
from tests.support.conversations.prompts import Json, ids
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.hosts import HOST, Addressed, fleet_yaml, host, hosts, until_peers
from tests.support.servers.redis_server import RedisServer

pytestmark = pytest.mark.thorough

LONG = ids(1, 1500)
TEXT = "a long prompt that several hosts may hold. " * 60
HELD = {"prompt": TEXT, "n_predict": 4}


@pytest.fixture
async def redis_server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with RedisServer.started(tmp_path) as server:
        yield server


async def test_a_kvferry_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    """The front has seen it up a moment ago, and it held the prompt."""
    async with FakeLlama(kv_dir=tmp_path / "a") as one, FakeLlama(kv_dir=tmp_path / "b") as two:
        ports = [free_port() for _ in range(3)]
        sections = [fleet_yaml(at, ports) for at in range(3)]
        async with AsyncExitStack() as others:
            async with host(1, [two], sections[1]) as b:
                await b.post("/completion", HELD)  # while it is alone
                a = await others.enter_async_context(host(0, [one], sections[0]))
                front = await others.enter_async_context(host(2, [], sections[2]))
                await until_peers(front, "h0", "h1")
                assert (await front.post("/completion", HELD)).headers[HOST] == "h1"
            answers = [await front.post("/completion", HELD) for _ in range(3)]

            assert [answer.status for answer in answers] == [200] * 3
            assert {answer.headers[HOST] for answer in answers} == {"h0"}
            await until_peers(front, "h0")
            await until_peers(a, "h2")


async def test_it_is_used_again_when_it_is_back(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake:
        ports = [free_port(), free_port()]
        sections = [fleet_yaml(at, ports) for at in range(2)]
        async with (
            host(1, [], sections[1], no_backend_s=60.0) as front,
            asyncio.TaskGroup() as group,
        ):
            waiting = group.create_task(front.post("/completion", HELD))
            async with host(0, [fake], sections[0]):
                answer = await waiting

    assert answer.status == 200
    assert answer.headers[HOST] == "h0"


@pytest.mark.parametrize("named", [{}, {"model": "what-a-client-calls-it"}])
async def test_requests_of_a_host_whose_server_died_go_elsewhere(
    tmp_path: Path, named: Json
) -> None:
    """A host with one model takes any name for it, as llama-server does."""
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two]) as (a, b),
    ):
        await one.go_down()
        asked = HELD | named
        answers = await asyncio.gather(*(a.post("/completion", asked) for _ in range(4)))

        assert [answer.status for answer in answers] == [200] * 4
        assert {answer.headers[HOST] for answer in answers} == {"h1"}
        assert (await b.post("/completion", HELD)).status == 200


async def test_what_waits_for_a_server_goes_to_a_host_that_comes_up(tmp_path: Path) -> None:
    """Both hosts have just been started, and one of them has no server yet."""
    ports = [free_port() for _ in range(2)]
    first, second = (fleet_yaml(at, ports) for at in range(2))
    nothing = Addressed(f"http://127.0.0.1:{free_port()}")
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        AsyncExitStack() as later,
        host(0, [nothing], first, wait_for=(), no_backend_s=3600.0) as a,
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(a.post("/completion", HELD))
        await a.until(lambda state: state["waiting_for_backend"] == 1)
        await later.enter_async_context(host(1, [fake], second))
        answer = await asked
        assert answer.status == 200
        assert answer.headers[HOST] == "h1"


async def test_what_waits_for_a_server_is_not_lost_to_a_busy_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host refuses it three times; then the own server comes up."""
    ports, at = [free_port() for _ in range(2)], free_port()
    first, second = (fleet_yaml(at, ports) for at in range(2))
    refused = asyncio.Semaphore(0)

    async def refuse(*_: object) -> None:
        refused.release()

    monkeypatch.setattr(Forwarding, "_sent_unread", refuse)
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        AsyncExitStack() as later,
        host(0, [Addressed(f"http://127.0.0.1:{at}")], first, wait_for=(), no_backend_s=60.0) as a,
        asyncio.TaskGroup() as group,
    ):
        asked = group.create_task(a.post("/completion", HELD))
        await a.until(lambda state: state["waiting_for_backend"] == 1)
        await later.enter_async_context(host(1, [fake], second))
        for _ in range(4):  # it has gone on after three
            await refused.acquire()
        await later.enter_async_context(FakeLlama(port=at))
        # Its own server reads it; of two idle hosts either may serve it then.
        assert (await asked).status == 200


@pytest.mark.parametrize("end", ["drain", "dies"])
async def test_what_is_queued_leaves_a_host_without_a_server(tmp_path: Path, end: str) -> None:
    """Alone, its host would wait for the backend to come up again."""
    ports = [free_port() for _ in range(2)]
    first, second = (fleet_yaml(at, ports) for at in range(2))
    async with (
        FakeLlama(kv_dir=tmp_path / "a", n_slots=1) as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        AsyncExitStack() as later,
        host(0, [one], first, no_backend_s=3600.0) as a,
        asyncio.TaskGroup() as group,
    ):
        one.prefill_gate.clear()
        running = group.create_task(a.post("/completion", HELD))
        await a.until(lambda state: any(slot["request"] for slot in state["slots"]))
        queued = group.create_task(a.post("/completion", HELD | {"prompt": f"another: {TEXT}"}))
        await a.until(lambda state: len(state["queue"]) == 1)
        await later.enter_async_context(host(1, [two], second))
        await until_peers(a, "h1")
        if end == "drain":
            await a.operate("h0-0", "drain")
        else:
            await one.go_down()
        answer = await queued
        assert (answer.status, answer.headers[HOST]) == (200, "h1")
        one.prefill_gate.set()
        await running


async def test_what_only_others_can_serve_survives_stale_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prices may rise between each quote and the request, as on a busy machine."""
    monkeypatch.setattr(completions, "is_stale", lambda *_: True)
    async with (
        FakeLlama(kv_dir=tmp_path / "a", n_slots=1) as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two]) as (a, _),
        asyncio.TaskGroup() as group,
    ):
        one.prefill_gate.clear()
        running = group.create_task(a.post("/completion", HELD | {"prompt": f"another: {TEXT}"}))
        await a.until(lambda state: any(slot["request"] for slot in state["slots"]))
        queued = group.create_task(a.post("/completion", HELD))
        await a.until(lambda state: len(state["queue"]) == 1)
        await a.operate("h0-0", "drain")
        answer = await queued
        assert (answer.status, answer.headers[HOST]) == (200, "h1")
        one.prefill_gate.set()
        await running


async def test_a_client_that_leaves_cancels_across_the_hop(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], []) as (a, front):
        fake.prefill_gate.clear()
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(front.post("/completion", HELD | {"stream": True}))
            await a.until(lambda state: any(s["request"] for s in state["slots"]))
            leaving.cancel()
        await a.until(lambda state: not any(s["phase"] == "running" for s in state["slots"]))
        fake.prefill_gate.set()
        await a.until_quiet()


async def test_a_host_is_not_limited_as_one_client(tmp_path: Path) -> None:
    """It has the connections of all its clients."""
    yaml = "limits: {connections_per_client: 2}"
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        hosts([fake], [], yaml=yaml) as (a, _),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        AsyncExitStack() as held,
    ):
        there = a.router.hosts
        assert there is not None
        url = f"{there.address.url}/peer/hello"
        found = [await held.enter_async_context(session.get(url)) for _ in range(20)]
        assert [response.status for response in found] == [200] * 20


async def test_a_front_takes_any_name_where_all_have_one_model(tmp_path: Path) -> None:
    """The client's name goes into no header: it may hold a line break."""
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], []) as (_, front):
        asked = [HELD | {"model": name} for name in ("a\nb", "x" * 20_000, "ü", "m")]
        answers = await asyncio.gather(*(front.post("/completion", body) for body in asked))

        assert [answer.status for answer in answers] == [200] * 4
        assert (await front.state())["hosts"]["peers"][0]["failed"] == 0


async def test_model_of_a_lost_host_is_not_replaced_by_another(tmp_path: Path) -> None:
    """Its requests wait; the host with the client has one other model, and takes any other name."""
    ports = [free_port(), free_port()]
    sections = [fleet_yaml(at, ports) for at in range(2)]
    async with (
        FakeLlama(kv_dir=tmp_path / "a", model="one") as one,
        FakeLlama(kv_dir=tmp_path / "b", model="two") as two,
        host(0, [one], sections[0], no_backend_s=0.5) as a,
    ):
        async with host(1, [two], sections[1]):
            await until_peers(a, "h1")
            await a.until(lambda state: bool(state["hosts"]["peers"][0]["models"]))
            there = await a.post("/completion", HELD | {"model": "two"})
        await until_peers(a)
        gone = await a.post("/completion", HELD | {"model": "two"})
        here = await a.post("/completion", HELD | {"model": "what-a-client-calls-it"})

    assert (there.status, there.headers[HOST]) == (200, "h1")
    assert gone.status == 503
    assert (here.status, here.headers[HOST]) == (200, "h0")


async def test_a_prompt_that_breaks_every_host_is_refused(tmp_path: Path) -> None:
    """It is not sent again and again: each time it may be what ends a server."""
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two], []) as (_, _b, front),
    ):
        one.faults.die_at_once = two.faults.die_at_once = True
        answer = await front.post("/completion", HELD)

        assert answer.status == 503
        assert "ended 2 times" in answer.json["error"]["message"]
        one.faults.die_at_once = two.faults.die_at_once = False
        other = HELD | {"n_predict": 2}
        assert (await front.post("/completion", other)).status == 200


async def test_the_clients_of_a_host_that_stops_are_served_by_others(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two]) as (a, _),
    ):
        one.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(a.complete("short"))
            await a.until(lambda state: any(s["phase"] == "running" for s in state["slots"]))
            stopping = group.create_task(a.router.stop())
            answer = await a.complete("another")
            one.decode_gate.set()
        await stopping

        assert running.result().headers[HOST] == "h0"
        assert answer.status == 200
        assert answer.headers[HOST] == "h1"


async def test_a_stop_waits_for_forwarded_answers(tmp_path: Path) -> None:
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], []) as (a, front):
        fake.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(front.complete("x", stream=True))
            await a.until(lambda state: any(s["request"] for s in state["slots"]))
            stopping = group.create_task(front.router.stop())
            await front.until(lambda state: not stopping.done() and bool(state))
            fake.decode_gate.set()
        assert running.result().status == 200
        assert running.result().events[-1]["stop"]


async def test_a_stop_ends_although_clients_go_on_asking(tmp_path: Path) -> None:
    """It says that it stops, and forwards nothing new at its end."""
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two]) as (a, _),
    ):
        await a.post("/completion", HELD)

        async def asking() -> None:
            while (await a.post("/completion", HELD)).status == 200:
                pass

        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(asking()) for _ in range(3)]
            await a.router.stop()
        assert all(client.done() for client in clients)
        assert (await a.get("/kvferry/health")).json["status"] == "stopping"


async def test_an_answer_is_controlled_from_any_door(tmp_path: Path) -> None:
    """The server answers that it knows no such answer: it was asked, through two doors."""
    async with FakeLlama(kv_dir=tmp_path) as fake, hosts([fake], []) as (_, front):
        await front.post("/v1/chat/completions/control", {"id": "x", "action": "stop"})
        assert ("POST", "/v1/chat/completions/control") in fake.seen


async def test_an_answer_of_another_model_is_controlled_as_well(tmp_path: Path) -> None:
    """Its id alone is named, not its model."""
    async with (
        FakeLlama(kv_dir=tmp_path / "a", model="one") as one,
        FakeLlama(kv_dir=tmp_path / "b", model="two") as two,
        hosts([one], [two]) as (a, _),
    ):
        await a.post("/v1/chat/completions/control", {"id": "x", "action": "stop"})
        assert ("POST", "/v1/chat/completions/control") in two.seen


async def test_a_host_that_is_stopping_gets_nothing_new(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two], []) as (a, _, front),
    ):
        await a.post("/completion", HELD)
        await a.router.stop()
        answer = await front.post("/completion", HELD)

        assert answer.status == 200
        assert answer.headers[HOST] == "h1"


async def test_a_drained_host_is_a_front_door(tmp_path: Path) -> None:
    async with (
        FakeLlama(kv_dir=tmp_path / "a") as one,
        FakeLlama(kv_dir=tmp_path / "b") as two,
        hosts([one], [two]) as (a, _),
    ):
        await a.operate("h0-0", "drain")
        await a.until_is("h0-0", "drained")
        answer = await a.post("/completion", HELD)

        assert answer.status == 200
        assert answer.headers[HOST] == "h1"


async def test_the_directory_may_stop_while_hosts_serve(
    llama_server: StartServer, tmp_path: Path, redis_server: RedisServer
) -> None:
    one = await llama_server(slots=2, kv_dir=tmp_path / "a")
    other = await llama_server(slots=2, kv_dir=tmp_path / "b")
    async with hosts([one], [other], [], redis=redis_server.url) as (a, _, front):
        holder = (await a.complete(LONG)).headers[HOST]
        redis_server.pause()
        paused = await front.complete([*LONG, 5])
        redis_server.go_on()
        await redis_server.kill()
        killed = await front.complete([*LONG, 6])
        await front.until(lambda state: not state["hosts"]["directory"]["up"])
        later = await front.complete([*LONG, 7])
        await redis_server.start()
        await front.until(lambda state: bool(state["hosts"]["directory"]["up"]))
        again = await front.complete([*LONG, 8])

        for answer in (paused, killed, later, again):
            assert answer.status == 200
            assert answer.headers[HOST] == holder
            assert answer.cached >= len(LONG) - 1


async def test_host_without_the_directory_is_found_by_its_peers(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Redis loses everything: members that others know stay members."""
    async with (
        FakeLlama(kv_dir=tmp_path) as fake,
        hosts([fake], [], redis=redis_server.url) as (_, front),
    ):
        await redis_server.empty()
        assert (await front.post("/completion", HELD)).headers[HOST] == "h0"
