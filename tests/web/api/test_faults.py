"""Backends that die, hang and come back: clients shall see as little of it as possible."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.running_router import Answer, Json, RunningRouter, running

pytestmark = pytest.mark.thorough

PROMPT = "p" * 300
LONG = "l" * 3500  # more than policy.coalesce_above: prefilled by the router first
STREAM: Json = {"stream": True}
IMPATIENT = "limits: {first_byte_timeout: 300ms, idle_timeout: 300ms}"


@dataclass
class Two:
    """Two fakes that share a KV directory. The first request goes to `a`, by order of names."""

    a: FakeLlama
    b: FakeLlama
    kv_dir: Path

    @property
    def backends(self) -> list[tuple[str, str]]:
        return [("a", self.a.url), ("b", self.b.url)]


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    async with FakeLlama(kv_dir=tmp_path) as a, FakeLlama(kv_dir=tmp_path) as b:
        yield Two(a, b, tmp_path)
        assert a.violations == b.violations == []


def text_of(prompt: str, n: int = 8) -> str:
    return bytes(generate(list(prompt.encode()), n)).decode()


def assert_good(answer: Answer, prompt: str, backend: str) -> None:
    assert (answer.status, answer.text) == (200, text_of(prompt))
    assert answer.slot[0] == backend


async def to_a(kvferry: RunningRouter) -> None:
    """Fill a slot of `a` with PROMPT, so that the next request with PROMPT goes to `a`."""
    assert_good(await kvferry.complete(PROMPT, id_slot=0), PROMPT, "a")


async def broken_stream(kvferry: RunningRouter) -> bytes:
    """Return the bytes of a stream that must break off. Raises AssertionError at a clean end."""
    body = {"prompt": PROMPT, "n_predict": 20} | STREAM
    received = b""
    async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
        assert response.status == 200
        try:
            async for chunk in response.content.iter_any():
                received += chunk
        except aiohttp.ClientPayloadError:
            return received
    raise AssertionError(f"a clean end after {received!r}")


@asynccontextmanager
async def stopped_reading(
    kvferry: RunningRouter, body: Json, room: int = 4096
) -> AsyncIterator[socket.socket]:
    """Yield the connection of a client that has read the status of its answer and nothing more."""
    raw, parts = json.dumps(body).encode(), urlsplit(kvferry.url)
    head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        await loop.sock_connect(connection, (parts.hostname, parts.port))
        await loop.sock_sendall(connection, head.encode() + raw)
        assert (await loop.sock_recv(connection, 12)).endswith(b" 200")
        yield connection


# --- before the first byte: the client has seen nothing, so the router retries --------------------


async def test_suspect_with_an_adapter_is_sent_alone(two: Two) -> None:
    """Its prompt is not read; it may end the next server, too, with all that runs there."""
    async with running(two.backends, None) as kvferry:
        await to_a(kvferry)
        two.a.prefill_gate.clear()
        two.b.prefill_gate.clear()
        async with asyncio.TaskGroup() as group:
            lora = [{"id": 0, "scale": 1.0}]
            task = group.create_task(kvferry.complete(PROMPT, lora=lora))
            await two.a.until(lambda: any(slot.busy for slot in two.a.slots))
            await two.a.go_down()
            await two.b.until(lambda: any(slot.busy for slot in two.b.slots))
            rows = [one for one in (await kvferry.state())["slots"] if one["backend"] == "b"]
            two.b.prefill_gate.set()
        assert (await task).status == 200
        assert [one["phase"] == "idle" for one in rows] == [False, False]
        two.a.prefill_gate.set()
        await two.a.come_up()


@pytest.mark.fault(
    "only completions hang, /health is well",
    "before the first byte, past `first_byte_timeout`",
    client="the right answer",
)
@pytest.mark.parametrize("fields", [STREAM, {}], ids=["stream", "whole"])
async def test_hangs_before_the_first_byte(two: Two, fields: Json) -> None:
    """`/health` still answers ok; the timeout decides."""
    async with running(two.backends, None, yaml=IMPATIENT) as kvferry:
        two.a.faults.hang = True
        answer = await kvferry.complete(PROMPT, **fields)

        assert_good(answer, PROMPT, "b")
        await kvferry.until_quiet()


@pytest.mark.fault(
    "only completions hang, /health is well",
    "while the router has the prompt computed, past `first_byte_timeout`",
    client="the right answer",
)
@pytest.mark.parametrize("fields", [STREAM, {}], ids=["stream", "whole"])
async def test_hangs_while_the_router_has_the_prompt_computed(two: Two, fields: Json) -> None:
    """The router gives up its prefill, finds the slot idle, and sends the client's request."""
    async with running(two.backends, two.kv_dir, yaml=IMPATIENT) as kvferry:
        two.a.faults.hang = True
        answer = await kvferry.complete(LONG, **fields)

        assert_good(answer, LONG, "a" if fields else "b")  # the head was sent before
        asked = [body.get("prompt", "") for path, body in two.a.bodies if path == "/completion"]
        assert [len(prompt) for prompt in asked if len(prompt) > 3000] == [3499, 3500]
        two.a.faults.hang = False
        await kvferry.until_quiet()


