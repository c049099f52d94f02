"""Errors in a request are reported at once, in the OpenAI shape, and cost nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import (
    Answer,
    RunningRouter,
    is_quiet,
    read_answer,
    running,
)

CHAT = "/v1/chat/completions"
LIMITS = "limits: {max_body: 64KiB, body_timeout: 200ms}"


FAKE = {"n_ctx": 1024}


@pytest.fixture
async def kvferry(fake: FakeLlama, tmp_path: Path) -> AsyncIterator[RunningRouter]:
    """Yield a router; afterwards nothing is held, and nothing has run since the attach."""
    async with running([("a", fake.url)], tmp_path, yaml=LIMITS) as router:
        before = dict(fake.counts)
        yield router
        assert is_quiet(await router.state())
        assert dict(fake.counts) == before


async def send(
    kvferry: RunningRouter, raw: bytes, content_type: str = "application/json"
) -> Answer:
    headers = {"Content-Type": content_type}
    async with kvferry.session.post(kvferry.url + CHAT, data=raw, headers=headers) as response:
        return await read_answer(response)


def assert_refused(answer: Answer, status: int, kind: str, *words: str) -> None:
    error = answer.json["error"]
    assert (answer.status, error["code"], error["type"]) == (status, status, kind)
    for word in words:
        assert word in error["message"]
    assert answer.headers["x-kvferry-request-id"]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{bad", "not valid JSON"),
        (b'{"messages": [}', "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "an array"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"7", "a number"),
        (b"true", "a boolean"),
        (b"[" * 5000, "not valid JSON"),
    ],
)
async def test_body_that_is_no_json_object(kvferry: RunningRouter, raw: bytes, words: str) -> None:
    assert_refused(await send(kvferry, raw), 400, "invalid_request_error", words)


async def test_the_content_type_that_explains_it_is_named(kvferry: RunningRouter) -> None:
    answer = await send(kvferry, b"prompt=x", "application/x-www-form-urlencoded")

    assert_refused(answer, 400, "invalid_request_error", "x-www-form-urlencoded", "send app")


async def test_body_over_the_limit(kvferry: RunningRouter) -> None:
    answer = await send(kvferry, b'{"a":"' + b"x" * 70_000 + b'"}')

    assert_refused(answer, 413, "invalid_request_error", "65536", "limits.max_body")


async def test_gzip_that_is_none(kvferry: RunningRouter) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    async with kvferry.session.post(
        kvferry.url + CHAT, data=b"no gzip", headers=headers
    ) as response:
        answer = await read_answer(response)
    assert_refused(answer, 400, "invalid_request_error", "Content-Encoding")


async def test_body_that_does_not_arrive(kvferry: RunningRouter) -> None:
    """A client that stops in mid-body gets an error, and holds nothing meanwhile."""

    async def stalled() -> AsyncIterator[bytes]:
        yield b'{"messages": ['
        await asyncio.Event().wait()

    async with kvferry.session.post(kvferry.url + CHAT, data=stalled()) as response:
        assert_refused(await read_answer(response), 408, "invalid_request_error", "body_timeout")


async def test_client_that_leaves_in_the_middle_of_its_body(kvferry: RunningRouter) -> None:
    reader, writer = await kvferry.connect()
    writer.write(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
    await writer.drain()
    writer.close()
    await reader.read()
    await writer.wait_closed()


async def test_an_expectation_that_nobody_knows(kvferry: RunningRouter) -> None:
    headers = {"Expect": "202-checking"}
    async with kvferry.session.post(kvferry.url + CHAT, data=b"{}", headers=headers) as response:
        assert_refused(await read_answer(response), 417, "invalid_request_error", "100-continue")


async def test_prompt_longer_than_the_context(kvferry: RunningRouter) -> None:
    """The refusal precedes any lease: no slot is emptied for it (llama-server.md section 2.3)."""
    answer = await kvferry.complete("x" * 1024)

    assert_refused(answer, 400, "exceed_context_size_error", "(1024 tokens)")
    assert (answer.json["error"]["n_prompt_tokens"], answer.json["error"]["n_ctx"]) == (1024, 1024)


async def test_two_models(fake: FakeLlama, tmp_path: Path) -> None:
    """(1) A known name goes to its backend. (2) An unknown name is an error that lists the names.
    (3) Without a name any backend may serve."""
    async with (
        FakeLlama(kv_dir=tmp_path, model="other") as other,
        running([("a", fake.url), ("b", other.url)], tmp_path) as kvferry,
    ):
        for model, backend in (("fake", "a"), ("other", "b")):
            assert (await kvferry.complete("x", model=model)).slot[0] == backend
        answer = await kvferry.complete("x", model="gpt-4")
        assert_refused(answer, 404, "model_not_found", "'gpt-4'", "fake, other")
        assert (await kvferry.complete("x")).status == 200
        models = await kvferry.get("/v1/models")
        assert [model["id"] for model in models.json["data"]] == ["fake", "other"]
        tokenized = await kvferry.post("/tokenize", {"content": "x", "model": "other"})
        assert tokenized.headers["x-kvferry-backend"] == "b"
        assert (await kvferry.post("/tokenize", {"content": "x", "model": "no"})).status == 404


async def test_every_refusal_is_counted(kvferry: RunningRouter) -> None:
    await send(kvferry, b"{bad")
    await kvferry.get("/slots/0")
    await kvferry.complete("x" * 2000)

    metrics = await kvferry.metrics()
    for outcome in ("bad_request", "forbidden", "context_too_long"):
        assert metrics[f'kvferry_requests_total{{outcome="{outcome}"}}'] == 1


async def test_a_dry_run_of_a_bad_request(kvferry: RunningRouter) -> None:
    answer = await kvferry.post("/kvferry/plan?path=/slots", {})
    assert_refused(answer, 400, "invalid_request_error", "/slots")
    async with kvferry.session.post(kvferry.url + "/kvferry/plan", data=b"{bad") as response:
        assert_refused(await read_answer(response), 400, "invalid_request_error")
