"""Backends with broken answers or none, and machines with a clock that is set."""

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from router.servers.program import free_port
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.fake_wire import generate
from tests.support.servers.running_router import running

PROMPT = "p" * 300
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"content": "a", "stop": false}\n\n'
RIGHT = "the right answer"
BEFORE = [
    pytest.param(raw, marks=pytest.mark.fault(what, "before the first byte", client=RIGHT), id=what)
    for what, raw in (
        ("closes at once", b""),
        ("garbage instead of HTTP", b"\x00\xff nonsense\r\n\r\n"),
        ("half a head", b"HTTP/1.1 200 OK\r\nContent-Ty"),
        ("a head and nothing after it", OK),
        ("a body shorter than it says", b"HTTP/1.1 200 OK\r\nContent-Length: 90\r\n\r\n"),
    )
]


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[FakeLlama, FakeLlama]]:
    async with FakeLlama(kv_dir=tmp_path) as a, FakeLlama(kv_dir=tmp_path) as b:
        yield a, b
        assert a.violations == b.violations == []


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("raw", BEFORE)
async def test_no_answer_at_all(
    pair: tuple[FakeLlama, FakeLlama], raw: bytes, stream: bool
) -> None:
    """Another backend answers; the broken one is used again once it is well."""
    a, b = pair
    async with running([("a", a.url), ("b", b.url)], None) as kvferry:
        a.faults.says = raw
        answer = await kvferry.complete(PROMPT, stream=stream)
        assert (answer.status, answer.slot[0]) == (200, "b")
        assert answer.text == bytes(generate(list(PROMPT.encode()), 8)).decode()
        await kvferry.until_quiet()
        a.faults.says = None
        assert (await kvferry.complete("other", id_slot=0)).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(
            OK + raw,
            marks=pytest.mark.fault(what, "mid-stream", client="connection broken off"),
            id=what,
        )
        for what, raw in (
            ("half an SSE event", b"%x\r\n%b\r\n14\r\ndata: {" % (len(EVENT), EVENT)),
            ("garbage instead of HTTP", b"%x\r\n%b\r\nnonsense" % (len(EVENT), EVENT)),
            ("no last chunk", b"%x\r\n%b\r\n" % (len(EVENT), EVENT)),
        )
    ],
)
async def test_half_an_answer(pair: tuple[FakeLlama, FakeLlama], raw: bytes) -> None:
    """Complete events are passed on, and the client's stream gets no proper end."""
    a, b = pair
    async with running([("a", a.url), ("b", b.url)], None) as kvferry:
        a.faults.says = raw
        body = {"prompt": PROMPT, "stream": True}
        async with kvferry.session.post(kvferry.url + "/completion", json=body) as response:
            assert await response.content.readexactly(len(EVENT)) == EVENT
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        await kvferry.until_quiet()
        metrics = await kvferry.metrics()
        assert metrics['kvferry_requests_total{outcome="backend_error"}'] == 1
        a.faults.says = None
        assert (await kvferry.complete(PROMPT)).status == 200


@pytest.mark.parametrize(
    ("url", "told"),
    [
        pytest.param(
            *(url, told), marks=pytest.mark.fault(what, "from the start", client=RIGHT), id=what
        )
        for what, url, told in (
            (
                "connection refused",
                f"http://127.0.0.1:{free_port()}",
                "no process listens on this host and port; ",
            ),
            (
                "a name that does not resolve",
                "http://kvferry-test.invalid:8081",
                "its host name is not known; ",
            ),
        )
    ],
)
async def test_a_backend_that_cannot_be_reached(
    pair: tuple[FakeLlama, FakeLlama], url: str, told: str
) -> None:
    backends = [("a", url), ("b", pair[1].url)]
    async with running(backends, pair[1].kv_dir, wait_for=["b"]) as kvferry:
        answers = [await kvferry.complete(f"{n}" * 300) for n in range(3)]
        assert {(answer.status, answer.slot[0]) for answer in answers} == {(200, "b")}
        health = (await kvferry.get("/kvferry/health")).json["backends"]
        assert health["a"].startswith(told)
        assert health["b"] == "up"


DAY_S = 86_400.0


@pytest.mark.fault("wall clock set a day forth, then two back", "between requests", client=RIGHT)
async def test_a_clock_that_is_set(
    pair: tuple[FakeLlama, FakeLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wait and no expiry uses the wall clock; ages of snapshots are never negative."""
    clock = [1_790_000_000.0]
    for module in (
        "router.assembly.parts",
        "router.assembly.web",
        "router.web.server.relayed_response",
        "router.base.clock",
    ):
        monkeypatch.setattr(f"{module}.wall_now", lambda: clock[0])
    a = pair[0]
    yaml = "queue: {deadline: 5m}"
    async with running([("a", a.url)], a.kv_dir, yaml=yaml) as kvferry:
        for number, jump in enumerate((0.0, DAY_S, -2 * DAY_S), 1):
            clock[0] += jump
            prompt = f"{number}" * 300
            answer = await kvferry.complete(prompt)
            assert (answer.status, answer.cached) == (200, 0)
            await kvferry.until(lambda s, n=number: s["snapshots"]["count"] == n)  # type: ignore[misc]
            rows = (await kvferry.get("/kvferry/snapshots")).json["snapshots"]
            assert len(rows) == number
            assert all(row["age_s"] >= 0 for row in rows)
            negative = {name for name, value in (await kvferry.metrics()).items() if value < 0}
            assert negative == set()
        older = await kvferry.post(
            "/kvferry/snapshots/purge", {"older_than": "1h", "dry_run": True}
        )
        assert older.json["count"] == 0
        again = await kvferry.complete("1" * 300, id_slot=0)
        assert again.cached == 299
        clock[0] += 3 * DAY_S
        assert (await kvferry.get("/kvferry/requests")).status == 200
    async with running([("a", a.url)], a.kv_dir, yaml=yaml) as kvferry:
        assert (await kvferry.state())["snapshots"]["count"] == 3
