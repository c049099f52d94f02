"""Traces of requests: the tree of spans, their attributes, and the router without tracing."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from router.telemetry.tracing import OtelTracing
from tests.support.servers.fake_llama import FakeLlama
from tests.support.servers.running_router import RunningRouter, running

PROMPT = "p" * 300
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
PARTS = ["queue wait", "prepare", "first byte", "stream"]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


FAKE = {"n_slots": 1}


@pytest.fixture
async def kvferry(
    fake: FakeLlama, tmp_path: Path, exporter: InMemorySpanExporter
) -> AsyncIterator[RunningRouter]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with running([("a", fake.url)], tmp_path, tracing=OtelTracing(provider)) as router:
        yield router


def spans(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """Return the span of the request, and the spans below it in order of time."""
    found = exporter.get_finished_spans()
    (root,) = (span for span in found if span.kind is SpanKind.SERVER)
    rest = sorted((s for s in found if s is not root), key=lambda s: s.start_time or 0)
    assert all(s.parent is not None and s.parent.span_id == ids(root)[1] for s in rest)
    return root, rest


def ids(span: ReadableSpan) -> tuple[int, int]:
    assert span.context is not None
    return span.context.trace_id, span.context.span_id


def said(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def ask(kvferry: RunningRouter, **headers: str) -> Any:
    body = {"prompt": PROMPT, "n_predict": 8, "stream": True, "model": "fake"}
    return await kvferry.post("/v1/completions", body, headers=headers)


async def test_where_the_time_of_a_request_went(
    kvferry: RunningRouter, exporter: InMemorySpanExporter
) -> None:
    answer = await ask(kvferry)
    root, parts = spans(exporter)

    assert (root.name, root.status.status_code) == ("text_completion fake", StatusCode.UNSET)
    assert [part.name for part in parts] == PARTS
    assert parts[0].start_time is not None
    assert root.start_time is not None
    assert root.end_time is not None
    assert root.start_time <= parts[0].start_time
    for one, then in pairwise(parts):
        assert one.end_time == then.start_time
    assert parts[-1].end_time is not None
    assert parts[-1].end_time <= root.end_time
    assert said(root) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.usage.input_tokens": 300,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
        "kvferry.request_id": answer.headers["x-kvferry-request-id"],
        "kvferry.backend": "a",
        "kvferry.slot": 0,
        "kvferry.source": "cold",
        "kvferry.planned_tokens": 0,
        "kvferry.outcome": "ok",
    }


async def test_span_is_inside_the_clients_trace(
    fake: FakeLlama, kvferry: RunningRouter, exporter: InMemorySpanExporter
) -> None:
    await ask(kvferry, traceparent=TRACEPARENT, tracestate="x=1")
    root, _ = spans(exporter)
    assert root.parent is not None
    assert (f"{ids(root)[0]:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)

    sent = fake.headers["/v1/completions"]
    assert sent["traceparent"] == f"00-{TRACE}-{ids(root)[1]:016x}-01"
    assert sent["tracestate"] == "x=1"


async def test_one_that_never_got_a_slot(
    fake: FakeLlama, kvferry: RunningRouter, exporter: InMemorySpanExporter
) -> None:
    await fake.go_down()
    await kvferry.until(lambda state: not state["backends"][0]["up"])
    queue = kvferry.router.engine._scheduler.state.queue
    state = kvferry.router.engine._scheduler.state.inventory
    limits = type(queue.limits)(no_backend_s=0.05)
    kvferry.router.engine.configure(state.policy, state.catalog.limits, limits)
    await kvferry.post("/v1/embeddings", {"input": PROMPT})
    root, parts = spans(exporter)

    assert (root.name, parts) == ("embeddings", [])
    assert (root.status.status_code, said(root)["error.type"]) == (StatusCode.ERROR, "no_backend")
    await fake.come_up()


async def test_a_client_that_leaves(
    fake: FakeLlama, kvferry: RunningRouter, exporter: InMemorySpanExporter
) -> None:
    fake.decode_gate.clear()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask(kvferry))
        await fake.until(lambda: fake.slots[0].busy)
        task.cancel()
        await kvferry.until(lambda state: state["slots"][0]["phase"] != "running")
        fake.decode_gate.set()
    root, parts = spans(exporter)

    assert said(root)["kvferry.outcome"] == "client_gone"
    assert [part.name for part in parts][:2] == PARTS[:2]


async def test_no_span_says_what_was_said(
    kvferry: RunningRouter, exporter: InMemorySpanExporter
) -> None:
    await ask(kvferry, Authorization="Bearer xyzzyplugh")
    for span in exporter.get_finished_spans():
        assert PROMPT[:20] not in span.to_json()
        assert "xyzzyplugh" not in span.to_json()


async def test_without_it_a_traceparent_passes_through(fake: FakeLlama, tmp_path: Path) -> None:
    async with running([("a", fake.url)], tmp_path) as kvferry:
        await ask(kvferry, traceparent=TRACEPARENT)
    sent = fake.headers["/v1/completions"]
    assert sent["traceparent"] == TRACEPARENT


async def test_to_a_collector(fake: FakeLlama) -> None:
    """Spans are sent over HTTP; those that are left are sent when the router stops."""
    from aiohttp import web

    received: list[bytes] = []

    async def collect(request: web.BaseRequest) -> web.Response:
        received.append(await request.read())
        return web.Response()

    runner = web.ServerRunner(web.Server(collect))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    yaml = f"tracing: {{endpoint: '{endpoint}'}}"
    async with running([("a", fake.url)], None, yaml=yaml) as kvferry:
        await ask(kvferry)
    await runner.cleanup()

    (body,) = received
    assert b"text_completion fake" in body
    assert b"kvferry" in body
