"""Many clients at once, of every kind: their cost is bounded, and nothing is left of them."""

import asyncio
import io
import json
import os
import threading
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench.crowd import Client, connects, send
from router.engine.loop_throttle import MOST
from router.llama.json_offload import LONG_BYTES
from router.llama.wire import parse_completion
from router.web import app
from router.web.api import completions
from router.web.api.slot_demand import model_of
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import PATIENCE_S, Json, RunningRouter, running
from tests.web.api.test_faults import stopped_reading

pytestmark = pytest.mark.thorough

CHUNK = 2**18


FAKE = {"n_slots": 20}


def clients(n: int, **more: Any) -> list[Client]:
    return [Client(f"{number} asks " * 5, 3, **more) for number in range(n)]


async def left_over(kvferry: RunningRouter) -> Json:
    """Return counts of all that the router and this process hold, once the router is quiet."""
    await kvferry.until_quiet()
    engine = kvferry.router.engine
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": Counter(task.get_name().split(" ")[0] for task in asyncio.all_tasks()),
        "jobs": len(engine._scheduler.state.inventory.jobs),
        "grants": len(engine._grants),
    }


def grown(before: Json, after: Json) -> Json:
    """Return the counts that have grown. Tasks without a name of their own are left out."""
    before_tasks, after_tasks = before["tasks"], after["tasks"]
    found: Json = {key: after[key] for key in after if key != "tasks" and after[key] > before[key]}
    new = {name: n for name, n in after_tasks.items() if not name.startswith("Task-")}
    found |= {name: n for name, n in new.items() if n > before_tasks[name]}
    return found


async def until_refused(kvferry: RunningRouter, n: int) -> None:
    """Wait until `n` requests have been refused for a full queue."""
    metrics: dict[str, float] = {}
    async with asyncio.timeout(PATIENCE_S):
        while metrics.get('kvferry_requests_total{outcome="queue_full"}', 0) < n:
            metrics = await kvferry.metrics()


async def test_nothing_is_left_of_a_storm(fake: FakeLlama, tmp_path: Path) -> None:
    """Some clients disconnect at any moment, some send nothing, the rest get the right answer."""
    async with running([("a", fake.url)], tmp_path) as kvferry:
        await send(kvferry.url, clients(5))
        before = await left_over(kvferry)
        staying = await send(kvferry.url, clients(150))
        leaving = [
            Client(f"{number} leaves " * 5, 3, stays_s=0.001 * number) for number in range(150)
        ]
        left = await send(kvferry.url, leaving)
        touched = await connects(kvferry.url, 1000, 0.3)

        assert staying == {"right": 150}
        assert left["left"] > 0
        assert set(left) <= {"left", "right"}
        assert touched == {"closed": 300}
        async with asyncio.timeout(PATIENCE_S):
            while grown(before, await left_over(kvferry)):
                pass
        assert (await kvferry.state())["queue"] == []


async def test_clients_that_stop_reading_cost_a_bounded_amount(fake: FakeLlama) -> None:
    """The backend has 5 GB for twenty clients.

    Fetched bytes wait in the buffers of two connections for each client, mostly the kernel's.
    """
    fake.faults.padding_bytes = CHUNK
    async with running([("a", fake.url)], None) as kvferry, AsyncExitStack() as stack:
        for number in range(20):
            body = {"prompt": f"{number}" * 100, "n_predict": 1000, "stream": True}
            await stack.enter_async_context(stopped_reading(kvferry, body))
        sent = -1
        async with asyncio.timeout(PATIENCE_S):
            while fake.chunks_sent != sent:
                sent = fake.chunks_sent
                await asyncio.sleep(0.2)
        assert 20 <= sent < 20 * 64

        others = await kvferry.state()  # other requests are not held up
        assert [slot["phase"] for slot in others["slots"]] == ["running"] * 20
        await stack.aclose()
        await kvferry.until_quiet()
        assert fake.chunks_sent < 20 * 64


async def test_as_many_wait_as_may_and_no_more(fake: FakeLlama) -> None:
    """20 requests are served, 30 wait, and the other 30 get 503."""
    async with running([("a", fake.url)], None, yaml="queue: {max_requests: 30}") as kvferry:
        fake.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(send(kvferry.url, clients(80)))
            state = await kvferry.until(lambda state: len(state["queue"]) == 30)
            await until_refused(kvferry, 30)
            state = await kvferry.state()
            assert len(state["queue"]) == 30
            assert [slot["phase"] for slot in state["slots"]] == ["running"] * 20
            fake.decode_gate.set()
    assert asked.result() == {"right": 50, "503": 30}


