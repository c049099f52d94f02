"""Requests that come while no backend is up: they wait for one, and lose nothing by it."""

import asyncio
from pathlib import Path

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.running_router import Answer, RunningRouter, running

PROMPT = "p" * 300


def assert_good(answer: Answer) -> None:
    said = bytes(generate(list(PROMPT.encode()), 8)).decode()
    assert (answer.status, answer.text) == (200, said)


async def down(kvferry: RunningRouter, fake: FakeLlama) -> None:
    """Stop the backend, and wait until the router knows."""
    await fake.go_down()
    await kvferry.until(lambda state: not state["backends"][0]["up"])


async def test_request_waits_for_a_backend_that_comes_back(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None) as kvferry:
        await down(kvferry, fake)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT))
            await kvferry.until(lambda state: state["waiting_for_backend"] == 1)
            assert (await kvferry.metrics())["kvferry_queue_depth"] == 1
            await fake.come_up()
        assert_good(await task)


async def test_what_came_during_an_outage_is_read_before_it_is_served(
    fake: FakeLlama, tmp_path: Path
) -> None:
    """Regression: the request was queued unread, and served without the snapshot of its prompt."""
    async with running([("a", fake.url)], tmp_path) as kvferry:
        assert_good(await kvferry.complete(PROMPT))
        await kvferry.until(lambda state: state["snapshots"]["count"] == 1)
        await kvferry.until_quiet()
        await down(kvferry, fake)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT))
            await kvferry.until(lambda state: state["waiting_for_backend"] == 1)
            await fake.come_up()
        answer = await task
        assert_good(answer)
        assert (answer.source, answer.cached) == ("snapshot", len(PROMPT) - 1)


async def test_waiting_for_the_first_backend_of_all(fake: FakeLlama) -> None:
    """With one model any name is accepted, even before that model is known."""
    fake.faults.loading = True
    async with running([("a", fake.url)], None, wait_for=[]) as kvferry:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT, model="any"))
            await kvferry.until(lambda state: state["waiting_for_backend"] == 1)
            fake.faults.loading = False
        answer = await task
        assert_good(answer)
        assert answer.source == "cold"


async def test_where_nothing_is_read_a_request_waits_in_the_queue(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None, yaml="tokenizer: {mode: 'off'}") as kvferry:
        await down(kvferry, fake)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT))
            await kvferry.until(lambda state: len(state["queue"]) == 1)
            await fake.come_up()
        answer = await task
        assert_good(answer)
        assert answer.source == "none"


async def test_no_more_wait_for_a_backend_than_may_wait(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None, yaml="queue: {max_requests: 1}") as kvferry:
        await down(kvferry, fake)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT))
            await kvferry.until(lambda state: state["waiting_for_backend"] == 1)
            refused = await kvferry.complete("one too many")
            task.cancel()
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        await kvferry.until_quiet()


async def test_nobody_waits_for_a_backend_when_the_router_stops(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None) as kvferry:
        await down(kvferry, fake)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(kvferry.complete(PROMPT))
            await kvferry.until(lambda state: state["waiting_for_backend"] == 1)
            await kvferry.router.stop()
        answer = await task
        assert answer.status == 503
        assert "stopping" in answer.json["error"]["message"]


async def test_the_wait_is_over_once(fake: FakeLlama) -> None:
    """The request does not wait again in the queue: 503 comes after `queue.no_backend_wait`."""
    async with running([("a", fake.url)], None, no_backend_s=0.5) as kvferry:
        await down(kvferry, fake)
        begun = asyncio.get_running_loop().time()
        answer = await kvferry.complete(PROMPT)
        took_s = asyncio.get_running_loop().time() - begun

        assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
        assert 0.5 <= took_s < 1.0


async def test_a_dry_run_does_not_wait(fake: FakeLlama) -> None:
    async with running([("a", fake.url)], None) as kvferry:
        await down(kvferry, fake)
        answer = await kvferry.post("/kvferry/plan?path=/completion", {"prompt": PROMPT})

        assert answer.json["unknown"] == "no backend to tokenize with"