@pytest.mark.fault(
    "only completions hang, /health is well",
    "after the headers of a stream, past `first_byte_timeout`",
    client="the right answer",
)
async def test_hangs_after_the_headers(two: Two) -> None:
    """The headers of a stream come before the prefill: they are not the first byte."""
    async with running(two.backends, None, yaml=IMPATIENT) as kvferry:
        two.a.prefill_gate.clear()
        answer = await kvferry.complete(PROMPT, **STREAM)

        assert_good(answer, PROMPT, "a")
        assert any(path == "/completion" for path, _ in two.b.bodies)


@pytest.mark.fault(
    "all servers fail at once", "before the first byte", client="502, 503 or 504 with Retry-After"
)
@pytest.mark.parametrize("fault", ["hang", "die_at_once"])
async def test_all_fail(two: Two, fault: str) -> None:
    """After three attempts the client gets the error."""
    async with running(two.backends, None, yaml=IMPATIENT, no_backend_s=0.1) as kvferry:
        for fake in (two.a, two.b):
            setattr(fake.faults, fault, True)
        answer = await kvferry.complete(PROMPT)

        assert answer.status in ((503, 504) if fault == "hang" else (502, 503))
        assert answer.json["error"]["code"] == answer.status
        assert int(answer.headers["Retry-After"]) >= 1
        await kvferry.until_quiet()
        for fake in (two.a, two.b):
            setattr(fake.faults, fault, False)
        await kvferry.until(lambda state: any(b["up"] for b in state["backends"]))
        # The request may be what ended them: it is not tried again at once.
        again = await kvferry.complete(PROMPT)
        assert again.status == (200 if fault == "hang" else 503)
        assert (await kvferry.complete("another")).status == 200


# --- after the first byte: sent bytes cannot be taken back ----------------------------------------


@pytest.mark.fault("closes at once", "mid-stream", client="connection broken off")
async def test_dies_in_the_middle_of_a_stream(two: Two) -> None:
    """The connection is broken off: a partial answer must not look complete."""
    async with running(two.backends, None) as kvferry:
        two.a.faults.die_after_chunks = 3
        before = dict(two.b.counts)
        received = await broken_stream(kvferry)

        assert received.count(b"data: ") == 3
        await kvferry.until_quiet()
        metrics = await kvferry.metrics()
        assert metrics['kvferry_requests_total{outcome="backend_error"}'] == 1
        assert two.b.counts == before  # no second attempt


@pytest.mark.fault(
    "only completions hang, /health is well",
    "mid-stream, past `idle_timeout`",
    client="connection broken off",
)
async def test_falls_silent_in_the_middle_of_a_stream(two: Two) -> None:
    async with running(two.backends, None, yaml=IMPATIENT) as kvferry:
        two.a.faults.hang_after_chunks = 3
        received = await broken_stream(kvferry)

        assert received.count(b"data: ") == 3
        await kvferry.until_quiet()


