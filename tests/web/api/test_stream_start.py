"""A stream begins before its answer: head and pings, in the queue and while a prompt is computed.

The servers are fakes that stand still at a gate; test_stream_start.py in tests/e2e has real ones.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.support.servers.running_router import Answer, Json, RunningRouter, read_answer, running
from tests.web.api.test_faults import LONG, PROMPT, Two, text_of, two

__all__ = ["two"]

PING = b":\n\n"
QUICK_S = 0.03


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.web.server.sink.PING_S", QUICK_S)
    monkeypatch.setattr("router.web.server.sink.HEAD_S", QUICK_S / 10)


@asynccontextmanager
async def asked(
    kvferry: RunningRouter, prompt: str, path: str = "/completion", **fields: object
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the head of a stream."""
    messages = [{"role": "user", "content": prompt}]
    given: Json = {"prompt": prompt} if path == "/completion" else {"messages": messages}
    body = given | {"stream": True, "temperature": 0, "max_tokens": 8} | fields
    async with kvferry.session.post(kvferry.url + path, json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        yield response


async def rest_of(response: aiohttp.ClientResponse) -> str:
    return (await read_answer(response)).text


both = pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["sent on", "computed by the router"])


@both
async def test_its_head_says_what_is_planned(
    two: Two, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr("router.web.server.sink.PING_S", 600.0)
    async with running(two.backends, two.kv_dir) as kvferry:
        two.a.prefill_gate.clear()
        async with asked(kvferry, prompt) as response:
            two.a.prefill_gate.set()
            assert await rest_of(response) == text_of(prompt)
        assert response.headers["x-kvferry-backend"] == "a"
        assert response.headers["x-kvferry-source"] == "cold"


@both
async def test_it_pings_while_its_prompt_is_computed(two: Two, prompt: str) -> None:
    async with running(two.backends, two.kv_dir) as kvferry:
        two.a.prefill_gate.clear()
        async with asked(kvferry, prompt) as response:
            for _ in range(3):
                assert await response.content.readexactly(3) == PING
            two.a.prefill_gate.set()
            assert await rest_of(response) == text_of(prompt)
        await kvferry.until_quiet()


async def test_it_pings_in_the_queue(two: Two) -> None:
    async with running([("a", two.a.url)], None) as kvferry:
        two.a.decode_gate.clear()
        async with asyncio.TaskGroup() as before:
            for n in range(2):
                before.create_task(kvferry.complete(f"{n}" * 50))
            await kvferry.until(
                lambda state: [s["phase"] for s in state["slots"]] == ["running"] * 2
            )
            async with asked(kvferry, PROMPT) as response:
                assert await response.content.readexactly(3) == PING
                assert "x-kvferry-backend" not in response.headers  # none is chosen
                two.a.decode_gate.set()
                assert await rest_of(response) == text_of(PROMPT)


async def test_another_backend_takes_over_after_the_head(two: Two) -> None:
    async with running(two.backends, None) as kvferry:
        two.a.prefill_gate.clear()
        async with asked(kvferry, PROMPT) as response:
            assert await response.content.readexactly(3) == PING
            await two.a.go_down()
            assert await rest_of(response) == text_of(PROMPT)
        assert any(path == "/completion" for path, _ in two.b.bodies)
        two.a.prefill_gate.set()


async def test_an_error_before_the_head_is_a_status(two: Two) -> None:
    two.a.faults.refuses = "no"
    async with running([("a", two.a.url)], None) as kvferry:
        answer = await kvferry.complete(PROMPT, stream=True)
        assert (answer.status, answer.json["error"]["message"]) == (500, "no")


@pytest.mark.parametrize("interval", [-1, 0])
async def test_a_client_can_want_no_pings(two: Two, interval: int) -> None:
    async with running(two.backends, None) as kvferry:
        two.a.prefill_gate.clear()
        async with asked(kvferry, PROMPT, sse_ping_interval=interval) as quiet:
            two.b.prefill_gate.clear()
            async with asked(kvferry, PROMPT) as other:
                for _ in range(3):
                    assert await other.content.readexactly(3) == PING
                two.a.prefill_gate.set()
                two.b.prefill_gate.set()
                assert await rest_of(other) == text_of(PROMPT)
            body = await quiet.read()
        assert body.startswith(b"data: ")
        assert PING not in body


async def test_a_plain_answer_waits_for_its_end(two: Two) -> None:
    async with running(two.backends, None) as kvferry:
        two.a.prefill_gate.clear()
        async with asyncio.TaskGroup() as group:
            task: asyncio.Task[Answer] = group.create_task(kvferry.complete(PROMPT))
            await two.a.until(lambda: two.a.slots[0].busy)
            await two.a.go_down()
        answer = await task
        assert (answer.status, answer.text) == (200, text_of(PROMPT))
        assert answer.slot[0] == "b"
        two.a.prefill_gate.set()


async def test_a_client_that_leaves_after_the_head_leaves_nothing(two: Two) -> None:
    async with running([("a", two.a.url)], None) as kvferry:
        two.a.prefill_gate.clear()
        async with asked(kvferry, LONG) as response:
            assert await response.content.readexactly(3) == PING
            response.close()
        two.a.prefill_gate.set()
        await kvferry.until_quiet()
        assert (await kvferry.complete(LONG)).text == text_of(LONG)