async def test_one_with_five_hundred_requests_does_not_starve_another(tmp_path: Path) -> None:
    """The first client loses its last requests to the limit; then both clients alternate."""
    async with (
        FakeLlama(n_slots=1) as fake,
        running([("a", fake.url)], None, yaml="queue: {max_requests: 200}") as kvferry,
        asyncio.TaskGroup() as group,
    ):
        fake.decode_gate.clear()

        async def ask(who: str, number: int) -> int:
            body = {"prompt": f"{who} {number:03}", "n_predict": 2}
            answer = await kvferry.post("/completion", body, headers={"authorization": who})
            return answer.status

        async def until_waiting(n: int) -> None:
            await kvferry.until(lambda state: len(state["queue"]) == n)

        first = group.create_task(ask("many", 0))
        await kvferry.until(lambda state: state["slots"][0]["phase"] == "running")
        many = [group.create_task(ask("many", number)) for number in range(1, 500)]
        await until_waiting(200)
        await until_refused(kvferry, 299)
        few = [group.create_task(ask("few", number)) for number in range(5)]
        await until_refused(kvferry, 304)
        await until_waiting(200)
        fake.decode_gate.set()
        await asyncio.wait([*many, *few, first])

        assert [task.result() for task in few] == [200] * 5
        assert Counter(task.result() for task in many) == {200: 195, 503: 304}
        served = [body["prompt"] for path, body in fake.bodies if path == "/completion"]
        turns = [served.index(f"few {number:03}") for number in range(5)]
        begun = served.index("many 000")
        assert turns == sorted(turns)
        assert max(turns) - begun <= 11


@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/tokenize"])
async def test_long_bodies_are_read_off_the_loop(
    fake: FakeLlama, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Every long body is parsed in another thread."""
    here, parsed = threading.get_ident(), list[tuple[bool, bool]]()

    def noted(function: Any) -> Any:
        def call(*args: Any) -> Any:
            raw = next(arg for arg in args if isinstance(arg, bytes))
            parsed.append((len(raw) > LONG_BYTES, threading.get_ident() != here))
            return function(*args)

        return call

    monkeypatch.setattr(completions, "parse_completion", noted(parse_completion))
    monkeypatch.setattr(app, "model_of", noted(model_of))
    async with running([("a", fake.url)], None) as kvferry:
        for size in (10, LONG_BYTES + 1):
            text = "x" * size
            body: Json = {"prompt": text, "content": text, "n_predict": 1}
            body |= {"messages": [{"role": "user", "content": text}]}
            raw = io.BytesIO(json.dumps(body).encode())
            headers = {"Content-Type": "application/json"}
            async with kvferry.session.post(
                kvferry.url + path, data=raw, headers=headers
            ) as response:
                assert response.status in (200, 400)
    assert parsed == [(False, False), (True, True)]


async def test_what_takes_no_slot_goes_where_least_is_under_way(tmp_path: Path) -> None:
    """With `passthrough` no slot shows which backend is busy."""
    async with FakeLlama() as a, FakeLlama() as b:
        backends = [("a", a.url), ("b", b.url)]
        async with running(backends, None, yaml="policy: passthrough") as kvferry:
            a.decode_gate.clear()
            b.decode_gate.clear()
            async with asyncio.TaskGroup() as group, asyncio.timeout(PATIENCE_S):
                group.create_task(kvferry.complete("one"))
                await a.until(lambda: any(slot.busy for slot in a.slots))
                group.create_task(kvferry.complete("two"))
                await b.until(lambda: any(slot.busy for slot in b.slots))
                a.decode_gate.set()
                b.decode_gate.set()


def all_busy(fake: FakeLlama) -> bool:
    return all(slot.busy for slot in fake.slots)


async def test_server_that_dies_under_many_requests_leaves_no_job(tmp_path: Path) -> None:
    """More reports than one event-loop iteration takes: each is of its own attempt."""
    n = MOST + 8
    async with (
        FakeLlama(n_slots=n) as one,
        FakeLlama(n_slots=n) as other,
        running([("a", one.url), ("b", other.url)], None) as kvferry,
    ):
        one.prefill_gate.clear()
        other.prefill_gate.clear()
        async with asyncio.TaskGroup() as group:
            prompts = [f"{number} asks " * 5 for number in range(2 * n)]
            asked = [group.create_task(kvferry.complete(prompt)) for prompt in prompts]
            for fake in (one, other):
                await fake.until(partial(all_busy, fake))
            await one.go_down()
            other.prefill_gate.set()
        # One is a suspect: it is sent again once nobody else is at work.
        assert {(await answer).status for answer in asked} == {200}
        assert (await left_over(kvferry))["jobs"] == 0