@pytest.mark.fault(
    "a client reads slowly, for longer than `idle_timeout`", "mid-stream", client="the whole answer"
)
async def test_a_slow_client_is_no_silent_backend(two: Two) -> None:
    """`idle_timeout` limits the silence of the backend, not of a client that does not read."""
    yaml = "limits: {idle_timeout: 100ms}"
    async with running(two.backends, None, yaml=yaml) as kvferry:
        two.a.faults.padding_bytes = 256 * 1024
        n = 200  # 50 MiB: buffers of the kernel take up to 16
        body = {"prompt": PROMPT, "n_predict": n} | STREAM
        async with kvferry.session.post(
            kvferry.url + "/completion", json=body, read_bufsize=2**14
        ) as response:
            sent = -1
            while two.a.chunks_sent != sent or not two.a.stuck:
                sent = two.a.chunks_sent
                await asyncio.sleep(0.3)  # longer than the timeout
            received = await response.read()
        assert len(received) > n * 256 * 1024
        assert b'"stop": true' in received


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_takes_nothing_does_not_keep_its_slot(two: Two, stream: bool) -> None:
    """The client is connected and does not read; an unstreamed answer was finished long before."""
    yaml = "{limits: {send_timeout: 100ms}, health: {interval: 60s}}"
    async with running(two.backends[:1], None, yaml=yaml) as kvferry:
        two.a.faults.padding_bytes = 2**18
        two.a.model = "m" * 2**24  # an unstreamed answer contains the model name
        body = {"prompt": PROMPT, "n_predict": 1000 if stream else 1, "stream": stream}
        metrics: dict[str, float] = {}
        async with stopped_reading(kvferry, body):
            while not metrics.get('kvferry_requests_total{outcome="client_gone"}'):
                metrics = await kvferry.metrics()
            state = await kvferry.until_quiet()
        assert {slot["phase"] for slot in state["slots"]} == {"idle"}
        assert not any(slot.busy for slot in two.a.slots)


async def test_a_client_that_takes_little_by_little_is_left_alone(two: Two) -> None:
    """One event is larger than what the client reads within `send_timeout`."""
    yaml = "limits: {send_timeout: 500ms}"
    async with running(two.backends[:1], None, yaml=yaml) as kvferry:
        two.a.faults.padding_bytes = 2**24
        body = {"prompt": PROMPT, "n_predict": 1} | STREAM
        async with stopped_reading(kvferry, body, 2**17) as connection:
            loop, received = asyncio.get_running_loop(), b""
            while not received.endswith(b"0\r\n\r\n"):
                data = await loop.sock_recv(connection, 2**17)
                assert data, "cut off"
                received = received[-8:] + data
                await asyncio.sleep(0.015)
        metrics = await kvferry.metrics()
        assert metrics['kvferry_requests_total{outcome="ok"}'] == 1


# --- no backend, or no free slot ------------------------------------------------------------------


@pytest.mark.fault("all servers down", "from the start", client="503 with Retry-After")
async def test_all_down(two: Two) -> None:
    async with running(two.backends, None, no_backend_s=0.2) as kvferry:
        await two.a.go_down()
        await two.b.go_down()
        await kvferry.until(lambda state: not any(b["up"] for b in state["backends"]))
        answer = await kvferry.complete(PROMPT)

        assert (answer.status, answer.json["error"]["type"]) == (503, "unavailable_error")
        assert answer.headers["Retry-After"] == "2"
        assert (await kvferry.get("/kvferry/health")).status == 503
        assert (await kvferry.get("/v1/models")).status == 503
        assert (await kvferry.state())["queue"] == []


async def test_deadline_in_the_queue(two: Two) -> None:
    async with running(two.backends[:1], None, yaml="queue: {deadline: 200ms}") as kvferry:
        two.a.decode_gate.clear()
        async with asyncio.TaskGroup() as group:
            for i in range(2):
                group.create_task(kvferry.complete(f"{i}"))
            await kvferry.until(
                lambda s: sum(slot["phase"] == "running" for slot in s["slots"]) == 2
            )
            late = await kvferry.complete("late")
            two.a.decode_gate.set()
        assert (late.status, late.json["error"]["type"]) == (504, "timeout_error")
        assert "0.2 s" in late.json["error"]["message"]


# --- backends that come and go --------------------------------------------------------------------


@pytest.mark.fault("server restarted between two looks at it", "idle", client="the right answer")
async def test_restart_between_two_looks(two: Two) -> None:
    """No check saw the backend down, but its process is another one: its slots' content is lost."""
    async with running(two.backends[:1], None) as kvferry:
        await to_a(kvferry)
        two.a.marker = "another"
        for slot in two.a.slots:
            slot.tokens = []
        await kvferry.until(lambda s: not any(slot["resident_tokens"] for slot in s["slots"]))
        await kvferry.until_up()

        answer = await kvferry.complete(PROMPT)
        assert (answer.source, answer.cached) == ("cold", 0)


@pytest.mark.fault(
    "a model is still being loaded", "when the router starts", client="others answer meanwhile"
)
async def test_loading_is_not_up(two: Two) -> None:
    two.b.faults.loading = True
    async with running(two.backends, None, wait_for=["a"]) as kvferry:
        health = (await kvferry.get("/kvferry/health")).json["backends"]
        assert health == {"a": "up", "b": "it is still loading its model; wait until it has loaded"}
        two.b.faults.loading = False
        await kvferry.until_up("b")


@pytest.mark.fault(
    "somebody else generates on a slot", "when the router starts", client="the right answer"
)
async def test_stranger_on_a_slot(two: Two) -> None:
    """A slot that another program uses is not leased until it is idle (llama-server.md 0.1)."""
    two.a.faults.hang_after_chunks = 3
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "stranger", "id_slot": 0, "n_predict": 50} | STREAM
        async with session.post(two.a.url + "/completion", json=body) as response:
            await response.content.readuntil(b"\n\n")
            async with running(two.backends[:1], two.kv_dir) as kvferry:
                state = await kvferry.state()
                assert [slot["phase"] for slot in state["slots"]] == ["abandoned", "idle"]
                for i in range(3):
                    answer = await kvferry.complete(f"{i}" * 300, n_predict=2)
                    assert answer.slot == ("a", 1)
                response.close()
                await kvferry.until(lambda s: s["slots"][0]["phase"] == "idle")
                two.a.faults.hang_after_chunks = None
                assert (await kvferry.complete("x", id_slot=0)).slot == ("a", 0)


@pytest.mark.fault(
    "somebody else generates on every slot",
    "when the router starts, and would try it out",
    client="the right answer",
)
async def test_strangers_on_every_slot(two: Two) -> None:
    """With every slot busy there is no probe. A later probe takes at most two slots away."""
    two.a.faults.hang_after_chunks = 3
    async with aiohttp.ClientSession() as session, AsyncExitStack() as strangers:
        for index in range(2):
            body = {"prompt": "stranger", "id_slot": index, "n_predict": 50} | STREAM
            response = await strangers.enter_async_context(
                session.post(two.a.url + "/completion", json=body)
            )
            await response.content.readuntil(b"\n\n")
        async with running(
            two.backends[:1], two.kv_dir, yaml="health: {interval: 20ms}"
        ) as kvferry:
            state = await kvferry.state()
            assert "every slot was busy" in state["backends"][0]["problem"]
            assert not state["backends"][0]["snapshots"]
            await strangers.aclose()
            two.a.faults.hang_after_chunks = None
            state = await kvferry.until(lambda s: s["backends"][0]["snapshots"])
            assert state["backends"][0]["problem"] is None

            await kvferry.complete(PROMPT)
            await kvferry.until(lambda s: s["snapshots"]["count"] == 1)
            await kvferry.until_quiet()
